"""Words and numbers as one text that is shown while it grows; the rules are those of `numbers.write`."""

from __future__ import annotations

from collections import deque

from causal_qwen.numbers import SEPARATOR, begins_thousands, ends_in_digit, format_number

__all__ = ["Writer"]


class Writer:
    """`write`, piece by piece, for a text that is shown as it grows.

    Whatever is decided is handed out at once, and all that is handed out is what `write` makes of the whole
    text. A comma and the digits behind a short number wait until it is clear whether they are its thousands.
    """

    def __init__(self) -> None:
        self._text = ""  # what waits, behind a few characters that have been handed out
        self._written = 0  # how many these are
        self._numbers: deque[tuple[int, int]] = deque()  # where numbers stand whose ".0" is open

    def add(self, text: str) -> str:
        """Write words; returns what can be handed out."""
        self._text += text
        return self._decided(final=False)

    def add_number(self, value: float, spread: float | None = None) -> str:
        """Write a number as `format_number` spells it; returns what can be handed out."""
        spelled = format_number(value, spread)
        if ends_in_digit(self._text):
            self._text += SEPARATOR
        start = len(self._text) + spelled.startswith("-")
        self._text += spelled
        self._numbers.append((start, len(self._text)))
        return self._decided(final=False)

    def end(self) -> str:
        """What has waited: nothing follows."""
        return self._decided(final=True)

    def _decided(self, *, final: bool) -> str:
        text, written, parts = self._text, self._written, []
        while self._numbers:
            start, end = self._numbers[0]
            if written < end:
                parts.append(text[written:end])
                written = end
            thousands = begins_thousands(text, start, end, ended=final)
            if thousands is None:
                break
            if thousands:
                parts.append(".0")
            self._numbers.popleft()
        else:
            parts.append(text[written:])
            written = len(text)
        # Patterns look back over two characters.
        cut = max((self._numbers[0][0] if self._numbers else written) - 2, 0)
        self._text, self._written = text[cut:], written - cut
        self._numbers = deque((start - cut, end - cut) for start, end in self._numbers)
        return "".join(parts)
