"""Parity: a converted model measured against its base, position by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from causal_qwen.calibration.text import windows
from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion.sources import Base
from causal_qwen.conversion.transfer import added_parameters
from causal_qwen.heads import exact
from causal_qwen.losses import ovr_terms

__all__ = ["Parity", "measure_parity"]

POSITIONS = 32  # per block of (positions, V) tensors


@dataclass(frozen=True)
class Parity:
    """How a converted model compares with its base on a text.

    Args:
        positions: Positions measured.
        max_abs_logit_diff: Largest difference of a logit; <NUM>, which the base does not have, is left out.
        argmax_agreement: Share of positions whose deterministic choice, argmax (loc_S − C)/scale_S, is the
            base's.
        ovr_prob_sum_median: Median of ΣP_k; 1 for a calibrated model.
        ovr_loss: One-vs-Rest loss per position.
        softmax_nll: Cross-entropy of the text under ``logits``, in nats per token.
        added_parameters_fraction: New parameters relative to the base's.
        dtype: Of the backbone.
    """

    positions: int
    max_abs_logit_diff: float
    argmax_agreement: float
    ovr_prob_sum_median: float
    ovr_loss: float
    softmax_nll: float
    added_parameters_fraction: float
    dtype: str


@torch.no_grad()
def measure_parity(model: CausalLM, base: Base, text: str) -> Parity:
    """Run both models over windows of ``text`` and compare what they say of the next token.

    Args:
        model: Converted from ``base``.
        base: The base, in the same dtype.
        text: Ordinary text that was not calibrated on.
    """
    num_token_id = model.config.num_token_id
    diffs, agreements, prob_sums, losses, nlls = [], [], [], [], []
    for window in windows(base.tokenizer, text):
        input_ids, labels = window[None, :-1].to(model.device), window[1:].to(model.device)
        outputs = model(input_ids=input_ids, output_logits=False)
        z = base.model.model(input_ids=input_ids).last_hidden_state[0]
        laws = (outputs.U[0], outputs.U0[0])
        for start in range(0, len(labels), POSITIONS):
            block = slice(start, start + POSITIONS)
            U, U0 = (law[block] for law in laws)
            expected = exact(base.model.lm_head(z[block]))  # (n, V)
            logits = exact(model.token_logits(U.loc))  # (n, V) or (n, V + 1)
            known = torch.arange(expected.shape[-1], device=expected.device) != num_token_id
            diffs.append((logits[:, : expected.shape[-1]] - expected)[:, known].abs().max())
            S = model.action.scores(model.action.exogenous(U), U0, model.lm_head.weight, impl="fused")
            agreements.append(model.action.z_scores(S).argmax(-1) == expected.argmax(-1))
            prob_sums.append(S.sf(model.action.threshold).sum(-1))
            losses.append(ovr_terms(S, model.action.threshold, labels[block]))
            nlls.append(torch.nn.functional.cross_entropy(logits, labels[block], reduction="none"))
    return Parity(
        positions=sum(map(len, losses)),
        max_abs_logit_diff=torch.stack(diffs).max().item(),
        argmax_agreement=torch.cat(agreements).double().mean().item(),
        ovr_prob_sum_median=torch.cat(prob_sums).median().item(),
        ovr_loss=torch.cat(losses).double().mean().item(),
        softmax_nll=torch.cat(nlls).double().mean().item(),
        added_parameters_fraction=added_parameters(model, base) / base.model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
    )
