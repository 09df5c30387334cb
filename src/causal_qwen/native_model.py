"""A causal model without transformers: its configuration, its heads, and an engine for everything else.

It gives what generation, prediction and a server need of a model on the CPU, in a second and without the
weights being anywhere but in the engine. Its rules are those of the whole model: `plan` and `decode` are the
same, and so is what settings do to logits. It does not know where its parts come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from causal_qwen.causal_reading import CausalReading
from causal_qwen.configuration import CausalFields
from causal_qwen.decoder.engine import Engine
from causal_qwen.generation.decoding import Generated, decode
from causal_qwen.generation.processors import processors_of
from causal_qwen.generation.protocol import CausalModel, Criteria, Streamer
from causal_qwen.generation.settings import plan, take_values, with_prompt_values
from causal_qwen.heads import make_heads
from causal_qwen.individual import Individuals

__all__ = ["GenerationDefaults", "NativeConfig", "NativeModel", "UnservedError"]


class UnservedError(ValueError):
    """Something that only the whole model in transformers can do."""


@dataclass(kw_only=True)
class _Sizes:
    """What the heads and their users read of a base's configuration."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Where the checks of `CausalFields` end."""


@dataclass(kw_only=True)
class NativeConfig(CausalFields, _Sizes):
    """The fields of `CausalFields`, checked as ever, and a few of the base's."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> NativeConfig:
        """From the object of a config.json; whatever else it says is left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in config.items() if name in known})


# Entries of a generation_config.json that change nothing here.
INERT = {"_from_model_config", "transformers_version", "use_cache", "bos_token_id", "decoder_start_token_id"}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What a call of generate() is asked for, with transformers' names and its values where nobody says.

    Args:
        max_new_tokens: Most tokens of a text; None leaves it to ``max_length``.
        max_length: Most tokens with the prompt's.
        do_sample: Whether to sample.
        temperature: T.
        top_k: The k best tokens alone.
        top_p: The nucleus of this probability alone.
        repetition_penalty: Of tokens so far.
        eos_token_id: What ends a text.
        pad_token_id: What a row gets behind its end.
        return_dict_in_generate: Whether an output is returned, and not ids alone.
        output_scores: Whether the output has scores.
        output_logits: Whether the output has logits.
        num_return_sequences: Texts per prompt.
        inference_mode: As for `generate`, as are the three below.
        noise_gain: κ.
        density_floor: Truncation of the noise.
        persistence: ρ.
    """

    max_new_tokens: int | None = None
    max_length: int = 20
    do_sample: bool = False
    temperature: float | None = 1.0
    top_k: int | None = 50
    top_p: float | None = 1.0
    repetition_penalty: float | None = 1.0
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    return_dict_in_generate: bool = False
    output_scores: bool = False
    output_logits: bool = False
    num_return_sequences: int = 1
    inference_mode: str | None = None
    noise_gain: float | None = None
    density_floor: float | None = None
    persistence: float | None = None

    # What only transformers' forward passes and loops give.
    output_hidden_states = False
    output_attentions = False
    stop_strings = None

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> GenerationDefaults:
        """From the object of a generation_config.json.

        Raises:
            UnservedError: If it asks for something else.
        """
        known = {field.name for field in fields(cls)}
        others = {name for name, value in entries.items() if value not in (None, False)} - known - INERT
        if others:
            raise UnservedError(f"generation_config.json has {', '.join(sorted(others)):.200}")
        return cls(**{name: value for name, value in entries.items() if name in known and value is not None})

    def get_generation_mode(self, assistant_model: object = None) -> str:
        """Which loop transformers would take."""
        return "sample" if self.do_sample else "greedy_search"


class NativeModel(CausalReading):
    """The heads of a causal model on an `Engine`.

    Args:
        config: Its configuration.
        engine: Its backbone and W.
        heads: The tensors of the heads, by the names that they have in a checkpoint.
        defaults: How it generates where a call does not say.

    Raises:
        RuntimeError: If a tensor of the heads is missing or misshapen.
    """

    def __init__(
        self,
        config: NativeConfig,
        engine: Engine,
        heads: Mapping[str, Tensor],
        defaults: GenerationDefaults,
    ) -> None:
        self.config, self.engine, self.generation_config = config, engine, defaults
        self.numeric_embedding, self.abduction, self.action = make_heads(config)
        for name in ("numeric_embedding", "abduction", "action"):
            head: torch.nn.Module = getattr(self, name)
            own = {key.removeprefix(f"{name}."): one for key, one in heads.items() if key.startswith(name)}
            head.load_state_dict(own, assign=True)
            head.requires_grad_(False)

    @property
    def training(self) -> bool:
        """Never: there is nothing to train."""
        return False

    def eval(self) -> NativeModel:
        """Itself, as it always is."""
        return self

    def train(self, mode: bool = True) -> NativeModel:
        """Itself, if it is not to be trained.

        Raises:
            ValueError: If it is.
        """
        if mode:
            raise ValueError("a packed model cannot be trained; load it with load_model")
        return self

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        inference_mode: str | None = None,
        individual: Individuals | None = None,
        noise_gain: float | None = None,
        density_floor: float | None = None,
        persistence: float | None = None,
        interval_level: float = 0.9,
        raw_intervals: bool = False,
        normalisation: str = "softmax",
        suppress_unused: bool = False,
        engine: Engine | None = None,
        stopping_criteria: Criteria = (),
        streamer: Streamer | None = None,
        loop: Callable[..., Any] = decode,
        **kwargs: Any,
    ) -> Any:
        """As the whole model's; what it takes beside these are the fields of `GenerationDefaults`,
        ``input_ids``, ``attention_mask`` and ``numeric_values``.

        Raises:
            UnservedError: If it is given something else.
        """
        if engine not in (None, self.engine):
            raise ValueError("the engine is another model's; this one has its own: leave out engine=")
        inputs, values = take_values(self.config.num_token_id, inputs, kwargs)
        model = cast(CausalModel, self)
        decision = plan(
            model,
            inputs,
            None,
            kwargs,
            inference_mode=inference_mode,
            noise_gain=noise_gain,
            density_floor=density_floor,
            persistence=persistence,
            individual=individual,
            interval_level=interval_level,
            raw_intervals=raw_intervals,
            normalisation=normalisation,
            suppress_unused=suppress_unused,
            own_loop=True,
        )
        assert decision is not None  # there are no beams and no assistants
        suppression: Sequence[Any] = kwargs.pop("logits_processor", None) or ()
        kwargs.pop("hide_num_token", None)
        settings, batch = self._prepare_generation_config(None, **kwargs)
        ids = batch.pop("input_ids", inputs)
        if ids is None:
            raise ValueError("there is nothing to continue: give input_ids")
        mask = batch.pop("attention_mask", None)
        numbers = batch.pop("numeric_values", None)
        if batch:
            raise UnservedError(f"{', '.join(sorted(batch))}: only the whole model takes that")
        if settings.num_return_sequences > 1:
            ids, mask, numbers = (
                None if rows is None else rows.repeat_interleave(settings.num_return_sequences, 0)
                for rows in (ids, mask, numbers)
            )
        if settings.max_new_tokens is not None:
            settings = replace(settings, max_length=ids.shape[1] + settings.max_new_tokens)
        ends = _ends(settings)
        own: list[Any] = [lambda ids, scores: ids.shape[1] >= settings.max_length]
        if ends:
            eos = torch.tensor(ends)
            own.append(lambda ids, scores: torch.isin(ids[:, -1], eos))
        outputs = loop(
            model,
            ids,
            [*processors_of(settings), *suppression],
            [*own, *stopping_criteria],
            settings,
            decision=decision,
            may_pad=bool(ends),
            output=Generated,
            engine=self.engine,
            streamer=streamer,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            numeric_values=numbers,
        )
        return outputs if values is None else with_prompt_values(outputs, values)

    def _prepare_generation_config(
        self, generation_config: None, **kwargs: Any
    ) -> tuple[GenerationDefaults, dict[str, Any]]:
        """The settings of a call, and what is left of its arguments; transformers' name and order."""
        known = {field.name for field in fields(GenerationDefaults)}
        own = {name: value for name, value in kwargs.items() if name in known}
        rest = {name: value for name, value in kwargs.items() if name not in known}
        return replace(self.generation_config, **own), rest

    def _has_unfinished_sequences(self, finished: bool, synced_gpus: bool, device: Any) -> bool:
        return not finished


def _ends(settings: GenerationDefaults) -> list[int]:
    ends = settings.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
