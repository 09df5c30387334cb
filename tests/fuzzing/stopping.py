"""When a text is finished: JSON by `json`, stop strings by `in`, loops by blocks, streams by decoding."""

import json
from typing import Any

from hypothesis import strategies as st

from causal_qwen.decoder.json_scanner import JsonScanner
from causal_qwen.decoder.stopping import JsonComplete, Repetition, StopString, TextStream
from fuzzing.inputs import ODD_TEXT, Drawn, Mutated
from fuzzing.target import Target

__all__ = ["TARGETS", "check_json", "check_prose", "check_repetition", "check_strings"]

JSON_FILES = [
    b' {"name": "Ann", "ages": [1, 2.5e-3, -0], "ok": true, "none": null} tail',
    b'[[], {}, "\\u00e9\\n\\"", [[1]], {"a": {"b": [false]}}]',
    b'"a \\\\ string" and more',
    b"-12.50e+7 ",
    '{"价格": 99.9, "emoji": "🙂"}'.encode(),
]
JSON_PIECES = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    '"a"',
    "\\",
    "\\u00",
    "1",
    "0",
    "-",
    ".5",
    "e+",
    "true",
    "nul",
    " ",
    "\n",
    "x",
]


def value_end(text: str) -> int | None:
    """Where the JSON value ends that the text begins with, by `json`; None if there is none."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)  # NaN and infinities are Python's own

    begin = len(text) - len(text.lstrip(" \t\n\r"))
    try:
        return json.JSONDecoder(parse_constant=refuse, parse_int=str, parse_float=str).raw_decode(
            text, begin
        )[1]
    except ValueError:
        return None


def check_json(data: bytes) -> None:
    """The scanner is complete with the character with which `json` has a value."""
    text = data.decode("utf-8", "replace")
    scanner, consumed = JsonScanner(), 0
    while consumed < len(text) and not (scanner.complete or scanner.failed):
        scanner.push(text[consumed])
        consumed += 1
    whole = JsonScanner()
    assert whole.push(text) == scanner.complete
    assert whole.failed == scanner.failed
    try:
        end = value_end(text)
    except RecursionError:
        return  # the scanner has no such limit
    first = text.lstrip(" \t\n\r")[:1]
    is_number = first == "-" or first.isdecimal()
    if is_number:
        _check_number(text, scanner, consumed)
    elif scanner.complete:
        assert end == consumed
    else:
        assert end is None
        # `json` reads on where the scanner has given up at most to complain.
        assert not scanner.failed or value_end(text) is None


def _check_number(text: str, scanner: JsonScanner, consumed: int) -> None:
    """A number is complete with the first character that cannot continue it."""
    if scanner.complete:
        assert value_end(text[: consumed - 1]) == consumed - 1
    elif not scanner.failed:  # it may go on: with a digit it is a number in any case, or already is one
        assert any(value_end(text + more) == len(text + more) for more in ("", "0", "1"))


def check_prose(data: bytes) -> None:
    """Past prose, the row ends with the first object or array that `json` reads."""
    prefix, pieces = json.loads(data)
    watcher = JsonComplete(prefix=prefix, skip_prose=True).watch()
    text = prefix
    for piece in pieces:
        text += piece
        if watcher.push(0, piece):
            ends = [
                end
                for start, char in enumerate(text)
                if char in "{[" and (end := value_end(text[start:])) is not None
            ]
            assert ends
            return
    assert JsonComplete(skip_prose=True).watch().push(0, text) is False


def check_strings(data: bytes) -> None:
    """A stop string is seen with the piece that completes it; a stream of UTF-8 gives the text."""
    stop, pieces = json.loads(data)
    watcher, text = StopString(stop).watch(), ""
    for piece in pieces:
        text += piece
        assert watcher.push(0, piece) == (stop in text)
        if stop in text:
            break
    # U+FFFD itself looks like an unfinished character, which is waited for.
    content = "".join(pieces).replace("\ufffd", "").encode("utf-8", "replace")
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", "replace"))
    assert "".join(map(stream.push, content)) == content.decode()


def check_repetition(data: bytes) -> None:
    """The watcher ends a row where the last tokens are one block again and again."""
    times, max_period, min_tokens, tokens = json.loads(data)
    watcher = Repetition(times=times, max_period=max_period, min_tokens=min_tokens).watch()
    for count, token in enumerate(tokens, start=1):
        written = tokens[:count]
        repeats = any(
            length <= count and written[-length:-period] == written[-length + period :]
            for period in range(1, max_period + 1)
            for length in (max(times * period, min_tokens),)
            if length > period
        )
        assert watcher.push(token, "") == repeats


PIECES = st.lists(st.sampled_from(JSON_PIECES) | ODD_TEXT, max_size=8)
TARGETS = (
    Target(name="json-damaged", source=Mutated(lambda: JSON_FILES), check=check_json, share=120),
    Target(
        name="json-composed",
        source=Drawn(st.lists(st.sampled_from(JSON_PIECES), max_size=12).map("".join)),
        check=lambda data: check_json(json.loads(data).encode()),
        share=60,
    ),
    Target(
        name="json-in-prose",
        source=Drawn(st.tuples(st.sampled_from(["", "", "{", "[1, ", "x", "[]"]), PIECES)),
        check=check_prose,
        share=30,
    ),
    Target(
        name="stop-strings",
        source=Drawn(st.tuples(ODD_TEXT, st.lists(ODD_TEXT, max_size=5))),
        check=check_strings,
        share=30,
    ),
    Target(
        name="repetition",
        source=Drawn(
            st.tuples(
                st.integers(0, 5),
                st.integers(0, 6),
                st.integers(0, 12),
                st.lists(st.integers(0, 2), max_size=30),
            )
        ),
        check=check_repetition,
        share=20,
    ),
)
