"""Sentences in two worlds: features of a frozen backbone, and number heads that are solved on one of them.

What comes before the treatment is read once for both worlds. Features do not depend on outcomes, so that many
simulations share them. A head is solved by the functions that training calls; which value space, and whether
one head serves both worlds or each has its own, is chosen by the likelihood of left-out factual rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from causal_qwen.calibration import rounding_errors
from causal_qwen.calibration.cauchy_regression import CauchyRegression, cauchy_regression
from causal_qwen.calibration.number_head import NOISE_ROWS, SURVIVED, Rounding, support_of
from causal_qwen.cauchy import Cauchy
from causal_qwen.conversion import load_model
from causal_qwen.counterfactual.numbers import CounterfactualNumbers, NumberLaws, between_worlds
from causal_qwen.data import BadRows, Collator, Encoder, Reading, batches_of
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.support import NumberSupport
from causal_qwen.value_space import ValueSpace
from measure import watched

BATCH = 16
CHOOSING_FOLDS, FOLDS = 5, 10
STRENGTHS = (1e-3, 1e-4, 1e-5)
KINDS: tuple[Literal["linear", "log"], ...] = ("linear", "log")
Array = np.ndarray[Any, Any]


class Causes(NamedTuple):
    """Of sentences in both worlds."""

    loc_U: Tensor  # (N, 2, D) at the end of each sentence
    errors: Tensor  # (P, n, D) what bfloat16 and int8 change in some of them, which a head leaves alone

    @property
    def rounding(self) -> Rounding:
        """As `solve` takes it."""
        return Rounding.of(list(self.errors))


@torch.no_grad()
def both_worlds(base: str, sentences: Sequence[str], clauses: Sequence[str], keep: Path | None) -> Causes:
    """What the base infers of each sentence with either clause.

    Args:
        base: What `load_model` takes.
        sentences: Before the treatment.
        clauses: Untreated, treated.
        keep: File that features are kept in; they are read from it where it exists.
    """
    if keep is not None and keep.is_file():
        kept = np.load(keep)
        return Causes(*(torch.from_numpy(kept[name]) for name in Causes._fields))
    model, processor = load_model(base)
    tokenizer, backbone = processor.tokenizer, model.model
    heads, tails = (
        [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        for texts in (sentences, clauses)
    )
    order = sorted(range(len(heads)), key=lambda index: len(heads[index]))
    causes = torch.empty(len(heads), len(tails), model.config.causal_size)
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    for batch in watched(batches, "sentences"):
        longest = max(len(heads[index]) for index in batch)
        padding = [longest - len(heads[index]) for index in batch]
        ids = [[0] * pad + heads[index] for pad, index in zip(padding, batch, strict=True)]
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        read = backbone(input_ids=torch.tensor(ids), attention_mask=mask, use_cache=True).past_key_values
        for world, tail in enumerate(tails):
            whole = torch.cat([mask, torch.ones(len(batch), len(tail), dtype=mask.dtype)], dim=1)
            states = backbone(
                input_ids=torch.tensor([tail] * len(batch)),
                attention_mask=whole,
                past_key_values=copy.deepcopy(read),
                use_cache=True,
            ).last_hidden_state[:, -1]
            causes[batch, world] = model.abduction(states)[0].loc
    found = Causes(causes, _errors(model, processor, sentences, clauses))
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
        np.savez(keep, **{name: part.numpy() for name, part in found._asdict().items()})
    return found


def _errors(model: Any, processor: Any, sentences: Sequence[str], clauses: Sequence[str]) -> Tensor:
    """As training measures it, on 32 rows."""
    written = CausalQwen2Processor(processor.tokenizer, numbers="written")
    rows = [
        {"text": sentence + clauses[index % 2], "number": index}
        for index, sentence in enumerate(sentences[:NOISE_ROWS])
    ]
    encoded = list(Encoder(written, Reading("{text!s} {number}", "number")).rows(rows, BadRows()))
    errors = rounding_errors(model, batches_of(encoded, Collator.of(written), BATCH))
    return torch.stack([errors[name] for name in SURVIVED])


@dataclass(frozen=True)
class Fit:
    """Heads of both worlds, which may be the same one."""

    space: ValueSpace
    heads: tuple[CauchyRegression, CauchyRegression]
    support: tuple[NumberSupport, float] | None  # of one head for both worlds
    log_likelihood: float  # of a left-out factual number, mean

    @property
    def name(self) -> str:
        """What was chosen."""
        return f"{self.space.kind}, {'one head' if self.heads[0] is self.heads[1] else 'two heads'}"

    def laws(self, loc_U: Tensor, world: Array) -> NumberLaws:
        """Of causes (N, 2, D), each in its world (N,)."""
        parts = [self._of(loc_U[:, index].double(), self.heads[index]) for index in (0, 1)]
        both = NumberLaws.cat(parts)
        return both[torch.from_numpy(world) * len(loc_U) + torch.arange(len(loc_U))]

    def _of(self, x: Tensor, head: CauchyRegression) -> NumberLaws:
        Y = Cauchy(x @ head.slope + head.intercept, torch.full((len(x),), head.scale, dtype=torch.float64))
        folds = x @ head.fold_slopes.T + head.fold_intercepts
        coordinates = self.support[0].coordinates(x, self.support[1]) if self.support else None
        return NumberLaws(Y, torch.zeros(len(x)), folds, None, coordinates)

    def medians(self, loc_U: Tensor) -> Array:
        """(N, 2) predictions in both worlds."""
        count = len(loc_U)
        worlds = [self.laws(loc_U, np.full(count, index)).Y.loc for index in (0, 1)]
        return self.space.decode(torch.stack(worlds, dim=1)).numpy()

    def otherwise(self, loc_U: Tensor, world: Array, observed: Array) -> CounterfactualNumbers:
        """What numbers that were observed in one world would have been in the other."""
        before, after = self.laws(loc_U, world), self.laws(loc_U, 1 - world)
        return between_worlds(torch.from_numpy(observed).double(), before, after, space=self.space)


def solve(
    loc_U: Tensor,
    world: Array,
    outcome: Array,
    *,
    rounding: Rounding | None = None,
    heads: Sequence[int] = (1, 2),
) -> Fit:
    """The fit under which left-out factual rows are likeliest, solved once more with folds for its error.

    Args:
        loc_U: (N, 2, D) of both worlds, of which each row's own is read.
        world: (N,) 0 or 1, the one that happened.
        outcome: (N,) what was observed in it.
        rounding: Of `Causes`.
        heads: 1: one head for both worlds; 2: one for each.
    """
    rows = torch.arange(len(world))
    x, values = loc_U[rows, torch.from_numpy(world)], torch.from_numpy(outcome).double()
    noise = None if rounding is None else rounding.moment
    every = torch.ones(len(world), dtype=torch.bool)
    divisions = {1: [every], 2: [torch.from_numpy(world == index) for index in (0, 1)]}
    best: tuple[float, ValueSpace, list[Tensor], list[CauchyRegression]] | None = None
    for kind in KINDS:
        space = ValueSpace.fit(kind, values)
        y = space.encode(values)
        # Of the number itself, not of its standardised g: both kinds are measured alike.
        jacobian = -math.log(space.spread) - (float(values.abs().log1p().mean()) if kind == "log" else 0.0)
        for count in heads:
            parts = divisions[count]
            fits = [
                cauchy_regression(x[part], y[part], strengths=STRENGTHS, noise=noise, folds=CHOOSING_FOLDS)
                for part in parts
            ]
            shares = [float(part.double().mean()) for part in parts]
            likelihood = sum(s * fit.log_likelihood for s, fit in zip(shares, fits, strict=True)) + jacobian
            if best is None or likelihood > best[0]:
                best = (likelihood, space, parts, fits)
    assert best is not None
    likelihood, space, parts, fits = best
    y = space.encode(values)
    final = [
        cauchy_regression(x[part], y[part], strengths=(fit.strength,), noise=noise, folds=FOLDS)
        for part, fit in zip(parts, fits, strict=True)
    ]
    support = None
    if len(parts) == 1:
        support = support_of(x, final[0], rounding)
    return Fit(space, (final[0], final[-1]), support, likelihood)
