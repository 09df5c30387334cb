"""Prompts → texts, with their numbers, who spoke, and why each ended.

A `Speaker` asks generate() with either engine; batches, stop strings and streaming are its own. It knows no
files and no commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from causal_qwen.context import check_context
from causal_qwen.data import Prompt, prompt_batch, prompt_row
from causal_qwen.decoder.engine import Engine
from causal_qwen.decoder.stopping import RowMonitor, StopReason, TextStream, as_conditions
from causal_qwen.generation.decoding import GeneratedNumber
from causal_qwen.generation.protocol import Processors
from causal_qwen.generation.streaming import SpellsNumbers
from causal_qwen.individual import Individual
from causal_qwen.number_processor import NumberProcessor
from causal_qwen.prompting.pieces import StopCut, before_stop
from causal_qwen.prompting.settings import Settings

if TYPE_CHECKING:
    from causal_qwen.causal_lm import CausalLM
    from causal_qwen.native_model import NativeModel

__all__ = ["Answer", "Speaker", "before_stop"]


@dataclass(frozen=True)
class Answer:
    """What was said to a prompt.

    Args:
        text: Without the prompt, and without the stop string that ended it.
        numbers: Its numbers, with intervals.
        seed: Who spoke; None where nothing is sampled.
        finish_reason: "eos", "stop_string" or "length".
        tokens: How many were generated.
        token_ids: Which; not part of the JSON.
    """

    text: str
    numbers: tuple[GeneratedNumber, ...]
    seed: int | None
    finish_reason: str
    tokens: int
    token_ids: tuple[int, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = asdict(self) | {"numbers": [asdict(number) for number in self.numbers]}
        del fields["token_ids"]
        return fields


class Speaker:
    """A model that is asked for texts.

    Args:
        model: In evaluation mode.
        processor: The model's.
        engine: Runs the forward passes where given; the tokens are the same.
    """

    def __init__(
        self, model: CausalLM | NativeModel, processor: NumberProcessor, engine: Engine | None = None
    ) -> None:
        self.model, self.processor, self.engine = model, processor, engine or model.engine
        ends = model.generation_config.eos_token_id
        self._eos = frozenset([ends] if isinstance(ends, int) else ends or ())

    @property
    def engine_name(self) -> str:
        """Who runs the forward passes, "native" or "transformers"."""
        return "transformers" if self.engine is None else "native"

    @property
    def context(self) -> int:
        """Positions that the model has."""
        return int(self.model.config.max_position_embeddings)

    def length(self, prompt: Prompt) -> int:
        """Tokens of a prompt."""
        return len(prompt_row(self.processor, prompt))

    def check(self, prompt: Prompt, settings: Settings) -> None:
        """Refuse what cannot be answered: an empty prompt, a bad number, no room in the context, or a chat
        where the model has no template for it.

        Raises:
            ValueError: If so.
        """
        if not isinstance(prompt, str) and self.processor.chat_template is None:
            raise ValueError("the model has no chat template; give plain text, without --chat and --system")
        check_context(self.context, self.length(prompt), settings.max_new_tokens)

    def answer(
        self,
        prompts: Sequence[Prompt],
        settings: Settings,
        people: Sequence[Individual],
        *,
        tell: Callable[[str], None] | None = None,
        processors: Processors | None = None,
    ) -> list[Answer]:
        """One answer per prompt, all together; the prompts are checked first.

        Args:
            prompts: Texts and chats.
            settings: Of all of them, with a mode.
            people: Who answers each, where somebody is sampled. In "compatible" they are the seeds of torch's
                generator, and each prompt is answered alone, so that its seed repeats it.
            tell: Given the pieces of a single answer as they come.
            processors: More logits processors, behind those of the settings.
        """
        for prompt in prompts:
            self.check(prompt, settings)
        if settings.samples and not settings.draws_noise:
            answers = []
            for prompt, person in zip(prompts, people, strict=True):
                torch.manual_seed((person.seed + person.start) % 2**63)
                answers += self._answer([prompt], settings, [person], tell, processors)
            return answers
        return self._answer(prompts, settings, people, tell, processors)

    def _answer(
        self,
        prompts: Sequence[Prompt],
        settings: Settings,
        people: Sequence[Individual],
        tell: Callable[[str], None] | None,
        processors: Processors | None,
    ) -> list[Answer]:
        inputs: dict[str, Any] = prompt_batch(self.processor, prompts, self.model.device)
        _pad_with_own_tokens(inputs)
        ends = _Ends(len(prompts), self._eos, settings.stop, self._text_of)
        options = settings.options() | ({"individual": list(people)} if settings.draws_noise else {})
        if self.engine is not None:
            options["engine"] = self.engine
        outputs = self.model.generate(
            **inputs,
            **options,
            logits_processor=processors,
            stopping_criteria=[ends],
            streamer=None if tell is None else _Pieces(self.processor, settings.stop, tell),
            return_dict_in_generate=True,
        )
        said = outputs.after(inputs["input_ids"].shape[1])
        answers = []
        for row, length in enumerate(ends.lengths):
            columns = (said.numeric_values, said.numeric_lower, said.numeric_upper)
            values, lower, upper = (None if rows is None else rows[row, :length] for rows in columns)
            text = self.processor.decode(
                said.sequences[row, :length],
                values,
                numeric_lower=lower,
                numeric_upper=upper,
                skip_special_tokens=True,
            )
            cut, found = before_stop(text, settings.stop)
            numbers = said.numbers(self.processor.num_token_id, row)
            answers.append(
                Answer(
                    text=cut,
                    numbers=tuple(number for number in numbers if number.position < length),
                    seed=people[row].seed if settings.samples else None,
                    finish_reason=StopReason.STOP_STRING if found else ends.reasons[row],
                    tokens=length,
                    token_ids=tuple(said.sequences[row, :length].tolist()),
                )
            )
        return answers

    def _text_of(self, ids: list[int]) -> str:
        """With special tokens, which may be stop strings too."""
        text: str = self.processor.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def _pad_with_own_tokens(inputs: dict[str, Any]) -> None:
    """Padding takes each row's first token, so that a repetition penalty sees nothing that is not in the row;
    attention sees none of it.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    first = ids.gather(1, mask.argmax(1, keepdim=True))  # (B, 1)
    inputs["input_ids"] = torch.where(mask.bool(), ids, first)


class _Ends:
    """Where each row ends, and why.

    Args:
        rows: B.
        eos: Tokens that end a row.
        stop: Stop strings.
        decode: Ids to text.
    """

    def __init__(
        self, rows: int, eos: frozenset[int], stop: Sequence[str], decode: Callable[[list[int]], str]
    ) -> None:
        self.eos = eos
        self.monitors = [RowMonitor(as_conditions(stop), decode) for _ in range(rows)]
        self.reasons: list[StopReason] = [StopReason.LENGTH] * rows
        self.lengths = [0] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if self.reasons[row] is not StopReason.LENGTH:
                continue
            self.lengths[row] += 1
            reason = StopReason.EOS if token in self.eos else self.monitors[row].push(token)
            self.reasons[row] = reason or StopReason.LENGTH
        ended = [reason is not StopReason.LENGTH for reason in self.reasons]
        return torch.tensor(ended, device=input_ids.device)


class _Pieces(SpellsNumbers):
    """Hands on text as it comes, up to a stop string; what may become one is held back.

    Args:
        processor: Writes numbers.
        stop: Stop strings.
        tell: Takes the pieces.
    """

    def __init__(self, processor: NumberProcessor, stop: Sequence[str], tell: Callable[[str], None]) -> None:
        self.spelling = processor.spelling
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        self.stream = TextStream(lambda ids: processor.tokenizer.decode(ids, **options))
        self.cut, self.tell, self.began = StopCut(stop), tell, False

    def put(self, value: Tensor) -> None:
        """Take the prompt, which is not told, then tokens."""
        if self.began:
            for token in value.flatten().tolist():
                self._take(self.stream.push(token))
        self.began = True

    def end(self) -> None:
        """Tell what has waited."""
        self._take(self.stream.end(), last=True)

    def _take(self, text: str, *, last: bool = False) -> None:
        if piece := self.cut.add(text, final=last):
            self.tell(piece)
