"""compare(): A against B on the same individuals.

It consumes the pairs of a `Comparison` into a `Tally`, keeps every text, looks where the plan says so, and
sums up. Pairs may also be written in one process (`write_pairs`) and concluded from in another (`conclude`).
This module knows neither how texts are made nor how an interval is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from causal_qwen.counterfactual.comparison.plan import (
    BATCH,
    Comparison,
    Coupling,
    Noise,
    Outline,
    Pair,
    Side,
)
from causal_qwen.counterfactual.comparison.scores import Score
from causal_qwen.counterfactual.comparison.sequential import Design, Look, planned_looks
from causal_qwen.counterfactual.comparison.statistics import Estimate, Matrix, Tally, known
from causal_qwen.evaluation.tables import GrowingTable
from causal_qwen.progress import Watch, unwatched

__all__ = ["ComparisonResult", "compare", "conclude", "write_pairs"]


@dataclass(frozen=True)
class ComparisonResult:
    """What a comparison says.

    Args:
        estimates: By the name of the score; the first one decides when to stop.
        coupling: As it was asked for.
        pairs: How many were made, of how many at most.
        total: At most.
        stopped: Why: "all pairs", "difference" (the interval excludes 0) or "width" (it is narrow enough).
        look: What the last look said; None where nobody looked before the end.
        names: Of the sides.
        extremes: Pairs that differ most in the first score.
        matrices: Scores of both sides by name, (individuals, prompts) each; NaN where missing.
    """

    estimates: Mapping[str, Estimate]
    coupling: Coupling
    pairs: int
    total: int
    stopped: str
    look: Look | None
    names: tuple[str, str]
    extremes: tuple[Pair, ...] = ()
    matrices: Mapping[str, tuple[Matrix, Matrix]] = field(default_factory=dict, repr=False)

    @property
    def first(self) -> Estimate:
        """Of the first score; in the sequential mode its interval is the one that looking keeps valid."""
        estimate = next(iter(self.estimates.values()))
        if self.look is None:
            return estimate
        lower, upper = map(known, self.look.interval)
        return replace(estimate, lower=lower, upper=upper)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the first score's estimate at the top, all of them under "scores".

        Intervals of the others are those of a run that nobody looks at: the first score decides when it ends.
        """
        sequential = None
        if self.look is not None:
            sequential = {
                "individuals": self.look.individuals,
                "unbiased_difference": known(self.look.unbiased),
                "repeated_lower": known(self.look.repeated.lower),
                "repeated_upper": known(self.look.repeated.upper),
            }
        return self.first.to_dict() | {
            "score": next(iter(self.estimates)),
            "coupling": self.coupling,
            "a": self.names[0],
            "b": self.names[1],
            "planned_pairs": self.total,
            "stopped": self.stopped,
            "sequential": sequential,
            "scores": {name: estimate.to_dict() for name, estimate in self.estimates.items()}
            | {next(iter(self.estimates)): self.first.to_dict()},
        }


def compare(
    a: Side,
    b: Side,
    *,
    individuals: int = 100,
    scores: Sequence[Score | str] = ("length",),
    coupling: Coupling = "individual",
    noise: Noise = "own",
    crossed: bool = False,
    seed: int = 0,
    sequential: bool = False,
    looks: int = 5,
    width: float | None = None,
    level: float = 0.95,
    batch_size: int = BATCH,
    output: Path | None = None,
    extremes: int = 12,
    watch: Watch = unwatched,
) -> ComparisonResult:
    """The mean paired difference of a score, A − B, over individuals that answer on both sides.

    Args:
        a: Side A: a model, its prompts and its settings.
        b: Side B.
        individuals: How many answer each prompt; at most, where ``sequential``.
        scores: `Score`s or their names; the first one is what the comparison is about.
        coupling: "individual" (the same noise in cause space), "gumbel" (the same Gumbel per token, for any
            model with logits) or "independent" (strangers).
        noise: "own", each side's as it comes, or "equal": B's temperature is set so that an individual moves
            its causes as far as A's, whatever gains κ calibration has given the models.
        crossed: Whether the same individuals answer every prompt. Their pairs then lean one way together, and
            say less than as many pairs of others.
        seed: Of the first individual.
        sequential: Whether to look before the end, and stop once the interval excludes 0 or is narrow enough.
        looks: How often, the end included.
        width: Stop once the interval, valid at all looks, is no wider than this.
        level: Of all intervals.
        batch_size: Texts at a time.
        output: JSONL file of all pairs. A run that was cut goes on behind the last pair that it wrote.
        extremes: How many of the pairs that differ most are kept in the result.
        watch: Told of pairs.

    Raises:
        ValueError: If the sides cannot be compared, or the file was begun by another comparison.
    """
    comparison = Comparison(
        a,
        b,
        individuals=individuals,
        scores=scores,
        coupling=coupling,
        noise=noise,
        crossed=crossed,
        seed=seed,
        batch_size=batch_size,
        looks=planned_looks(individuals, looks) if sequential else (),
    )
    with ExitStack() as stack:
        table = None
        if output is not None:
            table = stack.enter_context(_table(comparison, output))
        result = conclude(
            comparison.outline,
            _all(comparison, table),
            width=width,
            level=level,
            extremes=extremes,
            watch=watch,
        )
        if table is not None:
            table.finish()
    return result


def write_pairs(comparison: Comparison, output: Path, *, watch: Watch = unwatched) -> None:
    """Write all pairs of a comparison to a JSONL file; a run that was cut goes on behind the last one.

    Raises:
        ValueError: If the file was begun by another comparison.
    """
    with _table(comparison, output) as table, watch("comparing", comparison.total) as advance:
        for _ in _all(comparison, table):
            advance(1)
        table.finish()


def conclude(
    outline: Outline,
    pairs: Iterable[Pair],
    *,
    width: float | None = None,
    level: float = 0.95,
    extremes: int = 12,
    watch: Watch = unwatched,
) -> ComparisonResult:
    """What follows from pairs; none is asked for behind the look at which it is clear.

    Args:
        outline: Of the comparison that makes the pairs; with several looks, one stops when it is clear.
        pairs: In its order.
        width: As in `compare`.
        level: Of all intervals.
        extremes: As in `compare`.
        watch: Told of pairs.

    Raises:
        ValueError: If level or width are out of range.
    """
    sequential = len(outline.looks) > 1
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie strictly between 0 and 1")
    if width is not None and not (sequential and width > 0):
        raise ValueError(f"width is {width}; it is a number above 0, and needs the sequential mode")
    tally, most = outline.tally(), _Extremes(extremes, outline.scores[0])
    design = Design(outline.looks, level=level) if sequential else None
    ends = {look * outline.prompts: index for index, look in enumerate(outline.looks)}
    stopped, look, count = "all pairs", None, 0
    with watch("comparing", outline.total) as advance:
        for pair in pairs:
            _add(tally, pair)
            most.add(pair)
            count += 1
            advance(1)
            if design is None or count not in ends:
                continue
            index = ends[count]
            look = design.look(index, tally.difference(outline.scores[0], design.looks[index]))
            narrow = width is not None and look.repeated.upper - look.repeated.lower <= width
            if look.significant or narrow:
                stopped = "difference" if look.significant else "width"
                break
    answered = look.individuals if look is not None else outline.individuals
    return ComparisonResult(
        {name: tally.estimate(name, answered, level=level) for name in outline.scores},
        outline.coupling,
        count,
        outline.total,
        stopped,
        look,
        outline.names,
        most.pairs(),
        {name: tally.matrices(name, answered) for name in outline.scores},
    )


def _table(comparison: Comparison, output: Path) -> GrowingTable:
    output.parent.mkdir(parents=True, exist_ok=True)
    return GrowingTable(output, comparison.facts(), format="jsonl")


def _all(comparison: Comparison, table: GrowingTable | None) -> Iterator[Pair]:
    """Those that the file has, and then new ones, each written before it is handed on."""
    if table is None:
        yield from comparison.pairs()
        return
    done = table.done
    for row in table.rows() if done else ():
        yield Pair(**row)
    for pair in comparison.pairs(done):
        table.write(pair.to_dict())
        yield pair


def _add(tally: Tally, pair: Pair) -> None:
    one, other = (
        tuple(math.nan if scores[name] is None else float(scores[name] or 0.0) for name in tally.names)
        for scores in (pair.scores_a, pair.scores_b)
    )
    tally.add(pair.individual, pair.prompt, one, other)


class _Extremes:
    """The pairs that differ most in one score, and of those that do not, none."""

    def __init__(self, most: int, name: str) -> None:
        self.most, self.name = most, name
        self._kept: list[tuple[float, int, Pair]] = []

    def add(self, pair: Pair) -> None:
        one, other = pair.scores_a[self.name], pair.scores_b[self.name]
        if one is None or other is None or one == other:
            return
        self._kept.append((-abs(one - other), len(self._kept), pair))
        if len(self._kept) > 4 * self.most:
            self._kept = sorted(self._kept, key=lambda entry: entry[:2])[: self.most]

    def pairs(self) -> tuple[Pair, ...]:
        ordered = sorted(self._kept, key=lambda entry: entry[:2])[: self.most]
        return tuple(pair for _, _, pair in ordered)
