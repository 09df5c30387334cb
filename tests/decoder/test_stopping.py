"""Stop conditions against slow oracles: json.loads, ``in``, and a search for every period."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from causal_qwen.decoder import JsonComplete, Repetition, StopReason, StopString
from causal_qwen.decoder.json_scanner import JsonScanner
from causal_qwen.decoder.stopping import RowMonitor, TextStream, as_conditions

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
json_like = st.lists(
    st.sampled_from(
        [*'{}[]",:0123456789.eE+-\\ \n', "true", "null", '"a"', '"k":', "\\u00e9", "12", '""', "\t"]
    ),
    max_size=14,
).map("".join)


def parses(text):
    def refuse(constant):
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def end_of_value(text):
    """How many characters the scanner reads until a value is complete; None if it never is."""
    scanner = JsonScanner()
    for index, char in enumerate(text, start=1):
        if scanner.push(char):
            return index
    return None


def is_number(text):
    return text.strip()[:1] in tuple("-0123456789")


# JSON -------------------------------------------------------------------------------------------------------


@given(json_values, st.sampled_from([None, 0, 2]), st.booleans(), st.sampled_from(["", " ", "\n\t "]))
@settings(max_examples=100, deadline=None)
def test_a_json_value_ends_with_its_last_character(value, indent, ascii_only, lead):
    text = lead + json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    if is_number(text):
        assert end_of_value(text) is None, "another digit may follow"
        assert end_of_value(text + "\n") == len(text) + 1
    else:
        assert end_of_value(text + " and more") == len(text)


@given(json_like)
@example('{"a":1,}')
@example("[1,]")
@example('{"a" 1}')
@example("[1 2]")
@example("-")
@example("1.e5 ")
@example('"\\u12G4"')
@example('"\\u123"')
@example("[01]")
@example('"a\nb"')
@settings(max_examples=500, deadline=None)
def test_the_scanner_accepts_what_json_loads_accepts(text):
    prefixes = [text[:length] for length in range(1, len(text) + 1)]
    whole = next((prefix for prefix in prefixes if parses(prefix) and not is_number(prefix)), None)
    end = end_of_value(text)
    if is_number(text):
        if end is not None:
            assert parses(text[: end - 1])
        if parses(text):
            assert end_of_value(text + " ") is not None
    else:
        assert end == (None if whole is None else len(whole))


@given(json_values, st.data())
@settings(max_examples=100, deadline=None)
def test_the_scanner_does_not_see_how_text_is_cut(value, data):
    text = json.dumps(value) + " "
    cut = data.draw(st.integers(0, len(text)))
    scanner = JsonScanner()
    scanner.push(text[:cut])
    assert scanner.push(text[cut:])


def test_the_scanner_is_linear():
    # 200,000 characters of nesting and strings; quadratic work would take minutes.
    text = "[" * 50_000 + '"' + "\\n" * 50_000 + '"' + "]" * 50_000
    scanner = JsonScanner()
    start = time.perf_counter()
    assert scanner.push(text)
    assert time.perf_counter() - start < 2.0


def test_json_may_begin_in_the_prompt_and_after_prose():
    watcher = JsonComplete(prefix='{"a": ').watch()
    assert not watcher.push(0, "[1, 2")
    assert watcher.push(1, "]} trailing")
    prose = JsonComplete(skip_prose=True).watch()
    assert not prose.push(0, 'Here [as promised] "is" {it}: ```json\n{"a": [')
    assert not prose.push(0, "1]")
    assert prose.push(0, "}\n```")
    nested = JsonComplete(skip_prose=True).watch()
    assert nested.push(0, "[x [{[]"), "what breaks one value may begin the next"
    assert not JsonComplete().watch().push(0, 'Sure: {"a": 1}'), "without skip_prose the value comes first"
    for prefix in ("{}", "}", "[1,,"):
        with pytest.raises(ValueError, match="must begin a JSON value and leave it open"):
            JsonComplete(prefix=prefix).watch()


# Stop strings -----------------------------------------------------------------------------------------------


@given(st.text("ab", min_size=1, max_size=4), st.lists(st.text("ab", max_size=3), max_size=12))
@settings(max_examples=200, deadline=None)
def test_stop_strings_are_found_across_pieces(stop_string, pieces):
    watcher = StopString(stop_string).watch()
    text = ""
    for piece in pieces:
        text += piece
        finished = watcher.push(0, piece)
        assert finished == (stop_string in text)
        if finished:
            break


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="the stop string is empty"):
        as_conditions("")


def test_stop_takes_strings_and_conditions():
    assert as_conditions("x") == [StopString("x")]
    assert as_conditions(["x", JsonComplete()]) == [StopString("x"), JsonComplete()]
    assert as_conditions(Repetition()) == [Repetition()]
    assert as_conditions(()) == []


# Repetition -------------------------------------------------------------------------------------------------


def repeats(tokens, condition):
    """The definition: the tail has some period p ≤ max_period over max(times · p, min_tokens) tokens."""
    for period in range(1, condition.max_period + 1):
        length = max(condition.times * period, condition.min_tokens)
        tail = tokens[-length:]
        if len(tail) == length and all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.builds(
        Repetition, times=st.integers(2, 4), max_period=st.integers(1, 6), min_tokens=st.integers(1, 10)
    ),
)
@example([0, 1, 2] * 3, Repetition(times=3, max_period=3, min_tokens=1))
@settings(max_examples=300, deadline=None)
def test_loops_are_found_when_their_last_token_comes(tokens, condition):
    watcher = condition.watch()
    for count, token in enumerate(tokens, start=1):
        assert watcher.push(token, "") == repeats(tokens[:count], condition)


def test_loops_are_found_and_near_loops_are_not():
    condition = Repetition(times=3, max_period=8, min_tokens=6)
    loop = condition.watch()
    verdicts = [loop.push(token, "") for token in [9, 8, *[1, 2, 3, 4] * 3]]
    assert verdicts.index(True) == 2 + 12 - 1
    near = condition.watch()
    assert not any(near.push(token, "") for token in [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 5])
    zeros = Repetition().watch()
    assert not any(zeros.push(token, "") for token in [1, *[0] * 12]), "1000000000000 is a number, not a loop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": 1}, "times is 1"),
        ({"max_period": 0}, "max_period is 0"),
        ({"min_tokens": 0}, "min_tokens is 0"),
    ],
)
def test_repetition_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Repetition(**options)


# Text -------------------------------------------------------------------------------------------------------


def decode_bytes(tokens):
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=200, deadline=None)
def test_text_of_byte_tokens_comes_whole_and_at_once(text):
    stream = TextStream(decode_bytes)
    written = ""
    for count, byte in enumerate(text.encode(), start=1):
        piece = stream.push(byte)
        written += piece
        assert "\ufffd" not in piece
        whole = text.encode()[:count].decode(errors="ignore")
        assert written == whole, "a character is given out with its last byte"


def test_broken_bytes_are_held_back_for_a_few_tokens_only():
    stream = TextStream(decode_bytes, patience=4)
    assert [stream.push(0xFF) for _ in range(5)] == ["", "", "", "\ufffd" * 4, ""]
    longest = 0

    def decode(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode_bytes(tokens)

    stream = TextStream(decode)
    for _ in range(500):
        stream.push(0xFF)
    assert longest <= 16, "the cost of a token does not grow with the text"


def test_decoders_that_strip_the_leading_space_keep_it_in_the_stream():
    words = [" one", " two", " three"]
    stream = TextStream(lambda tokens: "".join(words[token] for token in tokens).lstrip())
    assert [stream.push(token) for token in (0, 1, 2)] == ["one", " two", " three"]


def test_the_first_condition_wins_and_text_needs_a_decoder():
    def decode(tokens):
        return "".join("ab"[token] for token in tokens)

    loop = Repetition(times=2, max_period=1, min_tokens=1)
    for conditions, reason in (
        ([StopString("bb"), loop], "stop_string"),
        ([loop, StopString("bb")], "repetition"),
    ):
        monitor = RowMonitor(conditions, decode)
        assert [monitor.push(token) for token in (0, 1, 1)] == [None, None, StopReason(reason)]
    assert RowMonitor([loop], None).push(0) is None
    with pytest.raises(ValueError, match=r"decode=tokenizer\.decode"):
        RowMonitor([JsonComplete()], None)
