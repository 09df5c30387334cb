"""How texts are asked for: the settings of a prompt, a file of prompts or a conversation, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from causal_qwen.generation.decisions import InferenceMode
from causal_qwen.individual import SEEDS, Individual

__all__ = ["PER_PROMPT", "Settings"]

# What a prompt of a file may set for itself.
PER_PROMPT = (
    "seed",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "persistence",
    "density_floor",
    "stop",
)
NOISE = ("persistence", "density_floor")
SAMPLING = ("seed", "temperature", "top_k", "top_p", *NOISE)
# Type, range and its name. NaN lies in no range.
RANGES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "seed": (int, lambda value: 0 <= value < SEEDS, "an integer from 0 to 2**64 - 1"),
    "max_new_tokens": (int, lambda value: value >= 1, "an integer ≥ 1"),
    "temperature": (float, lambda value: 0 <= value < math.inf, "a finite number ≥ 0"),
    "top_k": (int, lambda value: value >= 0, "an integer ≥ 0; 0 allows all tokens"),
    "top_p": (float, lambda value: 0 < value <= 1, "a number above 0 and up to 1"),
    "repetition_penalty": (float, lambda value: 0 < value < math.inf, "a finite number above 0"),
    "persistence": (float, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "density_floor": (float, lambda value: 0 <= value < 1, "a number from 0 to below 1"),
    "level": (float, lambda value: 0 < value < 1, "a number strictly between 0 and 1"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides a text beside its prompt; None leaves it to the model.

    Args:
        mode: "standard", "causal" or "compatible".
        sample: Whether to sample; "causal" always does.
        seed: Who speaks, where somebody is sampled.
        max_new_tokens: Most tokens of a text.
        temperature: Scales noise; in "compatible" it divides logits. 1 by default.
        top_k: Allow only the k best tokens; 0 allows all.
        top_p: Allow only the nucleus of this probability.
        repetition_penalty: Above 1 makes tokens so far less likely.
        persistence: ρ.
        density_floor: Truncation of the noise.
        stop: A text ends before the first of these.
        level: Probability of the interval of each number.
        raw_intervals: Whether intervals are the Cauchy law's own.

    Raises:
        ValueError: If a setting is out of range.
    """

    mode: str | None = None
    sample: bool = False
    seed: int | None = None
    max_new_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    persistence: float | None = None
    density_floor: float | None = None
    stop: tuple[str, ...] = ()
    level: float = 0.9
    raw_intervals: bool = False

    def __post_init__(self) -> None:
        for name, (kind, within, law) in RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            is_number = isinstance(value, int | kind) and not isinstance(value, bool)
            if not is_number or not within(value):
                raise ValueError(f"{name} is {value!r}; it must be {law}")
        if self.mode is not None and self.mode not in get_args(InferenceMode):
            raise ValueError(f"mode is {self.mode!r}; choose one of {', '.join(get_args(InferenceMode))}")
        if not isinstance(self.stop, tuple) or not all(isinstance(one, str) and one for one in self.stop):
            raise ValueError(f"stop is {self.stop!r}; it must be texts that are not empty")
        if self.mode == "compatible" and self.sample and self.temperature == 0:
            raise ValueError(
                "temperature is 0, by which mode compatible would divide; without sampling the best token "
                "is chosen"
            )

    def updated(self, changes: dict[str, Any]) -> Settings:
        """With some settings of a prompt's own, as JSON has them.

        Raises:
            ValueError: If one is out of range.
        """
        stop = changes.get("stop")
        if isinstance(stop, str | list):
            changes = changes | {"stop": (stop,) if isinstance(stop, str) else tuple(stop)}
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    @property
    def samples(self) -> bool:
        """Whether somebody, or a token, is drawn."""
        return self.sample or self.mode == "causal"

    @property
    def draws_noise(self) -> bool:
        """Whether an individual is drawn."""
        return self.samples and self.mode != "compatible"

    def inert(self) -> list[str]:
        """Settings that are given and change nothing in this mode."""
        names = () if self.draws_noise else NOISE if self.samples else SAMPLING
        return [name for name in names if getattr(self, name) is not None]

    def options(self) -> dict[str, Any]:
        """For generate(), but for who is sampled."""
        options: dict[str, Any] = {
            "inference_mode": self.mode,
            "do_sample": self.samples,
            "max_new_tokens": self.max_new_tokens,
            "interval_level": self.level,
            "raw_intervals": self.raw_intervals,
            "repetition_penalty": self.repetition_penalty,
        }
        if self.samples:
            temperature = 1.0 if self.temperature is None else self.temperature
            options |= {"temperature": temperature, "top_k": self.top_k, "top_p": self.top_p}
        if self.draws_noise:
            options |= {name: getattr(self, name) for name in NOISE}
        return {name: value for name, value in options.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"stop": list(self.stop)}

    def people(self, count: int) -> list[Individual]:
        """Those who speak: ``seed`` and the seeds after it; somebody new where there is none."""
        first = Individual.random().seed if self.seed is None else self.seed
        return [Individual((first + index) % SEEDS) for index in range(count)]
