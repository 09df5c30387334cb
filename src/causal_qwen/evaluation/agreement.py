"""Agreement of the two deterministic choices, of the scores and of the logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from causal_qwen.calibration.positions import labelled_positions
from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM

__all__ = ["mode_agreement"]

AGREEMENT_POSITIONS = 128  # scored at once


@torch.no_grad()
def mode_agreement(model: CausalQwen2ForCausalLM, batches: Iterable[Mapping[str, Any]]) -> float:
    """Share of labelled positions at which "standard" and "compatible" choose the same token: 1 after
    conversion, and NaN of nothing.

    Training moves scale_S apart by token, and with it the two choices; a low share says that the logits are
    no longer what the model decides by.
    """
    same, count = 0, 0
    for positions in labelled_positions(model, batches):
        for part in torch.arange(len(positions.labels)).split(AGREEMENT_POSITIONS):
            U, U0 = positions.U_noisy[part], positions.U0[part]
            standard = model.action.z_scores(model.action.scores(U, U0, model.lm_head.weight)).argmax(-1)
            same += int((standard == model.token_logits(positions.U[part].loc).argmax(-1)).sum())
            count += len(part)
    return same / count if count else math.nan
