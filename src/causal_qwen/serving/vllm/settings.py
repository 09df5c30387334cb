"""What a request asks for beside vLLM's own sampling parameters: ``extra_args``, in HTTP ``vllm_xargs``.

Settings are read twice: where a request arrives, to refuse what is wrong in words, and where it is decided.
This module does not import vLLM.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from causal_qwen.generation.decisions import Decision, InferenceMode
from causal_qwen.individual import POSITIONS, SEEDS, Individual

__all__ = ["RequestSettings", "Sampling"]

Numbers = Literal["hidden", "kept"]


class Sampling(Protocol):
    """What is read of vLLM's SamplingParams."""

    n: int
    seed: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    structured_outputs: Any
    extra_args: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """Settings of one request; None leaves one to the model's configuration.

    Args:
        inference_mode: "standard", "causal" or "compatible".
        do_sample: Whether an individual is sampled in "standard"; by default where one is named. "causal"
            always samples, "compatible" by its temperature.
        individual: Who is sampled: a seed, or what `Individual.to_json` wrote. SamplingParams' ``seed`` is a
            seed too.
        gumbel: Who draws tokens in "compatible", by one Gumbel per token, instead of vLLM's sampler: named as
            an individual is.
        persistence: ρ.
        density_floor: Truncation of the noise.
        noise_gain: κ.
        numeric_values: Values of the <NUM> tokens of the prompt, in their order.
        numbers: "kept" lets a trained model write <NUM>, whose value is fed back and recorded; "hidden"
            leaves <NUM> out of the choice, because vLLM's answers have no place for a value.
        record: Name under which values are recorded, for `causal_qwen.serving.vllm.records`.
        predict: Whether the number that would follow the prompt is recorded.
        interval_level: Probability of the interval of each number.
        raw_intervals: Whether intervals are the Cauchy law's own.
    """

    inference_mode: InferenceMode | None = None
    do_sample: bool | None = None
    individual: Individual | None = None
    gumbel: Individual | None = None
    persistence: float | None = None
    density_floor: float | None = None
    noise_gain: float | None = None
    numeric_values: tuple[float, ...] = ()
    numbers: Numbers = "hidden"
    record: str | None = None
    predict: bool = False
    interval_level: float = 0.9
    raw_intervals: bool = False

    @classmethod
    def of(cls, params: Sampling) -> RequestSettings:
        """Those of a request.

        Raises:
            ValueError: If one is not known, out of range, or contradicts another; it is named.
        """
        given = dict(params.extra_args or {})
        own = {name: given.pop(name) for name in cls.__dataclass_fields__ if name in given}
        for name in given:  # vLLM and other plugins have fields of their own
            near = difflib.get_close_matches(name, cls.__dataclass_fields__, n=1, cutoff=0.8)
            if near:
                raise ValueError(f"extra_args has {name!r}; did you mean {near[0]!r}?")
        settings = cls(**{name: _READ[name](name, value) for name, value in own.items()})
        settings._check(params)
        return settings

    def _check(self, params: Sampling) -> None:
        self._decision("standard", params, noise_gain=1.0, density_floor=0.01, persistence=0.2)
        mode, person = self.inference_mode, self.individual
        if self.gumbel is not None and mode != "compatible":
            raise ValueError(
                "gumbel draws tokens from softmax, which is inference_mode='compatible'; give that, or "
                "individual instead"
            )
        if self.gumbel is not None and params.n > 1:
            raise ValueError(f"n is {params.n}, and gumbel is one: all texts would be the same; ask for each")
        if person is None:
            return
        if mode == "compatible":
            raise ValueError(
                "inference_mode='compatible' samples tokens, not individuals; leave individual out and give "
                "seed"
            )
        if self.do_sample is False and mode != "causal":
            raise ValueError(
                "individual is given, but nothing is sampled; pass do_sample=1 or inference_mode='causal'"
            )
        if params.n > 1:
            raise ValueError(
                f"n is {params.n}, and individual is one: all texts would be the same; give seed instead, "
                "which counts on"
            )

    def mode(self, config: Any) -> InferenceMode:
        """The mode, with the model's own where the request has none."""
        mode: InferenceMode = self.inference_mode or config.inference_mode
        return mode

    def decision(self, config: Any, params: Sampling) -> Decision:
        """How tokens of this request are decided, but for who is sampled."""
        return self._decision(
            self.mode(config),
            params,
            noise_gain=config.noise_gain,
            density_floor=config.density_floor,
            persistence=config.persistence,
        )

    def _decision(self, mode: InferenceMode, params: Sampling, **defaults: float) -> Decision:
        named = {name: getattr(self, name) for name in defaults}
        noise: dict[str, Any] = {
            name: defaults[name] if value is None else value for name, value in named.items()
        }
        return Decision(
            mode,
            do_sample=mode == "causal" or self._samples,
            temperature=params.temperature,
            level=self.interval_level,
            raw_intervals=self.raw_intervals,
            **noise,
        )

    @property
    def _samples(self) -> bool:
        if self.gumbel is not None:  # its noise is in the scores, of which the best is the draw
            return False
        return self.individual is not None if self.do_sample is None else self.do_sample

    def person(self, params: Sampling) -> Individual:
        """Who is sampled, or draws tokens; somebody new where the request names nobody."""
        named = self.individual or self.gumbel
        if named is not None:
            return named
        return Individual.random() if params.seed is None else Individual(params.seed % SEEDS)


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r:.80}; it must be a finite number")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError(f"{name} is {value!r:.80}; it must be true or false, or 1 or 0")
    return bool(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r:.80}; it must be a text")
    return value


def _individual(name: str, value: Any) -> Individual:
    person = Individual.from_json(value) if isinstance(value, str) else Individual(value)
    if person.start >= POSITIONS // 2:  # its last token has a position too
        raise ValueError(f"{name} starts at {person.start}; positions go up to {POSITIONS // 2 - 1} here")
    return person


def _values(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {value!r:.80}; give a list with one number per <NUM> of the prompt")
    return tuple(_number(f"{name}[{index}]", one) for index, one in enumerate(value))


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"{name} is {value!r:.80}; choose one of {', '.join(choices)}")
    return value


_READ: dict[str, Any] = {
    "inference_mode": lambda name, value: _choice(name, value, get_args(InferenceMode)),
    "do_sample": _flag,
    "individual": _individual,
    "gumbel": _individual,
    "persistence": _number,
    "density_floor": _number,
    "noise_gain": _number,
    "numeric_values": _values,
    "numbers": lambda name, value: _choice(name, value, get_args(Numbers)),
    "record": _text,
    "predict": _flag,
    "interval_level": _number,
    "raw_intervals": _flag,
}
