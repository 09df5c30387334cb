"""Parity: a converted model measured against its base, position by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from causal_qwen.calibration.text import windows
from causal_qwen.cauchy import Cauchy
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
    others = torch.arange(len(reference.head), device=model.device) != model.config.num_token_id
    positions = sum(map(len, reference.features))
    # Made at once: small results that stay between large ones that go keep malloc from giving memory back.
    measured = torch.empty(positions, len(Measured._fields), dtype=torch.float64)
    done = 0
    with watch("comparing", positions) as advance:
        for window, z in zip(reference.windows, reference.features, strict=True):
            outputs = model(input_ids=window[None, :-1].to(model.device), output_logits=False)
            labels = window[1:].to(model.device)
            for start in range(0, len(labels), POSITIONS):
                block = slice(start, start + POSITIONS)
                expected = exact(torch.nn.functional.linear(z[block], reference.head))  # (n, V)
                laws = (outputs.U[0, block], outputs.U0[0, block])
                rows = torch.stack(_measure(model, *laws, labels[block], expected, others), dim=-1)
                measured[done : done + len(rows)] = rows
                done += len(rows)
                advance(len(rows))
    columns = Measured(*measured.unbind(-1))
    return Parity(
        positions=positions,
        max_abs_logit_diff=columns.logit_diff.max().item(),
        argmax_agreement=columns.agreement.mean().item(),
        ovr_prob_sum_median=columns.prob_sum.float().median().item(),
        ovr_loss=columns.ovr_loss.mean().item(),
        softmax_nll=columns.nll.mean().item(),
        added_parameters_fraction=added_fraction(model, reference.parameters),
        dtype=str(model.dtype).removeprefix("torch."),
    )


class Measured(NamedTuple):
    """What is measured of each position, (N,) each."""

    logit_diff: Tensor
    agreement: Tensor
    prob_sum: Tensor
    ovr_loss: Tensor
    nll: Tensor


def _measure(
    model: CausalLM, U: Cauchy, U0: Cauchy, labels: Tensor, expected: Tensor, others: Tensor
) -> Measured:
    """Of a few positions: U (n, D), U0 and labels (n,), the base's logits (n, V); others than <NUM> (V,)."""
    logits = exact(model.token_logits(U.loc))  # (n, V) or (n, V + 1)
    difference = (logits[:, : expected.shape[-1]] - expected).abs_().masked_fill_(~others, 0)
    S = model.action.scores(model.action.exogenous(U), U0, model.lm_head.weight, impl="fused")
    return Measured(
        difference.amax(-1).double(),
        (model.action.z_scores(S).argmax(-1) == expected.argmax(-1)).double(),
        S.sf(model.action.threshold).sum(-1).double(),
        ovr_terms(S, model.action.threshold, labels).double(),
        torch.nn.functional.cross_entropy(logits, labels, reduction="none").double(),
    )
