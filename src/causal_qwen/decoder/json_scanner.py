"""Where a JSON value ends, found while the text is still being written.

A pushdown automaton of RFC 8259: one transition per character, whatever the length so far. No value is built.
"""

from __future__ import annotations

import copy

__all__ = ["JsonScanner"]

_WHITESPACE = " \t\n\r"
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSING = {"{": "}", "[": "]"}

# -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)? as states: state → kind of character → next state.
_NUMBER_KIND = {**dict.fromkeys("123456789", "1"), **{char: char for char in "0.e+-"}, "E": "e"}
_NUMBER_NEXT = {
    "start": {"-": "minus", "0": "zero", "1": "integer"},
    "minus": {"0": "zero", "1": "integer"},
    "zero": {".": "point", "e": "exponent"},
    "integer": {"0": "integer", "1": "integer", ".": "point", "e": "exponent"},
    "point": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "exponent"},
    "exponent": {"0": "power", "1": "power", "+": "sign", "-": "sign"},
    "sign": {"0": "power", "1": "power"},
    "power": {"0": "power", "1": "power"},
}
_NUMBER_MAY_END = ("zero", "integer", "fraction", "power")


class JsonScanner:
    """Reads text piece by piece until one JSON value is complete.

    Objects, arrays, strings and literals are complete with their last character. A number at the top level is
    complete with the first character that cannot continue it: after ``12`` there may come a ``3``.

    Attributes:
        complete: A whole value has been read.
        failed: The text cannot become a JSON value any more.
    """

    __slots__ = ("_expected", "_is_key", "_lexeme", "_stack", "_state", "complete", "failed")

    def __init__(self) -> None:
        self.complete = False
        self.failed = False
        self._stack: list[str] = []  # the open brackets
        self._state = "value"
        self._is_key = False  # whether the string being read is a key
        self._lexeme = ""  # state of the number being read
        self._expected = ""  # rest of the literal, or hex digits still due

    def copy(self) -> JsonScanner:
        """Another that has read the same."""
        other = copy.copy(self)
        other._stack = [*self._stack]
        return other

    def push(self, text: str) -> bool:
        """Read ``text``, stopping where the value ends; returns ``complete``."""
        for char in text:
            if self.complete or self.failed:
                break
            self._step(char)
        return self.complete

    def _step(self, char: str) -> None:
        match self._state:
            case "string":
                self._in_string(char)
            case "escape":
                self._in_escape(char)
            case "hex" | "literal":
                self._in_expected(char)
            case "number":
                self._in_number(char)
            case _ if char in _WHITESPACE:
                pass
            case "value":
                self._begin_value(char)
            case "first item":
                self._close(char) if char == "]" else self._begin_value(char)
            case "first key":
                self._close(char) if char == "}" else self._begin_key(char)
            case "key":
                self._begin_key(char)
            case "colon":
                self._go("value", when=char == ":")
            case "comma or close":
                self._next_item(char)

    def _go(self, state: str, *, when: bool = True) -> None:
        """Enter ``state``, or fail."""
        if when:
            self._state = state
        else:
            self.failed = True

    def _begin_value(self, char: str) -> None:
        if char in _CLOSING:
            self._stack.append(char)
            self._go("first key" if char == "{" else "first item")
        elif char == '"':
            self._is_key = False
            self._go("string")
        elif char in _LITERALS:
            self._expected = _LITERALS[char][1:]
            self._go("literal")
        else:
            self._lexeme = "start"
            self._go("number")
            self._in_number(char)

    def _begin_key(self, char: str) -> None:
        self._is_key = True
        self._go("string", when=char == '"')

    def _in_string(self, char: str) -> None:
        if char == "\\":
            self._go("escape")
        elif char == '"':
            if self._is_key:
                self._go("colon")
            else:
                self._end_value()
        else:
            self._go("string", when=char >= " ")  # a raw control character is not JSON

    def _in_escape(self, char: str) -> None:
        if char == "u":
            self._expected = "hhhh"
            self._go("hex")
        else:
            self._go("string", when=char in _ESCAPES)

    def _in_expected(self, char: str) -> None:
        is_hex = self._state == "hex"
        if not (char in _HEX if is_hex else char == self._expected[0]):
            self.failed = True
            return
        self._expected = self._expected[1:]
        if not self._expected:
            if is_hex:
                self._go("string")
            else:
                self._end_value()

    def _in_number(self, char: str) -> None:
        following = _NUMBER_NEXT[self._lexeme].get(_NUMBER_KIND.get(char, ""))
        if following is not None:
            self._lexeme = following
        elif self._lexeme in _NUMBER_MAY_END:
            self._end_value()
            if not self.complete:
                self._step(char)
        else:
            self.failed = True

    def _next_item(self, char: str) -> None:
        if char == ",":
            self._go("key" if self._stack[-1] == "{" else "value")
        else:
            self._close(char)

    def _close(self, char: str) -> None:
        if char == _CLOSING[self._stack[-1]]:
            self._stack.pop()
            self._end_value()
        else:
            self.failed = True

    def _end_value(self) -> None:
        self.complete = not self._stack
        self._go("comma or close")
