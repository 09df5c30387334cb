"""The plan of a comparison: two sides, who answers what in which order, and the pairs as they are made.

Noise is keyed by (seed, index of the generated token), so prompts of different length stay coupled. This
module knows neither how noise is drawn nor what follows from the pairs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from causal_qwen.counterfactual.comparison.scores import Said, Score, check_references, is_yes_or_no, score_of
from causal_qwen.counterfactual.comparison.speakers import Talker, check_cause_space, speak, talker_of
from causal_qwen.counterfactual.comparison.statistics import Tally
from causal_qwen.data import Prompt
from causal_qwen.individual import SEEDS, Individual
from causal_qwen.prompting import Settings, Speaker

__all__ = ["BATCH", "Comparison", "Coupling", "Noise", "Outline", "Pair", "Side"]

Coupling = Literal["individual", "gumbel", "independent"]
Noise = Literal["own", "equal"]
BATCH = 32  # texts at a time: on the CPU the fastest, and native code takes up to 48


@dataclass(frozen=True)
class Side:
    """One of the two that are compared.

    Args:
        talker: Who answers: a `Speaker`, a `PlainSpeaker` for a model that is not ours, or any `Talker`.
        prompts: What is asked.
        settings: How it is decided; a mode that is not given is the coupling's.
        name: For reports.
        rows: Of the prompts, where a score needs a reference.
    """

    talker: Talker | Speaker
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


@dataclass(frozen=True)
class Outline:
    """What is known of a comparison without its models: enough to conclude from its pairs.

    Args:
        individuals: How many answer each prompt.
        prompts: How many there are.
        scores: Their names; the first one is what the comparison is about.
        coupling: "individual", "gumbel" or "independent".
        names: Of the sides.
        looks: Individuals at each look, the last is all of them; () looks at the end only.
        crossed: Whether the same individuals answer every prompt.
        equal: Whether the sides are one and the same, and answer by the same noise.
    """

    individuals: int
    prompts: int
    scores: tuple[str, ...]
    coupling: Coupling
    names: tuple[str, str]
    looks: tuple[int, ...] = ()
    crossed: bool = False
    equal: bool = False

    @property
    def total(self) -> int:
        """How many pairs there are at most."""
        return self.individuals * self.prompts

    def tally(self) -> Tally:
        """An empty one for these pairs."""
        spans = {name: 1.0 for name in self.scores if is_yes_or_no(name)}
        return Tally(
            self.individuals, self.prompts, self.scores, crossed=self.crossed, spans=spans, equal=self.equal
        )


class Comparison:
    """What is compared, and in which order.

    Args:
        a: Side A.
        b: Side B, with as many prompts.
        individuals: How many answer each prompt.
        scores: `Score`s, or their names.
        coupling: "individual", "gumbel" or "independent".
        noise: "own" leaves both sides as they come; "equal" sets the temperature of B so that an individual
            moves the cause as far there as on side A, where calibration has given the models other gains κ.
        crossed: Whether the same individuals answer every prompt; otherwise each prompt has its own.
        seed: Of the first individual; the others follow.
        batch_size: Texts at a time.
        looks: Individuals at each look, the last is all of them; () looks at the end only.
        step: (i, n): of the pairs only every n-th, from the i-th on; others make the rest.

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
        noise: Noise = "own",
        crossed: bool = False,
        seed: int = 0,
        batch_size: int = BATCH,
        looks: tuple[int, ...] = (),
        step: tuple[int, int] = (0, 1),
    ) -> None:
        if coupling not in get_args(Coupling):
            raise ValueError(f"coupling is {coupling!r}; choose one of {', '.join(get_args(Coupling))}")
        if noise not in get_args(Noise) or (noise == "equal" and coupling != "individual"):
            raise ValueError(
                f"noise is {noise!r} with coupling {coupling!r}; choose 'own', or 'equal' with 'individual'"
            )
        if individuals < 2:
            raise ValueError(f"individuals is {individuals}; an interval needs at least 2")
        people = individuals * (1 if crossed else len(a.prompts))
        if not 0 <= seed <= SEEDS - 2 * people:
            raise ValueError(f"seed is {seed}; with those that follow it must lie within 0 and 2**64 - 1")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if not a.prompts or len(a.prompts) != len(b.prompts):
            raise ValueError(
                f"{len(a.prompts)} prompts against {len(b.prompts)}; give as many on both sides, at least one"
            )
        if looks and step != (0, 1):
            raise ValueError(f"step is {step}; a look needs all pairs that come before it")
        self.scores = tuple(score_of(score) if isinstance(score, str) else score for score in scores)
        names = [score.name for score in self.scores]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"scores are {', '.join(names) or 'none'}; give at least one, each once")
        for side in (a, b):
            check_references(names, side.rows or [{}] * len(side.prompts))
        self.coupling, self.individuals, self.seed = coupling, individuals, seed
        self.crossed, self._people = crossed, people
        self.batch_size, self.looks, self.step = batch_size, looks or (individuals,), step
        if coupling == "individual":
            check_cause_space(a.talker, b.talker)
        self.a, self.b = (replace(side, settings=self._settings(side)) for side in (a, b))
        if noise == "equal":
            self.b = _as_noisy(self.b, self.a)
        for side in (self.a, self.b):
            for prompt in side.prompts:
                side.talker.check(prompt, side.settings)

    def _settings(self, side: Side) -> Settings:
        """With the mode that the coupling asks for."""
        plain, mode = not talker_of(side.talker).has_causes, side.settings.mode
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
    def outline(self) -> Outline:
        """What is left without the models."""
        scores = tuple(score.name for score in self.scores)
        names = (self.a.name or "A", self.b.name or "B")
        prompts = len(self.a.prompts)
        return Outline(
            self.individuals,
            prompts,
            scores,
            self.coupling,
            names,
            self.looks,
            crossed=self.crossed,
            equal=self._are_equal(),
        )

    def _are_equal(self) -> bool:
        one, other = self.a, self.b
        return (
            self.coupling != "independent"
            and (list(one.prompts), one.settings) == (list(other.prompts), other.settings)
            and (one.talker is other.talker or _fingerprint(one) == _fingerprint(other))
        )

    @property
    def total(self) -> int:
        """How many pairs are made here at most."""
        first, every = self.step
        return len(range(first, self.outline.total, every))

    def tally(self) -> Tally:
        """An empty one for these pairs."""
        return self.outline.tally()

    def order(self) -> list[tuple[int, int]]:
        """(individual, prompt) of every pair: look by look, and prompt by prompt within a look, so that texts
        of one prompt lie together and its prefill is shared.
        """
        starts, (first, every) = (0, *self.looks[:-1]), self.step
        places = [
            (person, prompt)
            for start, end in zip(starts, self.looks, strict=True)
            for prompt in range(len(self.a.prompts))
            for person in range(start, end)
        ]
        return places[first::every]

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
        ends = [*(look * len(self.a.prompts) for look in self.looks[:-1]), self.total]
        for start, end in zip((0, *ends[:-1]), ends, strict=True):
            for first in range(start, end, self.batch_size):
                yield first, min(first + self.batch_size, end)

    def _texts(self, side: Side, places: Sequence[tuple[int, int]], letter: str) -> list[Said]:
        first = self.seed + (self._people if self.coupling == "independent" and letter == "b" else 0)
        apart = 0 if self.crossed else self.individuals
        people = [Individual(first + prompt * apart + person) for person, prompt in places]
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
            "crossed": self.crossed,
            "seed": self.seed,
            "scores": {score.name: score.version for score in self.scores},
            "batch_size": self.batch_size,
            "looks": list(self.looks),
            "step": list(self.step),
            "sides": [
                {
                    "name": side.name,
                    "model": _fingerprint(side),
                    "settings": side.settings.to_dict(),
                    "prompts": hashlib.sha256(
                        json.dumps([list(side.prompts), list(side.rows)], default=str).encode()
                    ).hexdigest(),
                }
                for side in (self.a, self.b)
            ],
        }


def _fingerprint(side: Side) -> str:
    return talker_of(side.talker).fingerprint()


def _as_noisy(side: Side, other: Side) -> Side:
    """A side at the temperature at which noise moves its causes as far as the other's.

    Raises:
        ValueError: If a model does not say how far that is.
    """
    own, wanted = (talker_of(one.talker).noise_width(one.prompts) for one in (side, other))
    if not own or not wanted:
        raise ValueError(
            "noise 'equal' needs causes on both sides that noise moves, and an engine that shows them; "
            "give the other temperature yourself, or noise 'own'"
        )
    asked = 1.0 if other.settings.temperature is None else other.settings.temperature
    temperature = asked * wanted / own
    name = f"{side.name or 'B'}, temperature {temperature:.3g}"
    return replace(side, settings=replace(side.settings, temperature=temperature), name=name)


def _spoken(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name not in ("side", "row")}
