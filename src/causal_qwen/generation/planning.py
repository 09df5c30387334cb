"""What generate() was asked for: settings from the call, the generation config and the model, checked, as
a `Decision`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.configuration_utils import GenerationMode

from causal_qwen.generation.decisions import Decision, InferenceMode
from causal_qwen.individual import SEEDS, Individual

if TYPE_CHECKING:
    from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM

__all__ = ["Individuals", "plan"]

Individuals = Individual | int | Sequence[Individual | int]
LOOPED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
SETTINGS = ("inference_mode", "noise_gain", "density_floor", "persistence")


def plan(
    model: CausalQwen2ForCausalLM,
    inputs: Tensor | None,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
    *,
    settings: dict[str, Any],
    individual: Individuals | None,
    interval_level: float,
    raw_intervals: bool,
    normalisation: str,
    suppress_unused: bool,
    own_loop: bool = False,
) -> Decision | None:
    """The decision to generate with, or None where transformers' own loop serves: beams, assistants, and what
    Qwen does, as long as no number can be written.

    Args:
        model: Whose configuration has the last word.
        inputs: First argument of generate().
        generation_config: Second argument of generate().
        kwargs: The others; changed in place to what transformers should see.
        settings: ``inference_mode``, ``noise_gain``, ``density_floor``, ``persistence``, None where not
            given.
        individual: As given to generate().
        interval_level: As given to generate().
        raw_intervals: As given to generate().
        normalisation: As given to generate().
        suppress_unused: As given to generate().
        own_loop: Whether transformers' own loop will not do.
    """
    configured = model.generation_config if generation_config is None else generation_config
    found = {
        name: _first(settings[name], getattr(configured, name, None), getattr(model.config, name))
        for name in SETTINGS
    }
    mode = found.pop("inference_mode")
    if mode not in get_args(InferenceMode):
        raise ValueError(f"inference_mode is {mode!r}; choose one of {', '.join(get_args(InferenceMode))}")
    if normalisation not in ("softmax", "ovr"):
        raise ValueError(f"normalisation is {normalisation!r}; choose 'softmax' or 'ovr'")
    if normalisation == "ovr" and mode != "compatible":
        raise ValueError(
            "normalisation='ovr' is a distribution to sample from; "
            f"it needs inference_mode='compatible', not {mode!r}"
        )
    if mode == "causal":
        kwargs["do_sample"] = True
    asked = model._prepare_generation_config(generation_config, **kwargs)[0]
    if suppress_unused:
        kwargs["logits_processor"] = _with_suppression(model, kwargs.get("logits_processor"))

    reported: dict[str, Any] = {"level": interval_level, "raw_intervals": raw_intervals}
    way = asked.get_generation_mode(kwargs.get("assistant_model"))
    if mode == "compatible":
        if individual is not None:
            raise ValueError(
                "inference_mode='compatible' samples tokens, not individuals; seed it with torch.manual_seed"
            )
        kwargs["hide_num_token"] = not model.writes_numbers
        plain = normalisation == "softmax" and not (own_loop or asked.return_dict_in_generate)
        if way not in LOOPED or (plain and not model.writes_numbers):
            if model.writes_numbers:
                raise ValueError(
                    f"{way.value} cannot carry numbers; generate with num_beams=1 and no assistant"
                )
            _forget_absent_numbers(model, inputs, kwargs)
            return None  # transformers' own loop
        _move_stop_strings(asked, kwargs)
        return Decision(mode, do_sample=asked.do_sample, ovr=normalisation == "ovr", **reported)
    if way not in LOOPED:
        raise ValueError(
            f"{way.value} ranks texts by softmax probabilities, which inference_mode={mode!r} does not have; "
            "use inference_mode='compatible'"
        )
    _move_stop_strings(asked, kwargs)
    do_sample = bool(asked.do_sample)
    temperature = 1.0 if asked.temperature is None else float(asked.temperature)
    # Temperature scales noise here; transformers would divide logits by it.
    kwargs |= {"do_sample": do_sample, "temperature": 1.0}
    decision = Decision(mode, do_sample=do_sample, temperature=temperature, **reported, **found)
    rows = _batch_size(inputs, kwargs) * (asked.num_return_sequences or 1)
    return replace(decision, individuals=_individuals(individual, rows, do_sample))


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _forget_absent_numbers(
    model: CausalQwen2ForCausalLM, inputs: Tensor | None, kwargs: dict[str, Any]
) -> None:
    """Values of a prompt without numbers are all 0, and need not be carried from step to step."""
    ids, num_token_id = inputs if inputs is not None else kwargs.get("input_ids"), model.config.num_token_id
    if ids is not None and num_token_id is not None and not torch.any(ids == num_token_id):
        kwargs.pop("numeric_values", None)


def _move_stop_strings(asked: GenerationConfig, kwargs: dict[str, Any]) -> None:
    """Make stop strings a stopping criterion: transformers would look for a tokenizer that it has dropped."""
    if asked.stop_strings is None:
        return
    tokenizer = kwargs.pop("tokenizer", None)
    if tokenizer is None:
        raise ValueError("stop_strings are text; pass tokenizer= as well")
    criterion = StopStringCriteria(tokenizer, asked.stop_strings)
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criterion])
    kwargs["stop_strings"] = None


def _batch_size(inputs: Tensor | None, kwargs: dict[str, Any]) -> int:
    for tensor in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if tensor is not None:
            return len(tensor)
    return 1


def _individuals(given: Individuals | None, rows: int, do_sample: bool) -> list[Individual]:
    """One individual per row: those given, or new ones by torch's generator, so that torch.manual_seed
    repeats them.
    """
    if not do_sample:
        if given is not None:
            raise ValueError(
                "individual is given, but nothing is sampled; pass do_sample=True or inference_mode='causal'"
            )
        return []
    if given is None:
        return [Individual(seed) for seed in torch.randint(SEEDS // 2 - 1, (rows,)).tolist()]
    people = [given] * rows if isinstance(given, Individual | int) else list(given)
    if len(people) != rows:
        raise ValueError(f"{len(people)} individuals for {rows} rows; give one for all, or one per row")
    made = {seed: Individual(seed) for seed in people if not isinstance(seed, Individual)}
    return [person if isinstance(person, Individual) else made[person] for person in people]


def _with_suppression(
    model: CausalQwen2ForCausalLM, given: LogitsProcessorList | None
) -> LogitsProcessorList:
    """The processors, and one that forbids the rows behind <NUM>, which no token uses."""
    config = model.config
    first = config.vocab_size if config.num_token_id is None else config.num_token_id + 1
    unused = list(range(first, config.vocab_size))
    extra = [SuppressTokensLogitsProcessor(unused, device=model.device)] if unused else []
    return LogitsProcessorList([*(given or []), *extra])
