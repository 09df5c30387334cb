"""Parity: a converted model measured against its base, position by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from causal_qwen.calibration.text import windows
from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion.sources import Base
from causal_qwen.conversion.transfer import added_fraction
from causal_qwen.heads import exact
from causal_qwen.losses import ovr_terms
from causal_qwen.progress import Watch, unwatched

__all__ = ["Parity", "Reference", "compare", "measure_parity", "remember"]

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


class Reference(NamedTuple):
    """What a base says of a text, without the base: it can be let go before a converted model is loaded."""

    windows: list[Tensor]  # (T + 1,) token ids each
    features: list[Tensor]  # (T, H) backbone features of all but the last token of a window
    head: Tensor  # (V, H)
    parameters: int


@torch.no_grad()
def remember(base: Base, text: str, *, watch: Watch = unwatched) -> Reference:
    """The features of windows of ``text``, and the matrix that makes logits of them.

    Args:
        base: Left unchanged; nothing but its head is held.
        text: Ordinary text that was not calibrated on.
        watch: Told of the windows.
    """
    stretches = windows(base.tokenizer, text)
    features = []
    with watch("running the base", len(stretches)) as advance:
        for window in stretches:
            input_ids = window[None, :-1].to(base.model.device)
            features.append(base.model.model(input_ids=input_ids).last_hidden_state[0])
            advance(1)
    return Reference(stretches, features, base.model.lm_head.weight, base.model.num_parameters())


def measure_parity(model: CausalLM, base: Base, text: str, *, watch: Watch = unwatched) -> Parity:
    """Run both models over windows of ``text`` and compare what they say of the next token.

    Args:
        model: Converted from ``base``.
        base: The base, in the same dtype.
        text: Ordinary text that was not calibrated on.
        watch: Told of the windows.
    """
    return compare(model, remember(base, text, watch=watch), watch=watch)


@torch.no_grad()
def compare(model: CausalLM, reference: Reference, *, watch: Watch = unwatched) -> Parity:
    """Run a converted model over the windows of a reference.

    Args:
        model: Converted from the base of ``reference``, in the same dtype.
        reference: Of `remember`.
        watch: Told of the positions.
    """
    num_token_id = model.config.num_token_id
    others = torch.arange(len(reference.head), device=model.device) != num_token_id
    diffs, agreements, prob_sums, losses, nlls = [], [], [], [], []
    with watch("comparing", sum(map(len, reference.features))) as advance:
        for window, z in zip(reference.windows, reference.features, strict=True):
            input_ids, labels = window[None, :-1].to(model.device), window[1:].to(model.device)
            outputs = model(input_ids=input_ids, output_logits=False)
            laws = (outputs.U[0], outputs.U0[0])
            for start in range(0, len(labels), POSITIONS):
                block = slice(start, start + POSITIONS)
                U, U0 = (law[block] for law in laws)
                expected = exact(torch.nn.functional.linear(z[block], reference.head))  # (n, V)
                logits = exact(model.token_logits(U.loc))  # (n, V) or (n, V + 1)
                diffs.append(_largest_difference(logits[:, : expected.shape[-1]], expected, others))
                S = model.action.scores(model.action.exogenous(U), U0, model.lm_head.weight, impl="fused")
                agreements.append(model.action.z_scores(S).argmax(-1) == expected.argmax(-1))
                del expected
                nlls.append(torch.nn.functional.cross_entropy(logits, labels[block], reduction="none"))
                del logits
                prob_sums.append(S.sf(model.action.threshold).sum(-1))
                losses.append(ovr_terms(S, model.action.threshold, labels[block]))
                advance(len(labels[block]))
    return Parity(
        positions=sum(map(len, losses)),
        max_abs_logit_diff=torch.stack(diffs).max().item(),
        argmax_agreement=torch.cat(agreements).double().mean().item(),
        ovr_prob_sum_median=torch.cat(prob_sums).median().item(),
        ovr_loss=torch.cat(losses).double().mean().item(),
        softmax_nll=torch.cat(nlls).double().mean().item(),
        added_parameters_fraction=added_fraction(model, reference.parameters),
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _largest_difference(logits: Tensor, expected: Tensor, others: Tensor) -> Tensor:
    """Of all rows but <NUM>'s, which the base does not have."""
    return (logits - expected).abs_().masked_fill_(~others, 0).max()
