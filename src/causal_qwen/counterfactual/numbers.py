"""Counterfactuals of numbers: this one was observed; what would it have been under another prompt?

By the number's law, Y = loc_Y + scale_Y·ε with ε standard Cauchy. An observed value v says who it was:
ε = (g(v) − loc_Y)/scale_Y, a rank among all who could have stood there. Under another prompt the same
individual has g(v') = loc_Y' + scale_Y'·ε. No search and no draw: two forward passes, for whole tables.

How well the difference of the two loc_Y is known is another matter: heads that were each solved without a
part of the rows say by how much it varies, and the ridge says how much of it no row speaks for. This module
does not know how text is generated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from string import Formatter
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy, central_multiple
from causal_qwen.causal_lm import CausalLM
from causal_qwen.context import check_context
from causal_qwen.counterfactual.evidence import AbductionError
from causal_qwen.counterfactual.interventions import check_prompts
from causal_qwen.counterfactual.redrawing import RedrawnLaw
from causal_qwen.data import (
    BadRows,
    Collator,
    Encoded,
    Prompt,
    Reading,
    encode_prompt,
    prompt_row,
    windows_by_length,
)
from causal_qwen.data.fields import field, number_in
from causal_qwen.data.rows import Row
from causal_qwen.decoder.engine import Engine
from causal_qwen.heads import exact
from causal_qwen.intervals import farthest, leverage
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.value_space import ValueSpace

__all__ = [
    "CounterfactualNumbers",
    "NumberLaws",
    "between_worlds",
    "counterfactual_number",
    "counterfactual_numbers",
]

Noise = Literal["kept", "redrawn"]
INPUTS = ("input_ids", "attention_mask", "numeric_values")


@dataclass(frozen=True)
class CounterfactualNumbers:
    """What N numbers would have been, (N,) each, float64.

    Args:
        observed: What they were.
        median: What they would have been.
        lower: Lower end of an interval around it; None where nothing is known of how far the head is off
            (see ``noise``).
        upper: Upper end.
        prediction: What would be expected without the observation: g⁻¹(loc_Y').
        rank: P(Y ≤ observed) in the factual world, who the individual is.
        extrapolates: Whether one of the two prompts, or the answer, lies beyond what training has seen; None
            where nobody knows.
        level: Probability of the interval.
        noise: "kept": the interval says how well the two worlds' loc_Y are known, by the jackknife over heads
            that were each solved without a part of the rows and by the posterior of the slope, and presumes
            that ranks are kept. "redrawn": it is the law's, with all that is drawn anew.
    """

    observed: Tensor
    median: Tensor
    lower: Tensor | None
    upper: Tensor | None
    prediction: Tensor
    rank: Tensor
    extrapolates: Tensor | None
    level: float
    noise: Noise

    def records(self) -> list[dict[str, Any]]:
        """One per number, for JSON or a table."""
        names = ("observed", "median", "lower", "upper", "prediction", "rank", "extrapolates")
        columns = [getattr(self, name) for name in names]
        lists = [[None] * len(self.observed) if one is None else one.tolist() for one in columns]
        return [dict(zip(names, entries, strict=True)) for entries in zip(*lists, strict=True)]


def counterfactual_number(
    model: CausalLM,
    processor: CausalQwen2Processor,
    factual_prompt: Prompt,
    observed: float,
    interventions: Sequence[Prompt],
    *,
    level: float = 0.9,
    noise: Noise = "kept",
    engine: Engine | None = None,
) -> CounterfactualNumbers:
    """g(v') = loc_Y' + scale_Y'·(g(v) − loc_Y)/scale_Y, one entry per intervention.

    Args:
        model: A model that was trained to write numbers.
        processor: The model's.
        factual_prompt: Text or chat messages, after which the number was observed.
        observed: The number.
        interventions: Other prompts; the factual one among them gives the observed number itself.
        level: Probability of the interval, in (0, 1).
        noise: "kept" keeps all of the individual's noise (Pearl's counterfactual). "redrawn" keeps what
            scale_U gives to it, and draws the exogenous and the read-out noise anew.
        engine: Made from the model; runs its backbone.

    Raises:
        AbductionError: If the model's numbers have no law to invert.
        ValueError: If a prompt is empty or too long, or a value or option is out of range.
    """
    check_prompts(interventions)
    prompts = [factual_prompt, *interventions]
    rows = []
    for index, prompt in enumerate(prompts):
        try:
            rows.append(prompt_row(processor, prompt))
        except ValueError as error:
            which = f"intervention {index}" if index else "the factual prompt"
            raise ValueError(f"{which}: {error}") from error
    factual = [rows[0]] * len(interventions)
    values = [observed] * len(interventions)
    return _counterfactuals(
        model, processor, factual, values, rows[1:], level=level, noise=noise, batch_size=32, engine=engine
    )


def counterfactual_numbers(
    model: CausalLM,
    processor: CausalQwen2Processor,
    rows: Sequence[Row],
    interventions: Mapping[str, Any] | Sequence[Row],
    *,
    reading: Reading,
    level: float = 0.9,
    noise: Noise = "kept",
    batch_size: int = 32,
    engine: Engine | None = None,
) -> CounterfactualNumbers:
    """`counterfactual_number` for a table: each row's target as it was observed, and what it would have been.

    Args:
        model: A model that was trained to write numbers.
        processor: The model's.
        rows: With the target's observed value.
        interventions: Fields that are set in every row, {"course": "took the course"}; or as many rows.
        reading: How rows become prompts, and which field is the target; `Reading.of` a trained model knows.
        level: Probability of the intervals, in (0, 1).
        noise: As for `counterfactual_number`.
        batch_size: Prompts per forward pass.
        engine: As for `counterfactual_number`.

    Raises:
        AbductionError: If the model's numbers have no law to invert.
        ValueError: If the reading has no target, a row lacks a field, or a value or option is out of range.
    """
    if reading.target is None:
        raise ValueError("the reading has no target: name the field whose number was observed")
    if isinstance(interventions, Mapping):
        fields = [name for name in (rows[0] if rows else interventions) if name != reading.target]
        if reading.template is not None:  # what it does not say changes nothing
            said = {name for _, name, _, _ in Formatter().parse(reading.templates[0])}
            fields = [name for name in fields if name in said]
        wrong = [name for name in interventions if name not in fields]
        if wrong:
            raise ValueError(f"the intervention sets {wrong[0]!r}; it can set {', '.join(fields)}")
        changed: Sequence[Row] = [{**row, **interventions} for row in rows]
    else:
        changed = interventions
    if len(changed) != len(rows):
        raise ValueError(f"{len(changed)} interventions for {len(rows)} rows; they are aligned, one per row")
    values = []
    for index, row in enumerate(rows):
        try:
            value = number_in(field(row, reading.target), reading.target, wanted=True)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from error
        values.append(math.nan if value is None else float(value))
    factual, other = (
        [encode_prompt(processor, example)[1] for example in reading.prompts(list(part), BadRows())]
        for part in (rows, changed)
    )
    return _counterfactuals(
        model,
        processor,
        factual,
        values,
        other,
        level=level,
        noise=noise,
        batch_size=batch_size,
        engine=engine,
    )


@dataclass(frozen=True)
class NumberLaws:
    """Of the numbers that N causes have, float64."""

    Y: Cauchy  # (N,)
    own: Tensor  # (N,) what scale_U contributes to scale_Y: the individual's part
    folds: Tensor  # (N, K) loc_Y by the head without each fold
    reach: Tensor | None  # (N,) leverage, 1 at the border of what was seen; None where nobody knows
    coordinates: Tensor | None  # (N, D) of `NumberSupport.coordinates`; None where nobody knows

    @classmethod
    @torch.no_grad()
    def of(cls, model: CausalLM, U: Cauchy) -> NumberLaws:
        """By the model's number head, of causes U (N, D) without exogenous noise."""
        action, noisy = model.action, model.action.exogenous(U)
        Y = action.numbers(noisy).to("cpu", torch.float64)
        own = U.linear(exact(action.number.weight)).scale.squeeze(-1)
        folds, reach = action.fold_numbers(noisy), leverage(action, noisy)
        largest = model.config.number_leverage
        coordinates = None if largest is None else action.support.coordinates(noisy.loc, largest)
        reach, coordinates = (None if one is None else one.cpu() for one in (reach, coordinates))
        return cls(Y, own.double().cpu(), folds.double().cpu(), reach, coordinates)

    def __getitem__(self, index: Any) -> NumberLaws:
        reach, coordinates = (None if one is None else one[index] for one in (self.reach, self.coordinates))
        return NumberLaws(self.Y[index], self.own[index], self.folds[index], reach, coordinates)

    @classmethod
    def cat(cls, parts: Sequence[NumberLaws]) -> NumberLaws:
        """One after another."""
        own, folds = (torch.cat([getattr(part, name) for part in parts]) for name in ("own", "folds"))
        reaches, coordinates = (
            [column for part in parts if (column := getattr(part, name)) is not None]
            for name in ("reach", "coordinates")
        )
        return cls(
            Cauchy.cat([part.Y for part in parts]),
            own,
            folds,
            torch.cat(reaches) if reaches else None,
            torch.cat(coordinates) if coordinates else None,
        )


def _counterfactuals(
    model: CausalLM,
    processor: CausalQwen2Processor,
    factual: Sequence[Encoded],
    values: Sequence[float],
    other: Sequence[Encoded],
    *,
    level: float,
    noise: Noise,
    batch_size: int,
    engine: Engine | None,
) -> CounterfactualNumbers:
    central_multiple(level)  # names a level that is none
    if noise not in get_args(Noise):
        raise ValueError(f"noise is {noise!r}; choose 'kept' or 'redrawn'")
    if not values:
        raise ValueError("nothing is asked: give at least one row or intervention")
    wrong = [value for value in values if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} was observed; only a finite number has a rank")
    if not model.writes_numbers:
        raise AbductionError(
            "this model has not learned to write numbers: train it on rows with a target first"
        )
    # A prompt that comes twice is computed once: the null intervention is then the identity, to the last bit.
    distinct: dict[tuple[tuple[int, ...], tuple[float, ...]], Encoded] = {}
    keys = [(tuple(row.input_ids), tuple(row.numeric_values)) for row in (*factual, *other)]
    for key, row in zip(keys, (*factual, *other), strict=True):
        distinct.setdefault(key, row)
    places = {key: place for place, key in enumerate(distinct)}
    where = torch.tensor([places[key] for key in keys])
    laws = _laws(model, processor, list(distinct.values()), batch_size, engine)
    before, after = laws[where[: len(factual)]], laws[where[len(factual) :]]
    observed = torch.tensor(values, dtype=torch.float64)
    limits, space = model.config.value_range, model.value_space
    return between_worlds(observed, before, after, space=space, limits=limits, level=level, noise=noise)


def between_worlds(
    observed: Tensor,
    before: NumberLaws,
    after: NumberLaws,
    *,
    space: ValueSpace,
    limits: Sequence[float] | None = None,
    level: float = 0.9,
    noise: Noise = "kept",
) -> CounterfactualNumbers:
    """What observed numbers (N,) with the laws ``before`` would have been with the laws ``after``.

    Args:
        observed: Float64.
        before: Of the factual world.
        after: Of the other one.
        space: That the laws live in.
        limits: Smallest and largest number of training; None where nobody knows.
        level: Probability of the intervals, in (0, 1).
        noise: As for `counterfactual_number`.

    Raises:
        AbductionError: If a law has no noise.
    """
    if not (before.Y.scale > 0).all():
        raise AbductionError(
            "this model's numbers have no noise (scale_Y = 0) that could account for a value"
        )
    y = space.encode(observed)
    prediction = space.decode(after.Y.loc)
    reading = _kept if noise == "kept" else _redrawn
    ends = reading(y, before, after, level)
    reach = (before.reach, after.reach)
    low, high = (-math.inf, math.inf) if limits is None else farthest(limits)
    # What has not moved is the observed number, not its rounding through g and back.
    answers = [
        None if end is None else torch.where(end == y, observed, space.decode(end).clamp(low, high))
        for end in ends
    ]
    median = answers[0]
    assert median is not None
    extrapolates = None
    if limits is not None and reach[0] is not None and reach[1] is not None:
        extrapolates = (reach[0] > 1) | (reach[1] > 1) | (median < limits[0]) | (median > limits[1])
    return CounterfactualNumbers(
        observed=observed,
        median=median,
        lower=answers[1],
        upper=answers[2],
        prediction=prediction.clamp(low, high),
        rank=before.Y.cdf(y),
        extrapolates=extrapolates,
        level=level,
        noise=noise,
    )


def transported(y: Tensor, Y: Cauchy, other: Cauchy) -> Tensor:
    """loc' + scale'·(y − loc)/scale, written as a change of y, so that equal laws leave it as it is."""
    return y + (other.loc - Y.loc) + (other.scale - Y.scale) * (y - Y.loc) / Y.scale


def _kept(
    y: Tensor, before: NumberLaws, after: NumberLaws, level: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Median and ends, where all noise is kept: only the difference of the two loc_Y is uncertain.

    The jackknife sees by how much heads vary, whatever the law of the numbers, and not what the ridge keeps
    all of them from saying; the posterior of the slope knows that, and variation by the law's book. What both
    know counts twice, on the side of caution.
    """
    median = transported(y, before.Y, after.Y)
    differences = after.folds - before.folds  # (N, K)
    folds = differences.shape[1]
    if folds < 2 or before.coordinates is None or after.coordinates is None:
        return median, None, None
    # The jackknife with folds: K − 1 times the mean square around the mean.
    varies = (folds - 1) * differences.var(dim=1, correction=0)
    unknown = before.Y.scale.square() * (after.coordinates - before.coordinates).square().sum(1)
    half = NormalDist().inv_cdf((1 + level) / 2) * (varies + unknown).sqrt()
    return median, median - half, median + half


def _redrawn(y: Tensor, before: NumberLaws, after: NumberLaws, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """Median and ends, where the individual keeps what scale_U gave to it."""
    law = RedrawnLaw.of(
        residual=y - before.Y.loc,
        kept=before.own,
        lost=before.Y.scale - before.own,
        loc=after.Y.loc,
        ratio=torch.where(before.own > 0, after.own / before.own, 1.0),
        new=after.Y.scale - after.own,
    )
    return law.quantile(0.5), law.quantile((1 - level) / 2), law.quantile((1 + level) / 2)


@torch.no_grad()
def _laws(
    model: CausalLM,
    processor: CausalQwen2Processor,
    rows: Sequence[Encoded],
    batch_size: int,
    engine: Engine | None,
) -> NumberLaws:
    """Of the number that comes next in each row."""
    collate = replace(Collator.of(processor), padding_side="left")  # the last position is the same for all
    for row in rows:
        check_context(model.config.max_position_embeddings, len(row))
    parts, order = [], []
    for window, batches in windows_by_length(enumerate(rows), batch_size, length=lambda entry: len(entry[1])):
        for batch in batches:
            order += [window[index][0] for index in batch]
            inputs = collate([window[index][1] for index in batch])
            causes = model.causes({name: inputs[name].to(model.device) for name in INPUTS}, engine)
            parts.append(NumberLaws.of(model, causes.U[:, -1]))
    return NumberLaws.cat(parts)[torch.tensor(order).argsort()]
