"""Where inputs come from: hypothesis strategies, and mutations of real files, all by a seed."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

__all__ = [
    "ODD_TEXT",
    "ODD_VALUES",
    "Drawn",
    "Mutated",
    "Source",
    "document",
    "mostly",
    "mutated_bytes",
    "mutated_json",
]

Take = Callable[[bytes], None]
Mutation = Callable[[random.Random, bytes], bytes]

DEEP = 100_000
# What readers stumble over, as bytes to put somewhere.
TOKENS = [
    b"", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\n\n", b"\t", b'"', b"'", b",", b":",
    b"{", b"}", b"[", b"]", b"{}", b"[]", b"null", b"true", b"NaN", b"Infinity", b"-Infinity", b"1e999",
    b"-0", b"+inf", b"NA", b"0.1e", b"1" * 400, b"1" * 5000, b"\\u0000", b"\\ud800", b"&a", b"*a", b"%",
    b"{0}", b"!!python/object:os.system", b"<NUM>",
    b"{x:>99999999999}", "٣".encode(), "é".encode("latin-1"), b"[" * 2000, b'{"a":' * 2000,
]  # fmt: skip
LONG_TOKENS = [b"[" * DEEP, b'{"a":' * DEEP, b"a" * 150_000]
# The same as values.
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, -(2**64), 10**400, 0.0, -0.0, 0.5, 1e-320, 1e308,
    float("nan"), float("inf"), -float("inf"), "", "0", "1e999", "nan", "a", "\ud800", "\x00", "<NUM>",
    "\ufdd0", "x" * 5000, [], {}, [0], [None], {"a": 1}, [[]], [""], {"": {}},
]  # fmt: skip


class Source(Protocol):
    """Makes inputs."""

    def feed(self, seed: int, count: int, take: Take) -> None:
        """Hand ``count`` inputs to ``take``, the same for the same seed."""
        ...


class Drawn:
    """What a hypothesis strategy draws, as JSON.

    Args:
        strategy: Of values that JSON can say (NaN, infinities and lone surrogates included).
    """

    def __init__(self, strategy: st.SearchStrategy[Any]) -> None:
        self.strategy = strategy

    def feed(self, seed: int, count: int, take: Take) -> None:
        """As hypothesis generates examples; nothing is shrunk, replayed or stored."""

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(self.strategy)
        def examples(value: Any) -> None:
            take(document(value))

        examples()


class Mutated:
    """Real files with a few things changed.

    Args:
        files: The contents, or a function that makes them when they are needed.
        mutation: Changes one thing; `mutated_bytes` by default.
        most: Changes at one time.
    """

    def __init__(
        self,
        files: Callable[[], Sequence[bytes]],
        mutation: Mutation | None = None,
        *,
        most: int = 4,
    ) -> None:
        self.files = files
        self.mutation = mutation or mutated_bytes
        self.most = most

    def feed(self, seed: int, count: int, take: Take) -> None:
        """One file at a time, chosen at random; few of them stay whole."""
        draw, files = random.Random(seed), self.files()
        for _ in range(count):
            data = draw.choice(files)
            for _ in range(min(draw.randrange(self.most + 1), draw.randrange(1, self.most + 1))):
                data = self.mutation(draw, data)
            take(data)


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Three of four are usual: where all are odd, the first one refused hides the rest."""
    return st.sampled_from((usual, usual, usual, odd)).flatmap(lambda strategy: strategy)


def document(value: Any) -> bytes:
    """A value as JSON; text that is no Unicode is escaped."""
    return json.dumps(value).encode("ascii")


def mutated_bytes(draw: random.Random, data: bytes) -> bytes:
    """One change of a file that knows nothing of its format."""
    start = draw.randrange(len(data) + 1)
    end = min(len(data), start + int(draw.expovariate(0.1)))
    match draw.randrange(8):
        case 0 if data:  # a bit
            at = draw.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:start] + draw.randbytes(end - start) + data[end:]
        case 2:
            return data[:start] + data[end:]
        case 3:
            return data[:end] + data[start:end] * draw.choice((1, 2, 30)) + data[end:]
        case 4:
            return data[:start] if draw.random() < 0.5 else data[start:]
        case 5:
            other = draw.randrange(len(data) + 1)
            return data[:start] + data[other : other + end - start] + data[end:]
        case 6:
            token = draw.choice(LONG_TOKENS if draw.random() < 0.01 else TOKENS)
            return data[:start] + token + data[draw.choice((start, end)) :]
        case _:  # a word or a number
            return _replaced_word(draw, data, start)


def mutated_json(draw: random.Random, data: bytes) -> bytes:
    """One change of a JSON file that leaves it JSON; of what is none, any change."""
    if draw.random() < 0.2:
        return mutated_bytes(draw, data)
    try:
        root = [json.loads(data)]
    except (ValueError, RecursionError):
        return mutated_bytes(draw, data)
    place: Any = root
    key: Any = 0
    while isinstance(place[key], dict | list) and place[key] and draw.random() < 0.8:
        place = place[key]
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
    match draw.randrange(5):
        case 0 if place is not root:
            del place[key]
        case 1 if isinstance(place, dict):
            place[draw.choice(("", "a", "type", key + "_", key.upper()))] = place.pop(key)
        case 2 if isinstance(place, list) and place is not root:
            place.insert(key, place[draw.randrange(len(place))])
        case 3 if isinstance(place[key], int | float) and not isinstance(place[key], bool):
            place[key] = draw.choice(
                (-place[key], place[key] + 1, place[key] * 2, place[key] // 2, str(place[key]))
            )
        case _:
            place[key] = draw.choice(VALUES)
    return document(root[0])


def _replaced_word(draw: random.Random, data: bytes, start: int) -> bytes:
    """The word at ``start`` replaced by a token or by another word of the file."""

    def word(at: int) -> tuple[int, int]:
        first = last = at
        while first > 0 and data[first - 1 : first].isalnum():
            first -= 1
        while last < len(data) and data[last : last + 1].isalnum():
            last += 1
        return first, last

    first, last = word(start)
    other = data[slice(*word(draw.randrange(len(data) + 1)))]
    return data[:first] + draw.choice([other, *TOKENS[:-2]]) + data[last:]


# Text of every kind, and of pieces that the readers of numbers, templates and chats distinguish.
PIECES = [
    *"0123456789--..,,::/@+%$ \n()eEDakg_~#{}[]|<>\\\"'", "\u2212", "\uff0d", "\uff0e", "\uff0c", "\uff15",
    "\u00bd", "\u00b2", "\u0302", "\u00e9", "\u044f", "\ud800", "\x00", "\ufdd0", "\ufffd", "\ufeff", "月",
    "元", "公里", "🙂", "1.0", "200", "000", "1e3", "1e999", "e-7", "kg", "m/s", "-year", "+inf", "NA", "nan",
    "100000000000000000", "2721.6018972544634", "<NUM>", "<|end|>", "<|start|>", "<|im_end|>", "<|im_start|>",
]  # fmt: skip
ODD_TEXT = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=40),
    st.lists(st.sampled_from(PIECES), max_size=16).map("".join),
)
ODD_VALUES = st.one_of(
    st.sampled_from(VALUES),
    ODD_TEXT,
    st.integers(),
    st.floats(),
    st.lists(st.sampled_from(VALUES), max_size=3),
    st.dictionaries(st.sampled_from(["a", "role", "content", ""]), st.sampled_from(VALUES), max_size=3),
)
