"""The requests of vLLM's batch, row by row, and the step at which their tokens are decided.

vLLM tells its logits processors which request is in which row; ours remembers what each asked for, and where
logits become a token it leaves one token possible. Whatever vLLM does after that (penalties, temperature,
top-k, drawing) can only choose it. This module does not know how a token is decided: `decide` does.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from causal_qwen.generation.decisions import Decision
from causal_qwen.generation.decoding import GeneratedNumber
from causal_qwen.individual import Individual
from causal_qwen.serving.vllm.processors import Processing
from causal_qwen.serving.vllm.settings import RequestSettings, Sampling

__all__ = ["CausalRequests", "Row", "Rows"]

logger = logging.getLogger(__name__)

# Requests that leave the batch may come back (preemption, uneven schedules); this many times those that run.
PARKED = 8
MOST_RECORDS = 1 << 14  # names that nobody asks for are forgotten, the oldest first


@dataclass(eq=False)
class Row:
    """A request in the batch.

    Args:
        settings: What it asked for.
        decision: How its tokens are decided, but for who is sampled.
        individual: Who is sampled, or draws tokens; None where nobody is.
        processing: What narrows its choice.
        prompt: Ids of its prompt.
        output: Ids that were generated so far: vLLM's own list, which grows.
        values: Value at each position that holds a <NUM>.
        next_number: Value, interval and extrapolation of the number, should the next token be one.
        numbers: Those that were generated.
        prediction: Of the number after the prompt, where it is asked for: median, ends of the interval,
            P_<NUM> and whether it extrapolates.
    """

    settings: RequestSettings
    decision: Decision
    individual: Individual | None
    processing: Processing
    prompt: Sequence[int]
    output: list[int]
    values: dict[int, float] = field(default_factory=dict)
    next_number: tuple[float, float, float, float] | None = None
    numbers: list[GeneratedNumber] = field(default_factory=list)
    prediction: tuple[float, ...] = ()

    @property
    def left_to_sampler(self) -> bool:
        """Whether vLLM's own sampler chooses the tokens."""
        return self.decision.mode == "compatible" and self.settings.gumbel is None

    def take_number(self) -> float:
        """The value of the <NUM> that was generated last, which is then written down."""
        if self.next_number is None:  # nobody could have chosen it; the engine serves others too
            return 0.0
        value, lower, upper, flag = self.next_number
        known = None if flag != flag else bool(flag)
        self.numbers.append(GeneratedNumber(len(self.output) - 1, value, lower, upper, known))
        return value

    def end(self, num_token_id: int | None) -> None:
        """Write down a number that ended the text, and was never fed back."""
        last = len(self.output) - 1
        fed = len(self.prompt) + last in self.values
        if self.output and self.output[-1] == num_token_id and not fed:
            self.values[len(self.prompt) + last] = self.take_number()


@dataclass
class Rows:
    """The requests of the batch.

    Args:
        by_index: Each in its row.
        num_token_id: <NUM>; None for a model without numbers.
        writes_numbers: Whether the model may choose it.
        decide_alone: Whether no row needs logits.
        adjusted: Whether vLLM changes some before we see them.
    """

    HEADS: ClassVar[str] = "causal_qwen.heads"

    by_index: dict[int, Row] = field(default_factory=dict)
    num_token_id: int | None = None
    writes_numbers: bool = False
    decide_alone: bool = False
    adjusted: bool = False

    @property
    def has_numbers(self) -> bool:
        """Whether a value may have to be read."""
        return self.writes_numbers or any(row.values for row in self.by_index.values())

    def values(self, input_ids: Tensor, positions: Tensor, bounds: list[int]) -> Tensor:
        """Value of each token that is fed, (T,) float64, 0 where it is no number.

        Args:
            input_ids: (T,) tokens of all rows, one row after another.
            positions: (T,) their positions in their texts.
            bounds: Where each row begins, and where the last one ends.
        """
        values = torch.zeros(len(input_ids), dtype=torch.float64)
        ids, firsts = input_ids.tolist(), positions.tolist()
        for index, row in self.by_index.items():
            start, end = bounds[index], bounds[index + 1]
            if end == start:
                continue
            offset = firsts[start]
            for place in range(start, end):
                if ids[place] != self.num_token_id:
                    continue
                position = offset + place - start
                if position not in row.values and position >= len(row.prompt):
                    row.values[position] = row.take_number()
                values[place] = row.values.get(position, 0.0)
        return values.to(input_ids.device)


class CausalRequests(LogitsProcessor):
    """vLLM's logits processor for our models; `CausalEngineConfig` asks for it.

    Args:
        vllm_config: vLLM's.
        device: Where logits are.
        is_pin_memory: Not used.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.config = vllm_config.model_config.hf_config
        self.context = vllm_config.compilation_config.static_forward_context
        self.has_others = len(vllm_config.model_config.logits_processors) > 1
        self.parked: OrderedDict[int, Row] = OrderedDict()
        self.most_parked = PARKED * vllm_config.scheduler_config.max_num_seqs
        self.records: OrderedDict[str, Row] = OrderedDict()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse settings that are wrong, where the request arrives.

        Raises:
            ValueError: If one is.
        """
        settings = RequestSettings.of(sampling_params)
        if settings.numeric_values:  # blocks of the prefix cache are known by ids, not by values
            sampling_params.skip_reading_prefix_cache = True

    def is_argmax_invariant(self) -> bool:
        """No: it decides."""
        return False

    @property
    def heads(self) -> Any:
        """The model, which is made after us."""
        return self.context[Rows.HEADS]

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """As vLLM's: before each forward pass."""
        rows = self.heads.rows
        if process_dict_updates(rows.by_index, batch_update, self._row):
            rows.num_token_id = self.config.num_token_id
            rows.writes_numbers = self.heads.writes_numbers
            asked = [row.processing for row in rows.by_index.values()]
            rows.decide_alone = not any(processing.needs_logits for processing in asked)
            rows.adjusted = any(processing.adjusts for processing in asked)

    def _row(self, params: Sampling, prompt: Sequence[int] | None, output: list[int]) -> Row:
        """The row of a request, new or back again."""
        row = self.parked.pop(id(output), None)
        if row is None:
            row = self._new_row(params, prompt or (), output)
        self.parked[id(output)] = row  # holds the list, so that its id stays its own
        while len(self.parked) > self.most_parked:
            self.parked.popitem(last=False)
        return row

    def _new_row(self, params: Sampling, prompt: Sequence[int], output: list[int]) -> Row:
        settings = RequestSettings.of(params)
        decision = settings.decision(self.config, params)
        draws = decision.draws_noise or settings.gumbel is not None
        hidden = self.heads.writes_numbers and settings.numbers == "hidden"
        row = Row(
            settings,
            decision,
            self._person(settings, params) if draws else None,
            Processing.of(
                params,
                decision.mode,
                self.config.num_token_id if hidden else None,
                drawn=settings.gumbel is not None,
                others=self.has_others,
            ),
            prompt,
            output,
        )
        places = [place for place, token in enumerate(prompt) if token == self.config.num_token_id]
        if len(places) != len(settings.numeric_values):
            logger.warning(
                "the prompt has %d <NUM> and numeric_values has %d; a <NUM> without a value is read as 0",
                len(places),
                len(settings.numeric_values),
            )
        row.values.update(zip(places, settings.numeric_values, strict=False))
        if settings.record is not None:
            self.records[settings.record] = row
            if len(self.records) > MOST_RECORDS:
                self.records.popitem(last=False)
        return row

    def _person(self, settings: RequestSettings, params: Sampling) -> Individual:
        """Who is sampled. A request cannot be refused here any more: a path of another size is left out."""
        person = settings.person(params)
        if person.path is None or person.path.shape[1] == self.config.causal_size + 1:
            return person
        size = person.path.shape[1] - 1
        logger.warning("individual %d was abducted for causes of size %d; its seed speaks", person.seed, size)
        return replace(person, path=None)

    def take_records(self, names: Sequence[str]) -> dict[str, Row]:
        """Requests that have ended, by the name that they asked for; then forgotten."""
        rows = {name: self.records.pop(name) for name in names if name in self.records}
        for row in rows.values():
            row.end(self.config.num_token_id)
        return rows

    def apply(self, logits: Tensor) -> Tensor:
        """Decide: of each row that is ours, all logits but one token's become −inf."""
        from causal_qwen.serving.vllm.decide import decide

        decide(self.heads, logits)
        return logits
