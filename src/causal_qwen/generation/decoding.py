"""The decoding loop: prefill, then decide and step until every row has stopped.

It has the place of transformers' own sampling loop inside generate(): inputs, processors, stopping criteria
and the cache arrive prepared. What it adds is that the decision is a `Decision`, and that numbers travel with
their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from causal_qwen.generation.decisions import Choice, Decision
from causal_qwen.generation.native import NativeEngine, NativeSession
from causal_qwen.generation.readout import ReadOut
from causal_qwen.generation.streaming import NumberStreamer
from causal_qwen.individual import Individual

if TYPE_CHECKING:
    from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM

__all__ = ["CausalGenerateOutput", "decode"]


@dataclass
class CausalGenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output, and the numbers.

    Args:
        numeric_values: (B, T) value at each <NUM> of ``sequences``, 0 elsewhere; float64.
        numeric_lower: (B, T) lower end of its interval; equal to the value in the prompt.
        numeric_upper: (B, T) upper end of its interval.
        individuals: Who decided each row, where noise was drawn: pass them to generate() again for the same
            text.
    """

    numeric_values: Tensor | None = None
    numeric_lower: Tensor | None = None
    numeric_upper: Tensor | None = None
    individuals: list[Individual] | None = None


class _Numbers:
    """The values of a growing text with their intervals: (3, B, T), values, lower and upper ends.

    Made when the first number appears, so that plain text is free.
    """

    def __init__(self, values: Tensor | None, num_token_id: int | None) -> None:
        self.table = None if values is None else values.expand(3, *values.shape)
        self.num_token_id = num_token_id

    def append(self, choice: Choice, tokens: Tensor, length: int) -> None:
        """Add one column; ``length`` is the length of the text before it."""
        if self.num_token_id is None:
            return
        if self.table is None:
            if self.num_token_id not in tokens.tolist():
                return
            self.table = choice.values.new_zeros(3, len(tokens), length)
        column = torch.where(tokens == self.num_token_id, torch.stack(choice.numbers), 0.0)
        self.table = torch.cat([self.table.to(column), column[..., None]], dim=-1)

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
        """Values, lower ends and upper ends, (B, T) each."""
        return (None, None, None) if self.table is None else (self.table[0], self.table[1], self.table[2])


def decode(
    model: CausalQwen2ForCausalLM,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    decision: Decision,
    engine: NativeEngine | None = None,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> CausalGenerateOutput | Tensor:
    """Generate with a `Decision`; arguments as transformers hands them to its own loops.

    With an ``engine``, forward passes are its own.
    """
    config = generation_config
    keep = bool(config.return_dict_in_generate)
    scores: tuple[Tensor, ...] | None = () if keep and config.output_scores else None
    raw_logits: tuple[Tensor, ...] | None = () if keep and config.output_logits else None
    hidden_states: tuple[Any, ...] | None = () if keep and config.output_hidden_states else None
    attentions: tuple[Any, ...] | None = () if keep and config.output_attentions else None
    pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    given = model_kwargs.get("numeric_values")
    if not torch.any(input_ids == (-1 if model.config.num_token_id is None else model.config.num_token_id)):
        given = model_kwargs["numeric_values"] = None  # no number in the prompt: nothing to carry
    numbers = _Numbers(given, model.config.num_token_id)
    unfinished = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
    compiled = model._valid_auto_compile_criteria(model_kwargs, config)
    forward = model.get_compiled_call(config.compile_config) if compiled else model.__call__

    model_kwargs["output_logits"] = decision.mode == "compatible" and not decision.ovr

    heads = ReadOut(model) if engine is None else engine.heads
    session = None if engine is None else _session(engine, input_ids, config, model_kwargs)
    position = 0
    if session is None:
        outputs: Any = model._prefill(input_ids, config, model_kwargs)
    else:
        outputs = session.prefill(model_kwargs.get("numeric_values"))
    while True:
        if session is None:
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
        choice = decision.choose(heads, outputs, input_ids, position, logits_processor)
        tokens = choice.tokens
        if pads:
            tokens = torch.where(unfinished, tokens, config._pad_token_tensor.to(tokens.device))
        if scores is not None:
            scores += (choice.scores,)
        if raw_logits is not None:
            logits = choice.logits
            if logits is None or decision.mode != "compatible":  # a decision may round otherwise
                logits = heads.logits(heads.causes(outputs)[0].loc)
            raw_logits += (logits,)
        if hidden_states is not None:
            hidden_states += (outputs.hidden_states,)
        if attentions is not None:
            attentions += (outputs.attentions,)
        numbers.append(choice, tokens, input_ids.shape[1])
        model_kwargs["numeric_values"] = numbers.rows[0]
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        if isinstance(streamer, NumberStreamer):
            streamer.put_choice(tokens.cpu(), choice)
        elif streamer is not None:
            streamer.put(tokens.cpu())
        for criterion in stopping_criteria:  # as the list itself, in fewer operations
            unfinished.masked_fill_(criterion(input_ids, scores), False)
        finished = not any(unfinished.tolist())
        del outputs, choice  # a choice holds the outputs that its number would come from
        if not model._has_unfinished_sequences(finished, synced_gpus, device=input_ids.device):
            break
        position += 1
        if session is not None:
            outputs = session.step(tokens, numbers.rows[0])
            continue
        step = 1 if model_kwargs["use_cache"] else None
        outputs = forward(
            **model.prepare_inputs_for_generation(input_ids, next_sequence_length=step, **model_kwargs),
            return_dict=True,
        )

    if streamer is not None:
        streamer.end()
    if not keep:
        return input_ids
    values, lower, upper = numbers.rows
    return CausalGenerateOutput(
        sequences=input_ids,
        scores=scores,
        logits=raw_logits,
        attentions=attentions,
        hidden_states=hidden_states,
        past_key_values=model_kwargs.get("past_key_values"),
        numeric_values=values,
        numeric_lower=lower,
        numeric_upper=upper,
        individuals=list(decision.individuals) or None,
    )


def _session(
    engine: NativeEngine, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> NativeSession:
    """The engine's view of what generate() prepared.

    Raises:
        ValueError: If something is asked for that only the model itself can give.
    """
    if config.output_hidden_states or config.output_attentions or "inputs_embeds" in model_kwargs:
        raise ValueError(
            "the native engine reads tokens and keeps neither hidden states nor attentions; "
            "call generate() without engine= for these"
        )
    return engine.session(
        input_ids,
        model_kwargs.get("attention_mask"),
        max_length=config.max_length,
        output_logits=model_kwargs["output_logits"],
        hide_num=bool(model_kwargs.get("hide_num_token")),
    )
