"""One text that somebody waits for: what each token adds to it, and when it ends.

A job is fed by the scheduler's thread and tells its client through ``deliver``. It knows neither HTTP nor the
batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from causal_qwen.decoder.stopping import RowMonitor, StopCondition
from causal_qwen.generation import Inference
from causal_qwen.generation.batching import Text
from causal_qwen.generation.decoding import GeneratedNumber
from causal_qwen.number_processor import NumberProcessor
from causal_qwen.numbers import format_number, spread_of
from causal_qwen.prompting.pieces import StopCut, TextPieces

__all__ = ["Job", "Piece", "Token", "finite", "number_body"]


@dataclass(frozen=True)
class Token:
    """A generated token.

    Args:
        id: Its id.
        text: What it adds to the text.
        offset: Where in the text that begins.
        logprob: Its log-probability under softmax(logits), where asked for.
        top: The likeliest tokens, with theirs.
    """

    id: int
    text: str
    offset: int
    logprob: float = math.nan
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What has been decided of a text since the last one.

    Args:
        text: What can be shown.
        tokens: Whose text it is.
        numbers: Those among them.
        finish: Why the text ends, if it does: "stop", "length" or "timeout".
        error: What went wrong, if something did; nothing follows.
    """

    text: str = ""
    tokens: tuple[Token, ...] = ()
    numbers: tuple[GeneratedNumber, ...] = ()
    finish: str | None = None
    error: Exception | None = None

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.error is not None


@dataclass(eq=False)
class Job:
    """A text, and who waits for it.

    Args:
        text: As generate() has prepared it.
        processor: Writes it.
        eos: Tokens that end it.
        stop: It ends before the first of these.
        conditions: More that end it.
        top: How many of the likeliest tokens to tell beside each; None where no log-probabilities are wanted.
        deadline: When patience ends, by time.monotonic.
        deliver: Told every piece, in the scheduler's thread.
    """

    text: Text
    processor: NumberProcessor
    eos: frozenset[int]
    stop: Sequence[str] = ()
    conditions: Sequence[StopCondition] = ()
    top: int | None = None
    deadline: float = math.inf
    deliver: Callable[[Piece], None] = lambda piece: None
    prompt_tokens: int = field(init=False)
    reused: int = field(default=0, init=False)
    started: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = self.text.texts.ids.shape[1]
        self.text.keeps_logits = self.top is not None
        self._pieces, self._cut = TextPieces(self.processor), StopCut(self.stop)
        self._monitor = RowMonitor([*self.conditions], self._decode)
        self._length = self._shown = 0
        self._tokens: list[Token] = []
        self._numbers: list[GeneratedNumber] = []

    @property
    def count(self) -> int:
        """Tokens that have been generated."""
        return self.text.position

    def take(self, inference: Inference) -> Piece | None:
        """The next token; what can be shown, if anything."""
        token, position = int(inference.tokens.item()), self.count - 1
        if token == self.processor.num_token_id:
            number = _number(inference, position)
            written = self._pieces.add_number(number.value, number.lower, number.upper)
            self._numbers.append(number)
        else:
            written = self._pieces.add(token)
        finish = None
        if token in self.eos or self._monitor.push(token) is not None:
            finish = "stop"
        elif self.count >= self.text.max_new_tokens:
            finish = "length"
        if finish is not None:
            written += self._pieces.end()
        self._tokens.append(self._token(token, written, inference))
        self._length += len(written)
        shown = self._cut.add(written, final=finish is not None)
        if self._cut.stopped:
            finish = "stop"
        return self._piece(shown, finish) if shown or finish is not None else None

    def end(self, finish: str) -> Piece:
        """End it now, with what has waited."""
        return self._piece(self._cut.add(self._pieces.end(), final=True), finish)

    def _piece(self, shown: str, finish: str | None) -> Piece:
        self._shown += len(shown)
        tokens, numbers = tuple(self._tokens), tuple(self._numbers)
        if finish is not None and self._cut.stopped:  # what a stop string has cut off was never said
            tokens = tuple(one for one in tokens if one.offset < self._shown)
            last = self.count if not self._tokens else self.count - len(self._tokens) + len(tokens)
            numbers = tuple(one for one in numbers if one.position < last)
        self._tokens, self._numbers = [], []
        return Piece(shown, tokens, numbers, finish)

    def _token(self, token: int, written: str, inference: Inference) -> Token:
        if self.top is None:
            return Token(token, written, self._length)
        assert inference.choice.logits is not None
        logprobs = inference.choice.logits[0].float().log_softmax(-1)  # (V,)
        likeliest = torch.topk(logprobs, self.top) if self.top else None
        top = (
            ()
            if likeliest is None
            else zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        )
        return Token(
            token,
            written,
            self._length,
            float(logprobs[token]),
            tuple((self._decode([one]), max(value, -9999.0)) for one, value in top),
        )

    def _decode(self, ids: list[int]) -> str:
        text: str = self.processor.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def _number(inference: Inference, position: int) -> GeneratedNumber:
    numbers = inference.choice.numbers
    value, lower, upper = (float(part.item()) for part in numbers[:3])
    known = None if numbers.extrapolates is None else bool(numbers.extrapolates.item())
    return GeneratedNumber(position, value, lower, upper, known)


def number_body(number: GeneratedNumber) -> dict[str, Any]:
    """For JSON, with what stands in the text; ends that are not finite are null."""
    return {
        "position": number.position,
        "value": finite(number.value),
        "lower": finite(number.lower),
        "upper": finite(number.upper),
        "extrapolates": number.extrapolates,
        "text": format_number(number.value, spread_of(number.lower, number.upper)),
    }


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None
