"""The place of transformers' sampling loop inside generate(): inputs, processors, stopping criteria and the
cache arrive prepared, tokens and numbers come from the loop, and what was asked for is recorded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from torch import Tensor

from causal_qwen.decoder.engine import Engine
from causal_qwen.generation.decisions import Decision
from causal_qwen.generation.loop import Inference, Texts, steps
from causal_qwen.generation.native import NativeStepper
from causal_qwen.generation.protocol import CausalModel, Criteria, Processors, Streamer
from causal_qwen.generation.spelling import spelled
from causal_qwen.generation.stepping import TransformersStepper
from causal_qwen.generation.streaming import SpelledStream
from causal_qwen.individual import Individual

__all__ = ["Generated", "GeneratedNumber", "NumberedTexts", "decode"]

Output = TypeVar("Output")


@dataclass(frozen=True)
class GeneratedNumber:
    """A number in a generated text.

    Args:
        position: Index of its token among the generated ones.
        value: What is said.
        lower: Lower end of the model's interval there.
        upper: Upper end.
        extrapolates: Whether it lies beyond what training has seen, so that the interval is not calibrated;
            None where nobody knows.
    """

    position: int
    value: float
    lower: float
    upper: float
    extrapolates: bool | None = None


class NumberedTexts:
    """What an output of generation knows of its numbers; goes into a dataclass that has these fields."""

    sequences: Tensor
    numeric_values: Tensor | None
    numeric_lower: Tensor | None
    numeric_upper: Tensor | None
    numeric_extrapolates: Tensor | None

    def after(self, start: int) -> Self:
        """The texts without their first ``start`` tokens, which were the prompts, with their numbers."""
        names = (
            "sequences",
            "numeric_values",
            "numeric_lower",
            "numeric_upper",
            "numeric_extrapolates",
        )
        columns = {name: getattr(self, name) for name in names}
        return type(self)(
            **{name: None if rows is None else rows[:, start:].cpu() for name, rows in columns.items()}
        )

    def numbers(self, num_token_id: int, row: int = 0) -> tuple[GeneratedNumber, ...]:
        """The numbers of one row, with their intervals."""
        if self.numeric_values is None:
            return ()
        columns = (self.numeric_values, self.numeric_lower, self.numeric_upper, self.numeric_extrapolates)
        numbers = []
        for position in (self.sequences[row] == num_token_id).nonzero().flatten().tolist():
            value, lower, upper, flag = (
                math.nan if rows is None else float(rows[row, position]) for rows in columns
            )
            known = None if math.isnan(flag) else bool(flag)
            numbers.append(GeneratedNumber(position, value, lower, upper, known))
        return tuple(numbers)


@dataclass
class Generated(NumberedTexts):
    """Texts with their numbers: `CausalGenerateOutput` without what only transformers records."""

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    numeric_values: Tensor | None = None
    numeric_lower: Tensor | None = None
    numeric_upper: Tensor | None = None
    numeric_extrapolates: Tensor | None = None
    individuals: list[Individual] | None = None


def decode(
    model: CausalModel,
    input_ids: Tensor,
    processors: Processors,
    stopping_criteria: Criteria,
    generation_config: Any,
    *,
    decision: Decision,
    may_pad: bool,
    output: type[Output],
    engine: Engine | None = None,
    streamer: Streamer | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Output | Tensor:
    """Generate with a `Decision`; arguments as transformers hands them to its own loops.

    With an ``engine``, forward passes are its own. Ids that are returned alone have their numbers in digits,
    as streamed ones have; an output, of the type ``output``, has <NUM> and its values. ``may_pad`` says that
    rows can end one by one, at an end-of-text token, and are padded from there.
    """
    values = model_kwargs.pop("numeric_values", None)
    stepper = _stepper(model, engine, generation_config, model_kwargs)
    texts = Texts(
        input_ids,
        values,
        num_token_id=model.config.num_token_id,
        pad_token_id=_pad_token(generation_config) if may_pad else None,
    )
    record = _Record(generation_config, decision)
    stream = None if streamer is None else SpelledStream(streamer, model.config)
    if stream is not None:
        stream.prompt(texts.ids, texts.numbers)
    for inference in steps(stepper, decision, texts, processors):
        record.add(inference, stepper)
        if stream is not None:
            stream.add(inference.tokens, inference.choice)
        for criterion in stopping_criteria:
            texts.end(criterion(texts.ids, record.scores))
        if not model._has_unfinished_sequences(texts.all_ended, synced_gpus, device=input_ids.device):
            break
    if stream is not None:
        stream.end()
    if generation_config.return_dict_in_generate:
        return output(**record.fields(texts, stepper))
    numbers, config = texts.numbers, model.config
    if numbers[0] is None or config.number_spelling is None:
        return texts.ids
    padding = _pad_token(generation_config)
    return spelled(
        texts.ids,
        numbers,
        num_token_id=config.num_token_id,
        spelling=config.number_spelling,
        pad_token_id=config.number_spelling[" "] if padding is None else padding,
        start=input_ids.shape[1],
    )


def _stepper(
    model: CausalModel, engine: Engine | None, config: Any, model_kwargs: dict[str, Any]
) -> TransformersStepper | NativeStepper:
    """Who runs the forward passes.

    Raises:
        ValueError: If something is asked for that only the model itself can give.
    """
    if engine is None:
        return TransformersStepper(model, config, **model_kwargs)
    if config.output_hidden_states or config.output_attentions or "inputs_embeds" in model_kwargs:
        raise ValueError(
            "the native engine reads tokens and keeps neither hidden states nor attentions; "
            "call generate() without engine= for these"
        )
    mask = model_kwargs["attention_mask"]
    return NativeStepper(model, engine, mask, max_length=config.max_length)


def _pad_token(config: Any) -> int | None:
    """What a row gets behind its end; the first end-of-text token where nothing else is said."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    ends = config.eos_token_id
    return ends if ends is None or isinstance(ends, int) else int(ends[0])


class _Record:
    """What the generation config asks to keep of each step."""

    def __init__(self, config: Any, decision: Decision) -> None:
        keep = bool(config.return_dict_in_generate)
        self.decision = decision
        self.scores: tuple[Tensor, ...] | None = () if keep and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if keep and config.output_logits else None
        self.hidden_states: tuple[Any, ...] | None = () if keep and config.output_hidden_states else None
        self.attentions: tuple[Any, ...] | None = () if keep and config.output_attentions else None

    def add(self, inference: Inference, stepper: TransformersStepper | NativeStepper) -> None:
        choice = inference.choice
        if self.scores is not None:
            self.scores += (choice.scores,)
        if self.logits is not None:
            # Those of a decision by causes may be rounded otherwise than the model's own.
            own = choice.logits if self.decision.mode == "compatible" else None
            self.logits += (inference.readout.logits(inference.U.loc) if own is None else own,)
        if isinstance(stepper, TransformersStepper):
            if self.hidden_states is not None:
                self.hidden_states += (stepper.hidden_states,)
            if self.attentions is not None:
                self.attentions += (stepper.attentions,)

    def fields(self, texts: Texts, stepper: TransformersStepper | NativeStepper) -> dict[str, Any]:
        """Of an output; those that only transformers' forward pass has are left out where it did not run."""
        values, lower, upper = texts.numbers
        fields = {
            "sequences": texts.ids,
            "scores": self.scores,
            "logits": self.logits,
            "numeric_values": values,
            "numeric_lower": lower,
            "numeric_upper": upper,
            "numeric_extrapolates": texts.extrapolates,
            "individuals": list(self.decision.individuals) or None,
        }
        if isinstance(stepper, TransformersStepper):
            fields |= {
                "attentions": self.attentions,
                "hidden_states": self.hidden_states,
                "past_key_values": stepper.inputs.get("past_key_values"),
            }
        return fields
