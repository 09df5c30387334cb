"""A text as it grows: what each token adds to it, with its numbers, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from causal_qwen.decoder.stopping import TextStream
from causal_qwen.number_processor import NumberProcessor
from causal_qwen.numbers import spread_of
from causal_qwen.writing import Writer

__all__ = ["StopCut", "TextPieces", "before_stop"]


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string in it, and whether there is one."""
    starts = [start for one in stop if (start := text.find(one)) >= 0]
    return (text[: min(starts)], True) if starts else (text, False)


class StopCut:
    """Hands on text as it comes, up to a stop string; what may become one is held back.

    Args:
        stop: Stop strings.

    Attributes:
        stopped: Whether one has come.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop, self.stopped, self._held = stop, False, ""

    def add(self, text: str, *, final: bool = False) -> str:
        """Take a piece, the last one if ``final``; what can be handed on."""
        if self.stopped:
            return ""
        cut, self.stopped = before_stop(self._held + text, self.stop)
        keep = len(cut)
        if not (self.stopped or final):
            keep = min(
                (start for one in self.stop for start in range(len(cut)) if one.startswith(cut[start:])),
                default=len(cut),
            )
        self._held = cut[keep:]
        return cut[:keep]


class TextPieces:
    """What each token adds to a text; all pieces together are what `NumberProcessor.decode` writes.

    Args:
        processor: Knows the tokens.
    """

    def __init__(self, processor: NumberProcessor) -> None:
        self._tokenizer, self._writer = processor.tokenizer, Writer()
        self._words = TextStream(self._decode)

    def add(self, token: int) -> str:
        """Take a token that is no number."""
        return self._writer.add(self._words.push(token))

    def add_number(self, value: float, lower: float, upper: float) -> str:
        """Take a number, rounded to what its interval supports."""
        words = self._writer.add(self._words.end())
        self._words = TextStream(self._decode)
        return words + self._writer.add_number(value, spread_of(lower, upper))

    def end(self) -> str:
        """What has waited: nothing follows."""
        return self._writer.add(self._words.end()) + self._writer.end()

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
