"""What generate() was asked for: settings from the call, the generation config and the model, checked, as
a `Decision`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.generation.decisions import Decision, InferenceMode
from causal_qwen.generation.processors import Suppression
from causal_qwen.generation.protocol import CausalModel, Processors
from causal_qwen.individual import Individuals, one_per_row
from causal_qwen.numbered_ids import NumberedIds

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["hides_num", "plan", "resolve", "take_values", "with_prompt_values"]

LOOPED = ("greedy_search", "sample")  # of transformers' GenerationMode


def resolve(model: CausalModel, generation_config: GenerationConfig | None = None, **call: Any) -> Any:
    """Each setting from the call, else from the generation config, else from the model's configuration.

    Args:
        model: Whose ``generation_config`` is taken where none is passed.
        generation_config: Of the call; a field that it lacks or leaves None says nothing.
        **call: ``inference_mode``, ``noise_gain``, ``density_floor`` or ``persistence``, None where the call
            does not say.

    Returns:
        The same names.

    Raises:
        ValueError: If the mode is not known.
    """
    between = model.generation_config if generation_config is None else generation_config
    settings = {
        name: next(
            value
            for value in (own, getattr(between, name, None), getattr(model.config, name))
            if value is not None
        )
        for name, own in call.items()
    }
    mode = settings.get("inference_mode", "standard")
    if mode not in get_args(InferenceMode):
        raise ValueError(f"inference_mode is {mode!r}; choose one of {', '.join(get_args(InferenceMode))}")
    return settings


def hides_num(model: CausalModel, mode: InferenceMode) -> bool:
    """Whether a <NUM> row that conversion added takes no part: nobody has trained it, and Qwen decides."""
    return mode == "compatible" and not model.writes_numbers


def take_values(
    num_token_id: int | None, inputs: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """The prompts as plain ids, and the values of their numbers, (B, T); None where they have none.

    Values come with ``numeric_values=``, or with the ids of a processor; ``kwargs`` are changed in place.

    Raises:
        ValueError: If a <NUM> has lost its value.
    """
    ids = kwargs.get("input_ids") if inputs is None else inputs
    if isinstance(ids, NumberedIds):
        kwargs.setdefault("numeric_values", ids.numeric_values)
        ids = ids.as_subclass(Tensor)
        if inputs is None:
            kwargs["input_ids"] = ids
    values: Tensor | None = kwargs.get("numeric_values")
    if ids is None or num_token_id is None or not torch.any(ids == num_token_id):
        return (None if inputs is None else ids), None
    if values is None and kwargs.get("inputs_embeds") is None:
        raise ValueError(
            "the prompt has <NUM> tokens, but no numeric_values; pass all that the processor returned, "
            "generate(**batch), or read numbers as text, processor(..., numbers='text')"
        )
    return (None if inputs is None else ids), values


def with_prompt_values(outputs: Any, values: Tensor) -> Any:
    """Ids that generate() returned alone, (B', T'), with the values of the prompts (B, T) that they begin
    with.
    """
    if not isinstance(outputs, Tensor):
        return outputs
    rows = values.repeat_interleave(len(outputs) // len(values), dim=0)
    return NumberedIds.of(outputs, F.pad(rows, (0, outputs.shape[1] - rows.shape[1])))


def plan(
    model: CausalModel,
    inputs: Tensor | None,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
    *,
    individual: Individuals | None,
    interval_level: float,
    raw_intervals: bool,
    normalisation: str,
    suppress_unused: bool,
    own_loop: bool,
    **settings: Any,
) -> Decision | None:
    """The decision to generate with, or None where transformers' own loop serves: beams, assistants, and what
    Qwen does, as long as no number can be written.

    Arguments are those of generate(): ``kwargs`` are what it hands on, changed in place to what transformers
    should see, and ``settings`` are for `resolve`. ``own_loop`` says that transformers' own will not do.
    """
    settings = resolve(model, generation_config, **settings)
    mode = settings.pop("inference_mode")
    if normalisation not in ("softmax", "ovr"):
        raise ValueError(f"normalisation is {normalisation!r}; choose 'softmax' or 'ovr'")
    if normalisation == "ovr" and mode != "compatible":
        raise ValueError(
            "normalisation='ovr' is a distribution to sample from; "
            f"it needs inference_mode='compatible', not {mode!r}"
        )
    if mode == "causal":
        kwargs["do_sample"] = True
    config = model._prepare_generation_config(generation_config, **kwargs)[0]
    if suppress_unused:
        kwargs["logits_processor"] = _with_suppression(model, kwargs.get("logits_processor"))

    interval: dict[str, Any] = {"level": interval_level, "raw_intervals": raw_intervals}
    method = config.get_generation_mode(kwargs.get("assistant_model"))
    spelled = model.writes_numbers and model.config.number_spelling is not None
    if spelled and kwargs.get("past_key_values") is not None and not config.return_dict_in_generate:
        raise ValueError(
            "past_key_values would hold <NUM> where the returned ids hold digits; pass "
            "return_dict_in_generate=True, and go on with its sequences and numeric_values"
        )
    if mode == "compatible":
        if individual is not None:
            raise ValueError(
                "inference_mode='compatible' samples tokens, not individuals; seed it with torch.manual_seed"
            )
        kwargs["hide_num_token"] = hide_num = hides_num(model, mode)
        plain = normalisation == "softmax" and not (own_loop or config.return_dict_in_generate)
        if method not in LOOPED or (plain and hide_num):
            if not hide_num:
                raise ValueError(
                    f"{method.value} cannot carry numbers; generate with num_beams=1 and no assistant"
                )
            _drop_absent_values(model, inputs, kwargs)
            return None  # transformers' own loop
        _move_stop_strings(config, kwargs)
        return Decision(
            mode, do_sample=config.do_sample, ovr=normalisation == "ovr", hide_num=hide_num, **interval
        )
    if method not in LOOPED:
        raise ValueError(
            f"{method.value} ranks texts by softmax probabilities, which inference_mode={mode!r} does not "
            "have; use inference_mode='compatible'"
        )
    _move_stop_strings(config, kwargs)
    do_sample = bool(config.do_sample)
    if individual is not None and not do_sample:
        raise ValueError(
            "individual is given, but nothing is sampled; pass do_sample=True or inference_mode='causal'"
        )
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    # Temperature scales noise here; transformers would divide logits by it.
    kwargs |= {"do_sample": do_sample, "temperature": 1.0}
    decision = Decision(mode, do_sample=do_sample, temperature=temperature, **interval, **settings)
    rows = _batch_size(inputs, kwargs) * (config.num_return_sequences or 1)
    if not decision.draws_noise:
        return decision
    return replace(decision, individuals=one_per_row(individual, rows))


def _drop_absent_values(model: CausalModel, inputs: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Values of a prompt without numbers are all 0, and need not be carried from step to step."""
    ids, num_token_id = inputs if inputs is not None else kwargs.get("input_ids"), model.config.num_token_id
    if ids is not None and num_token_id is not None and not torch.any(ids == num_token_id):
        kwargs.pop("numeric_values", None)


def _move_stop_strings(config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    """Make stop strings a stopping criterion: transformers would look for a tokenizer that it has dropped."""
    if config.stop_strings is None:
        return
    from transformers import ProcessorMixin, StoppingCriteriaList, StopStringCriteria

    tokenizer = kwargs.pop("tokenizer", None)
    if tokenizer is None:
        raise ValueError("stop_strings are text; pass tokenizer= as well")
    if isinstance(tokenizer, ProcessorMixin):
        tokenizer = tokenizer.tokenizer
    criterion = StopStringCriteria(tokenizer, config.stop_strings)
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criterion])
    kwargs["stop_strings"] = None


def _batch_size(inputs: Tensor | None, kwargs: dict[str, Any]) -> int:
    for tensor in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if tensor is not None:
            return len(tensor)
    return 1


def _with_suppression(model: CausalModel, processors: Processors | None) -> Processors:
    """The processors, and one that forbids the rows behind <NUM>, which no token uses."""
    config = model.config
    first = config.vocab_size if config.num_token_id is None else config.num_token_id + 1
    unused = [Suppression(first)] if first < config.vocab_size else []
    return [*(processors or []), *unused]
