"""From requests to jobs: prompts are read, settings checked, and generate() prepares what each text needs.

This module knows the model and what clients may ask for, not HTTP.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from causal_qwen.context import check_context
from causal_qwen.data import Prompt, Reading, prompt_batch
from causal_qwen.decoder.engine import Engine
from causal_qwen.decoder.stopping import JsonComplete, StopCondition, as_conditions
from causal_qwen.evaluation import predict
from causal_qwen.evaluation.predict import Prediction
from causal_qwen.generation.batching import Batch, NativeBatch, SingleBatch, prepared
from causal_qwen.generation.protocol import CausalModel
from causal_qwen.generation.settings import resolve
from causal_qwen.individual import SEEDS, Individual
from causal_qwen.number_processor import NumberProcessor
from causal_qwen.prompting import Settings
from causal_qwen.serving.errors import Refusal
from causal_qwen.serving.jobs import Job
from causal_qwen.serving.json_objects import JsonObject
from causal_qwen.serving.requests import MOST_CHOICES, Message, PredictRequest, Sampling, Who

if TYPE_CHECKING:
    from causal_qwen.causal_lm import CausalLM
    from causal_qwen.native_model import NativeModel

__all__ = ["Asked", "Desk", "Limits"]

# Rows that are predicted between two steps of the others.
ROWS_AT_A_TIME = 4
NOISE = ("persistence", "density_floor", "noise_gain")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one server takes.

    Args:
        body: Bytes of a request.
        tokens: New tokens of a text.
        waiting: Texts in the queue.
        seconds: Time for a text, waiting included.
        batch: Texts at a time.
    """

    body: int = 1_000_000
    tokens: int = 2048
    waiting: int = 64
    seconds: float = 300.0
    batch: int = 16

    def __post_init__(self) -> None:
        for name in ("body", "tokens", "batch", "seconds"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; a server needs more than 0 of it")
        if self.waiting < 0:
            raise ValueError(f"waiting is {self.waiting}; it must be 0 or more")


@dataclass(frozen=True)
class Asked:
    """What decides the texts of a request, checked.

    Args:
        settings: As for a `Speaker`, with a mode.
        noise_gain: κ, or None for the model's.
        person: The first who speaks; None where it is drawn.
        json_object: Whether the text must be one JSON object.
        top: As for a `Job`.
    """

    settings: Settings
    noise_gain: float | None = None
    person: Individual | None = None
    json_object: bool = False
    top: int | None = None

    def people(self, count: int) -> list[Individual]:
        """Who speaks each of several texts: the first, and the seeds after."""
        first = Individual.random() if self.person is None else self.person
        return [first, *(replace(first, seed=(first.seed + i) % SEEDS, path=None) for i in range(1, count))]


class Desk:
    """A model, and what it takes to ask it.

    Args:
        model: In evaluation mode.
        processor: The model's.
        engine: Runs the forward passes; None for the model itself.
        name: By which clients know it.
        reading: How rows of tables become prompts.
        mode: Of texts that do not say.
        limits: How much is taken.
    """

    def __init__(
        self,
        model: CausalLM | NativeModel,
        processor: NumberProcessor,
        engine: Engine | None = None,
        *,
        name: str,
        reading: Reading | None = None,
        mode: str = "causal",
        limits: Limits | None = None,
    ) -> None:
        self.model, self.processor, self.engine, self.name = model, processor, engine, name
        self._speaks = cast(CausalModel, model)  # as generation sees it
        self.reading, self.mode = reading or Reading(), mode
        self.limits = limits or Limits()
        self.precision = _precision(model, engine)
        self.created = int(time.time())
        ends = model.generation_config.eos_token_id
        self._eos = frozenset([ends] if isinstance(ends, int) else ends or ())
        # Tokenizers keep padding and truncation in themselves: one request at a time is read.
        self._lock = threading.Lock()

    def batch(self) -> Batch:
        """Where texts are continued."""
        if self.engine is None:
            return SingleBatch(self._speaks)
        return NativeBatch(self._speaks, self.engine, self.limits.batch)

    @property
    def context(self) -> int:
        """Positions that the model has."""
        return int(self.model.config.max_position_embeddings)

    @property
    def fingerprint(self) -> str:
        """A name of what decides: the same fingerprint and individual, the same text."""
        config = self.model.config
        words = [self.name, self.precision, str(config.hidden_size), str(config.vocab_size)]
        return "cq-" + hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]

    def card(self) -> dict[str, Any]:
        """What /v1/models says."""
        config = self.model.config
        defaults = resolve(self._speaks, None, **dict.fromkeys(NOISE))
        defaults |= {
            "inference_mode": self.mode,
            "top_k": self.model._prepare_generation_config(None)[0].top_k,
        }
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "causal-qwen",
            "engine": "transformers" if self.engine is None else "native",
            "dtype": self.precision,
            "context": self.context,
            "max_tokens": self.limits.tokens,
            "max_choices": MOST_CHOICES,
            "chat": self.processor.chat_template is not None,
            "writes_numbers": bool(self.model.writes_numbers),
            "calibrated": config.conformal_scores is not None,
            "inference_modes": ["causal", "standard", "compatible"],
            "defaults": defaults,
            "template": self.reading.templates[0] if self.reading.templates else None,
            "target": self.reading.target,
        }

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            Refusal: If it is.
        """
        if name is not None and name != self.name:
            message = f"the model {name!r:.80} is not served here; {self.name!r} is"
            raise Refusal(message, status=404, param="model", code="model_not_found")

    def asked(
        self,
        request: Sampling,
        *,
        max_tokens: int,
        mode: str | None,
        sample: bool | None = None,
        seed: int | None = None,
        individual: int | Who | None = None,
        level: float = 0.9,
        raw_intervals: bool = False,
        json_object: bool = False,
        top: int | None = None,
    ) -> Asked:
        """The settings of a request, checked.

        Raises:
            ValueError: If they do not belong together.
        """
        mode = self.mode if mode is None else mode
        if max_tokens > self.limits.tokens:
            raise Refusal(
                f"max_tokens is {max_tokens}; this server gives {self.limits.tokens} at most",
                param="max_tokens",
            )
        if sample is None:
            sample = mode == "compatible" and request.temperature != 0
        elif not sample and mode == "causal":
            raise Refusal(
                "sample is false, but in mode causal an individual decides; give temperature 0 instead",
                param="sample",
            )
        stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        settings = Settings(
            mode=mode,
            sample=sample,
            max_new_tokens=max_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            repetition_penalty=request.repetition_penalty,
            persistence=request.persistence,
            density_floor=request.density_floor,
            stop=stop,
            level=level,
            raw_intervals=raw_intervals,
        )
        person = self.person(seed if individual is None else individual)
        return Asked(settings, request.noise_gain, person, json_object, top)

    def person(self, who: int | Who | None) -> Individual | None:
        """The individual of a request.

        Raises:
            ValueError: If it is none, or was abducted for another model.
        """
        if who is None:
            return None
        if isinstance(who, int):
            return Individual(who)
        person = Individual.from_json(
            who.model_dump_json(exclude=None if who.path else {"path", "path_shape"})
        )
        size = self.model.action.b_noise.shape[0]
        if person.path is not None and person.path.shape[1] != size + 1:
            raise ValueError(
                f"individual was abducted for causes of size {person.path.shape[1] - 1}, not {size}"
            )
        return person

    def prompt(self, prompt: str | Sequence[Message]) -> Prompt:
        """A text as it is, and messages as the chat template takes them.

        Raises:
            Refusal: If the model has no chat template.
        """
        if isinstance(prompt, str):
            return prompt
        if self.processor.chat_template is None:
            raise Refusal("this model has no chat template; use /v1/completions", param="messages")
        return [message.plain() for message in prompt]

    def jobs(self, prompt: Prompt, asked: Asked, people: Sequence[Individual]) -> list[Job]:
        """A job for each of the people, to the same prompt.

        Raises:
            ValueError: If the prompt is empty or too long, or a setting is wrong.
        """
        with self._lock:
            inputs = prompt_batch(self.processor, [prompt], self.model.device)
            return [self._job(inputs, asked, person) for person in people]

    def room(self, prompt: Prompt) -> int:
        """New tokens that the context has room for behind a prompt."""
        with self._lock:
            length = prompt_batch(self.processor, [prompt])["input_ids"].shape[1]
        check_context(self.context, length)
        return self.context - length + 1

    def _job(self, inputs: Mapping[str, torch.Tensor], asked: Asked, person: Individual) -> Job:
        settings = asked.settings
        options = settings.options()
        options.pop("max_new_tokens")
        conditions: list[StopCondition] = as_conditions(settings.stop)
        if settings.draws_noise:
            options["individual"] = person
            if asked.noise_gain is not None:
                options["noise_gain"] = asked.noise_gain
        text = prepared(self._speaks, dict(inputs), options, max_new_tokens=settings.max_new_tokens)
        if asked.json_object:
            # First of all: the k best are to be the best of those that fit.
            own = JsonObject(self.processor, inputs["input_ids"].shape[1])
            text.processors = [own, *text.processors]
            conditions.append(JsonComplete())
        if settings.samples and not settings.draws_noise:
            generator = torch.Generator(self.model.device).manual_seed((person.seed + person.start) % 2**63)
            text.decision = replace(text.decision, generator=generator)
        return Job(
            text,
            self.processor,
            self._eos,
            stop=settings.stop,
            conditions=conditions,
            top=asked.top,
            deadline=time.monotonic() + self.limits.seconds,
        )

    def reading_of(self, request: PredictRequest) -> Reading:
        """How the rows of a request become prompts."""
        if request.template is not None:
            return replace(self.reading, template=request.template, target=request.target)
        return self.reading if request.target is None else replace(self.reading, target=request.target)

    def predictions(self, request: PredictRequest, reading: Reading, start: int) -> list[Prediction]:
        """Of the next rows from ``start`` on, in the scheduler's thread.

        Raises:
            ValueError: If a row cannot be read; it is named.
        """
        rows = request.rows[start : start + ROWS_AT_A_TIME]
        with self._lock:
            return list(
                predict(
                    self.model,
                    self.processor,
                    rows,
                    reading=reading,
                    level=request.interval_level,
                    raw=request.raw_intervals,
                    batch_size=1,
                    engine=self.engine,
                )
            )


def _precision(model: Any, engine: Engine | None) -> str:
    """Of the weights, in the words of the command line."""
    if engine is None:
        return str(model.dtype).removeprefix("torch.")
    matrix = engine.weights.blocks[0].qkv
    if matrix.scale is None:
        return str(matrix.weight.dtype).removeprefix("torch.")
    return f"int{32 * matrix.weight.shape[1] // matrix.columns}"
