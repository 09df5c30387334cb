"""One step of vLLM's batch: rows with the same settings are decided together, by generate()'s decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy
from causal_qwen.counterfactual.comparison.gumbel import GumbelNoise
from causal_qwen.generation.decisions import Decision
from causal_qwen.generation.stepping import Causes
from causal_qwen.individual import Individual
from causal_qwen.intervals import Numbers, read_numbers
from causal_qwen.serving.vllm.processors import Processing
from causal_qwen.serving.vllm.requests import Row

__all__ = ["decide"]


@torch.no_grad()
def decide(heads: Any, logits: Tensor) -> None:
    """Leave one token possible in each row that is ours; vLLM's sampler decides the others.

    Args:
        heads: The model, with the batch's rows and the features that the logits are of.
        logits: (N, V) after vLLM's grammar, bad words and biases; changed in place.
    """
    causes = heads.causes(heads.features)
    groups: dict[tuple[Decision, Processing, bool], list[int]] = {}
    for index, row in sorted(heads.rows.by_index.items()):
        groups.setdefault((row.decision, row.processing, row.settings.predict), []).append(index)
    for (decision, processing, _), indices in groups.items():
        rows = [heads.rows.by_index[index] for index in indices]
        of_all = len(indices) == len(logits)
        own = causes if of_all else Causes(*(law[indices] for law in causes))
        if rows[0].settings.predict:
            _predict(heads, decision, own, rows)
        if rows[0].left_to_sampler:
            _compatible(heads, decision, processing, own, rows, indices, logits)
            continue
        adjustment = None
        if processing.adjusts:
            after = logits[indices]
            adjustment = torch.where(after.isneginf(), -torch.inf, after - heads.untouched[indices])
        people = _people(rows)
        processors = processing.processors(
            adjustment, [row.prompt for row in rows], [row.output for row in rows], logits.device
        )
        if processing.temperature:
            processors.append(GumbelNoise(heads.token_keys, people))
        choice = replace(decision, individuals=people, hide_num=not heads.writes_numbers).choose(
            heads.readout, own, torch.empty(len(rows), 0, dtype=torch.int64), 0, processors
        )
        if heads.writes_numbers and processing.suppressed is None:
            _keep(choice.numbers, rows)
        if of_all:
            logits.fill_(-torch.inf)
            logits.scatter_(1, choice.tokens[:, None], 0.0)
        else:
            places = torch.tensor(indices, device=logits.device)
            logits[places] = -torch.inf
            logits[places, choice.tokens] = 0.0


def _people(rows: list[Row]) -> list[Individual]:
    """Those who decide, each at the index of their own next token."""
    return [
        replace(row.individual, start=row.individual.start + len(row.output))
        for row in rows
        if row.individual is not None
    ]


def _compatible(
    heads: Any,
    decision: Decision,
    processing: Processing,
    causes: Causes,
    rows: list[Row],
    indices: list[int],
    logits: Tensor,
) -> None:
    """vLLM's sampler chooses; a number, should it choose one, is the median of the widened cause."""
    if processing.suppressed is not None:
        logits[indices, processing.suppressed] = -torch.inf
    elif heads.writes_numbers:
        action = heads.readout.action
        wide: Cauchy = action.exogenous(causes.U, noise=heads.readout.noise)
        raw = decision.raw_intervals
        _keep(read_numbers(action, heads.config, wide, action.numbers(wide), decision.level, raw=raw), rows)


def _predict(heads: Any, decision: Decision, causes: Causes, rows: list[Row]) -> None:
    """Record the number that would come next, and P_<NUM>; of a prompt in pieces, the last piece's stays."""
    action, num = heads.readout.action, heads.config.num_token_id
    wide = action.exogenous(causes.U, noise=heads.readout.noise)
    numbers = read_numbers(
        action, heads.config, wide, action.numbers(wide), decision.level, raw=decision.raw_intervals
    )
    S = heads.readout.scores(wide, causes.U0)
    prob_num = S[:, num].sf(action.threshold[num]).tolist()
    for row, number, probability in zip(rows, _reports(numbers, len(rows)), prob_num, strict=True):
        row.prediction = (*number[:3], probability, number[3])


def _keep(numbers: Numbers, rows: list[Row]) -> None:
    """What each row would say, should its token be a number."""
    for row, number in zip(rows, _reports(numbers, len(rows)), strict=True):
        row.next_number = number


def _reports(numbers: Numbers, rows: int) -> list[tuple[float, float, float, float]]:
    """Median, ends of the interval and extrapolation of each row, NaN where nobody knows."""
    flags = [float("nan")] * rows if numbers.extrapolates is None else numbers.extrapolates.tolist()
    columns = (numbers.median.tolist(), numbers.lower.tolist(), numbers.upper.tolist(), map(float, flags))
    return list(zip(*columns, strict=True))
