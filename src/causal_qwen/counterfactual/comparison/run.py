"""compare(): A against B on the same individuals.

`Comparison` is the plan; its `pairs` is a generator that whoever wants may consume, pair by pair, into a
`Tally`. `compare` does so, keeps every text, looks where the plan says so, and sums up. Noise is keyed by
(seed, index of the generated token), so prompts of different length stay coupled. This module knows neither
how noise is drawn nor how an interval is made.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from causal_qwen.counterfactual.comparison.scores import Said, Score, score_of
from causal_qwen.counterfactual.comparison.sequential import Design, Look, planned_looks
from causal_qwen.counterfactual.comparison.speakers import (
    PlainSpeaker,
    Talker,
    check_cause_space,
    fingerprint,
    speak,
)
from causal_qwen.counterfactual.comparison.statistics import Estimate, Tally, units
from causal_qwen.data import Prompt
from causal_qwen.evaluation.tables import GrowingTable
from causal_qwen.individual import SEEDS, Individual
from causal_qwen.progress import Watch, unwatched
from causal_qwen.prompting import Settings

__all__ = ["Comparison", "ComparisonResult", "Coupling", "Pair", "Side", "compare"]

Coupling = Literal["individual", "gumbel", "independent"]
BATCH = 32  # texts at a time: on the CPU the fastest, and native code takes up to 48


@dataclass(frozen=True)
class Side:
    """One of the two that are compared.

    Args:
        talker: Who answers: a `Speaker`, or a `PlainSpeaker` for a model that is not ours.
        prompts: What is asked.
        settings: How it is decided; a mode that is not given is the coupling's.
        name: For reports.
        rows: Of the prompts, where a score needs a reference.
    """

    talker: Talker
    prompts: Sequence[Prompt]
    settings: Settings = field(default_factory=Settings)
    name: str = ""
    rows: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Pair:
    """What one individual, or in coupling "independent" two, said to one prompt on both sides.

    Args:
        individual: Index of the individual.
        prompt: Index of the prompt.
        a: What was said on side A, as JSON has it: prompt, individual, text, tokens, numbers, finish_reason.
        b: The same of side B.
        scores_a: By the name of the score; None where the text has none.
        scores_b: The same of side B.
    """

    individual: int
    prompt: int
    a: Mapping[str, Any]
    b: Mapping[str, Any]
    scores_a: Mapping[str, float | None]
    scores_b: Mapping[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        """A line of the JSONL file."""
        return asdict(self)


class Comparison:
    """What is compared, and in which order.

    Args:
        a: Side A.
        b: Side B, with as many prompts.
        individuals: How many answer every prompt.
        scores: `Score`s, or their names.
        coupling: "individual", "gumbel" or "independent".
        seed: Of the first individual; the others follow.
        batch_size: Texts at a time.
        looks: Individuals at each look, the last is all of them; () looks at the end only.

    Raises:
        ValueError: If the sides cannot be compared; the message says what would be right.
    """

    def __init__(
        self,
        a: Side,
        b: Side,
        *,
        individuals: int,
        scores: Sequence[Score | str] = ("length",),
        coupling: Coupling = "individual",
        seed: int = 0,
        batch_size: int = BATCH,
        looks: tuple[int, ...] = (),
    ) -> None:
        if coupling not in get_args(Coupling):
            raise ValueError(f"coupling is {coupling!r}; choose one of {', '.join(get_args(Coupling))}")
        if individuals < 2:
            raise ValueError(f"individuals is {individuals}; an interval needs at least 2")
        if not 0 <= seed <= SEEDS - 2 * individuals:
            raise ValueError(f"seed is {seed}; with those that follow it must lie within 0 and 2**64 - 1")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if not a.prompts or len(a.prompts) != len(b.prompts):
            raise ValueError(
                f"{len(a.prompts)} prompts against {len(b.prompts)}; give as many on both sides, at least one"
            )
        self.scores = tuple(score_of(score) if isinstance(score, str) else score for score in scores)
        names = [score.name for score in self.scores]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"scores are {', '.join(names) or 'none'}; give at least one, each once")
        self.coupling, self.individuals, self.seed = coupling, individuals, seed
        self.batch_size, self.looks = batch_size, looks or (individuals,)
        if coupling == "individual":
            check_cause_space(a.talker, b.talker)
        self.a, self.b = (replace(side, settings=self._settings(side)) for side in (a, b))
        for side in (self.a, self.b):
            for prompt in side.prompts:
                side.talker.check(prompt, side.settings)

    def _settings(self, side: Side) -> Settings:
        """With the mode that the coupling asks for."""
        plain, mode = isinstance(side.talker, PlainSpeaker), side.settings.mode
        wanted = "compatible" if self.coupling == "gumbel" or plain else mode or "causal"
        if mode is not None and mode != wanted:
            raise ValueError(
                f"mode {mode!r} with coupling {self.coupling!r}: tokens are drawn by Gumbel noise on logits, "
                "which is mode 'compatible'; leave the mode out, or take another coupling"
            )
        if self.coupling == "individual" and wanted == "compatible":
            raise ValueError(
                "mode 'compatible' samples tokens, not individuals; take coupling 'gumbel', or mode 'causal'"
            )
        top_k = 0 if side.settings.top_k is None else side.settings.top_k
        return replace(side.settings, mode=wanted, sample=True, top_k=top_k)

    @property
    def total(self) -> int:
        """How many pairs there are at most."""
        return self.individuals * len(self.a.prompts)

    def tally(self) -> Tally:
        """An empty one for these pairs."""
        names = tuple(score.name for score in self.scores)
        return Tally(self.individuals, len(self.a.prompts), names)

    def order(self) -> list[tuple[int, int]]:
        """(individual, prompt) of every pair: look by look, and prompt by prompt within a look, so that texts
        of one prompt lie together and its prefill is shared.
        """
        starts = (0, *self.looks[:-1])
        return [
            (person, prompt)
            for start, end in zip(starts, self.looks, strict=True)
            for prompt in range(len(self.a.prompts))
            for person in range(start, end)
        ]

    def pairs(self, start: int = 0) -> Iterator[Pair]:
        """All pairs behind the first ``start``, as they are made; a batch that was cut is computed again."""
        order = self.order()
        for first, end in self._batches():
            if end <= start:
                continue
            places = order[first:end]
            both = [self._texts(side, places, letter) for side, letter in ((self.a, "a"), (self.b, "b"))]
            scored = [[score(texts) for score in self.scores] for texts in both]
            for index in range(max(start - first, 0), len(places)):
                one, other = (self._scored(columns, index) for columns in scored)
                said = [texts[index].to_dict() for texts in both]
                yield Pair(*places[index], _spoken(said[0]), _spoken(said[1]), one, other)

    def _batches(self) -> Iterator[tuple[int, int]]:
        """First and end of each; none crosses a look, so that batches do not depend on when one stops."""
        prompts = len(self.a.prompts)
        for start, end in zip((0, *self.looks[:-1]), self.looks, strict=True):
            for first in range(start * prompts, end * prompts, self.batch_size):
                yield first, min(first + self.batch_size, end * prompts)

    def _texts(self, side: Side, places: Sequence[tuple[int, int]], letter: str) -> list[Said]:
        strangers = self.individuals if self.coupling == "independent" and letter == "b" else 0
        people = [Individual(self.seed + strangers + person) for person, _ in places]
        prompts = [side.prompts[prompt] for _, prompt in places]
        answers = speak(side.talker, prompts, side.settings, people)
        rows = [side.rows[prompt] if side.rows else {} for _, prompt in places]
        return [
            Said(prompt, answer, letter, person.seed, row)
            for prompt, answer, person, row in zip(prompts, answers, people, rows, strict=True)
        ]

    def _scored(self, columns: Sequence[Sequence[float]], index: int) -> dict[str, float | None]:
        values = {score.name: column[index] for score, column in zip(self.scores, columns, strict=True)}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    def facts(self) -> dict[str, Any]:
        """What the texts depend on: a file of pairs is continued by the same comparison only."""
        return {
            "kind": "causal-qwen comparison",
            "coupling": self.coupling,
            "individuals": self.individuals,
            "seed": self.seed,
            "scores": [score.name for score in self.scores],
            "batch_size": self.batch_size,
            "looks": list(self.looks),
            "sides": [
                {
                    "name": side.name,
                    "model": fingerprint(side.talker),
                    "settings": side.settings.to_dict(),
                    "prompts": hashlib.sha256(
                        json.dumps([list(side.prompts), list(side.rows)], default=str).encode()
                    ).hexdigest(),
                }
                for side in (self.a, self.b)
            ],
        }


def _spoken(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name not in ("side", "row")}


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
    """

    estimates: Mapping[str, Estimate]
    coupling: Coupling
    pairs: int
    total: int
    stopped: str
    look: Look | None
    names: tuple[str, str]
    extremes: tuple[Pair, ...] = ()

    @property
    def first(self) -> Estimate:
        """Of the first score; in the sequential mode its interval is the one that looking keeps valid."""
        estimate = next(iter(self.estimates.values()))
        if self.look is None:
            return estimate
        return replace(estimate, lower=self.look.interval.lower, upper=self.look.interval.upper)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the first score's estimate at the top, all of them under "scores"."""
        sequential = None
        if self.look is not None:
            sequential = {
                "individuals": self.look.individuals,
                "unbiased_difference": self.look.unbiased,
                "repeated_lower": self.look.repeated.lower,
                "repeated_upper": self.look.repeated.upper,
            }
        return self.first.to_dict() | {
            "score": next(iter(self.estimates)),
            "coupling": self.coupling,
            "a": self.names[0],
            "b": self.names[1],
            "planned_pairs": self.total,
            "stopped": self.stopped,
            "sequential": sequential,
            "scores": {name: estimate.to_dict() for name, estimate in self.estimates.items()},
        }


def compare(
    a: Side,
    b: Side,
    *,
    individuals: int = 100,
    scores: Sequence[Score | str] = ("length",),
    coupling: Coupling = "individual",
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
    """The mean paired difference of a score, A − B, over individuals that answer the prompts of both sides.

    Args:
        a: Side A: a model, its prompts and its settings.
        b: Side B.
        individuals: How many answer every prompt; at most, where ``sequential``.
        scores: `Score`s or their names; the first one is what the comparison is about.
        coupling: "individual" (the same noise in cause space), "gumbel" (the same Gumbel per token, for any
            model with logits) or "independent" (strangers).
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
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie strictly between 0 and 1")
    if width is not None and not (sequential and width > 0):
        raise ValueError(f"width is {width}; it is a number above 0, and needs the sequential mode")
    planned = planned_looks(individuals, looks) if sequential else ()
    comparison = Comparison(
        a,
        b,
        individuals=individuals,
        scores=scores,
        coupling=coupling,
        seed=seed,
        batch_size=batch_size,
        looks=planned,
    )
    tally, most = comparison.tally(), _Extremes(extremes, comparison.scores[0].name)
    design = Design(planned, level=level) if sequential else None
    ends = {look * len(a.prompts): index for index, look in enumerate(comparison.looks)}
    stopped, look, count = "all pairs", None, 0
    with ExitStack() as stack:
        table = None
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            table = stack.enter_context(GrowingTable(output, comparison.facts(), format="jsonl"))
        advance = stack.enter_context(watch("comparing", comparison.total))
        for pair in _all(comparison, table):
            _add(tally, pair)
            most.add(pair)
            count += 1
            advance(1)
            if design is None or count not in ends:
                continue
            index = ends[count]
            matrices = tally.matrices(comparison.scores[0].name, design.looks[index])
            look = design.look(index, units(matrices[0] - matrices[1]))
            narrow = width is not None and look.repeated.upper - look.repeated.lower <= width
            if look.significant or narrow:
                stopped = "difference" if look.significant else "width"
                break
        if table is not None:
            table.finish()
    answered = look.individuals if look is not None else individuals
    estimates = {score.name: tally.estimate(score.name, answered, level=level) for score in comparison.scores}
    names = (a.name or "A", b.name or "B")
    return ComparisonResult(estimates, coupling, count, comparison.total, stopped, look, names, most.pairs())


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
