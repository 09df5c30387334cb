"""When a row is finished, and why.

A condition is a value that the caller holds and may reuse; ``watch()`` starts one watcher per row, which sees
each new token and the text it adds, at a cost that does not grow with the length so far. Prompts are not
watched. This module knows neither the model nor the tokenizer: text comes from a ``decode`` function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from causal_qwen.decoder.json_scanner import JsonScanner

__all__ = [
    "JsonComplete",
    "Repetition",
    "RowMonitor",
    "Stop",
    "StopCondition",
    "StopReason",
    "StopString",
    "TextStream",
    "Watcher",
    "as_conditions",
]

Decode = Callable[[list[int]], str]


class StopReason(StrEnum):
    """Why a row ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    JSON_COMPLETE = "json_complete"
    REPETITION = "repetition"


class Watcher(Protocol):
    """The state of one condition over one row."""

    def push(self, token: int, text: str) -> bool:
        """Take the next token and the text that it completes; True when the row is finished."""
        ...


class StopCondition(Protocol):
    """Something that can finish a row."""

    @property
    def reason(self) -> StopReason:
        """What is reported."""
        ...

    @property
    def reads_text(self) -> bool:
        """Whether watchers look at the text, which then has to be decoded."""
        ...

    def watch(self) -> Watcher:
        """A watcher for a new row."""
        ...


Stop = str | StopCondition | Sequence[str | StopCondition]


def as_conditions(stop: Stop) -> list[StopCondition]:
    """The conditions in ``stop``: one or several, a plain string meaning :class:`StopString`."""
    several = [stop] if isinstance(stop, str) or not isinstance(stop, Sequence) else stop
    return [StopString(item) if isinstance(item, str) else item for item in several]


# Conditions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StopString:
    """The new text contains ``text``, also across tokens. The sequence keeps the token that completed it."""

    text: str
    reason = StopReason.STOP_STRING
    reads_text = True

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("the stop string is empty: it would stop before the first token")

    def watch(self) -> Watcher:
        """A watcher for a new row."""
        return _StopStringWatcher(self.text)


class _StopStringWatcher:
    def __init__(self, stop_string: str) -> None:
        self.stop_string = stop_string
        self.tail = ""  # the end of the text, one character too short to contain it

    def push(self, token: int, text: str) -> bool:
        window = self.tail + text
        self.tail = window[len(window) - min(len(window), len(self.stop_string) - 1) :]
        return self.stop_string in window


@dataclass(frozen=True, kw_only=True)
class JsonComplete:
    """The new text, after white space, is one complete JSON value.

    Args:
        prefix: What the prompt already wrote of the value, such as ``"{"``.
        skip_prose: Pass over any text before the first object or array, and over what looked like one but was
            not.
    """

    prefix: str = ""
    skip_prose: bool = False
    reason = StopReason.JSON_COMPLETE
    reads_text = True

    def watch(self) -> Watcher:
        """A watcher for a new row."""
        watcher = _JsonWatcher(skip_prose=self.skip_prose)
        if watcher.push(-1, self.prefix) or watcher.scanner.failed:
            raise ValueError(f"prefix is {self.prefix!r}; it must begin a JSON value and leave it open")
        return watcher


class _JsonWatcher:
    def __init__(self, *, skip_prose: bool) -> None:
        self.scanner = JsonScanner()
        self.skip_prose = skip_prose
        self.in_prose = skip_prose

    def push(self, token: int, text: str) -> bool:
        if self.skip_prose:
            return any(self.push_past_prose(char) for char in text)
        return self.scanner.push(text)

    def push_past_prose(self, char: str) -> bool:
        """Scan from the first bracket on; what turns out not to be JSON was prose."""
        if not self.in_prose:
            self.scanner.push(char)
            self.in_prose = self.scanner.failed
        if self.in_prose and char in "{[":
            self.scanner = JsonScanner()
            self.scanner.push(char)
            self.in_prose = False
        return self.scanner.complete


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """The new tokens end in one block of at most ``max_period`` tokens, ``times`` times in a row.

    For each period p the watcher counts how many tokens in a row equalled the token p places before:
    O(max_period) per token, linear in the text.

    Args:
        times: Copies of the block, at least 2.
        max_period: Longest block, in tokens.
        min_tokens: The copies together must be at least this long, so that ``1000000`` or ``-----`` is no
            loop.
    """

    times: int = 3
    max_period: int = 64
    min_tokens: int = 24
    reason = StopReason.REPETITION
    reads_text = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("times", self.times, 2),
            ("max_period", self.max_period, 1),
            ("min_tokens", self.min_tokens, 1),
        ):
            if value < least:
                raise ValueError(f"repetition {name} is {value}; it must be at least {least}")

    def watch(self) -> Watcher:
        """A watcher for a new row."""
        return _RepetitionWatcher(self)


class _RepetitionWatcher:
    def __init__(self, condition: Repetition) -> None:
        self.tokens: list[int] = []
        periods = range(condition.max_period + 1)
        self.runs = [0 for _ in periods]  # runs[p]: tokens in a row that equal the one p places before
        self.needed = [max(condition.times * p, condition.min_tokens) - p for p in periods]

    def push(self, token: int, text: str) -> bool:
        finished = False
        for period in range(1, min(len(self.tokens) + 1, len(self.runs))):
            self.runs[period] = self.runs[period] + 1 if self.tokens[-period] == token else 0
            finished = finished or self.runs[period] >= self.needed[period]
        self.tokens.append(token)
        return finished


# Text and rows ----------------------------------------------------------------------------------------------


class TextStream:
    """Text that each token adds, from a function that only decodes whole lists.

    Tokens of byte-level vocabularies may hold parts of a character, and some decoders strip a leading space.
    So the new tokens are decoded together with the last ones already written, what those gave alone is cut
    off, and while the text ends in an unfinished character it waits, for ``patience`` tokens at most. Each
    call decodes a few tokens.

    Args:
        decode: Token ids to text, such as ``tokenizer.decode``.
        patience: Tokens that one character may take; UTF-8 needs up to 4.
    """

    def __init__(self, decode: Decode, *, patience: int = 8) -> None:
        self.decode = decode
        self.patience = patience
        self.written: list[int] = []  # the last tokens whose text was returned
        self.pending: list[int] = []  # tokens after them

    def push(self, token: int) -> str:
        """The text that ``token`` completes, which may be empty."""
        self.pending.append(token)
        text = self.decode(self.written + self.pending)
        if text.endswith("\ufffd") and len(self.pending) < self.patience:
            return ""
        return self._handed_out(text)

    def end(self) -> str:
        """What has waited, complete or not."""
        return self._handed_out(self.decode(self.written + self.pending)) if self.pending else ""

    def _handed_out(self, text: str) -> str:
        known = len(self.decode(self.written)) if self.written else 0
        self.written, self.pending = self.pending, []
        return text[known:]


class RowMonitor:
    """All conditions over one row.

    Args:
        conditions: In order of precedence.
        decode: Token ids to text.

    Raises:
        ValueError: If a condition reads text and there is no ``decode``.
    """

    def __init__(self, conditions: Sequence[StopCondition], decode: Decode | None) -> None:
        self.watchers = [(condition.reason, condition.watch()) for condition in conditions]
        self.stream: TextStream | None = None
        if any(condition.reads_text for condition in conditions):
            if decode is None:
                raise ValueError("stop strings and JSON read the text: give decode=tokenizer.decode")
            self.stream = TextStream(decode)

    def push(self, token: int) -> StopReason | None:
        """Take the next token; the reason when it finishes the row."""
        text = self.stream.push(token) if self.stream is not None else ""
        verdicts = [(reason, watcher.push(token, text)) for reason, watcher in self.watchers]
        return next((reason for reason, finished in verdicts if finished), None)
