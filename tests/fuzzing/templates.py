"""Templates: of any sentence and row there is a text with every literal part in it, or an error."""

import json
import math
import string

from hypothesis import strategies as st

from causal_qwen.data.templates import Template
from fuzzing.inputs import ODD_TEXT, ODD_VALUES, Drawn, mostly
from fuzzing.target import Target

__all__ = ["TARGETS", "check"]


def check(data: bytes) -> None:
    """The literal parts stand in the text, in order; numbers stand where they are said to."""
    text, target, row = json.loads(data)
    template = Template(text, target)
    passages = template.render(row)
    if target is not None:
        assert template.prompt(row) == passages[0]
    for passage in passages:
        for number in passage.numbers:
            assert passage.text[number.start : number.end] == number.text
            assert math.isfinite(number.value)
    whole, place = "".join(passage.text for passage in passages), 0
    for literal, *_ in string.Formatter().parse(text):
        place = whole.index(literal, place) + len(literal)


NAMES = ["price", "carat", "a b", "0", "é"]
SPECS = ["", "", "!s", "!r", ":>8", ":.2f", ":.4", ":d", ":,", ":%Y", ":{price}", "!x", ":>99999999", ":e"]
FIELD = st.builds("{{{}{}}}".format, st.sampled_from(NAMES), st.sampled_from(SPECS[:5]))
LITERAL = ODD_TEXT.map(lambda text: text.replace("{", "{{").replace("}", "}}"))
ODD_PIECES = st.one_of(
    st.builds("{{{}{}}}".format, st.sampled_from([*NAMES, "a.b", "a[0]", "x"]), st.sampled_from(SPECS)),
    st.sampled_from(["{", "}", "{}", "{{", "{price", " "]),
)
TEXTS = st.lists(mostly(FIELD | LITERAL, ODD_PIECES), min_size=1, max_size=4).map("".join)
USUAL = st.floats(-1e9, 1e9) | st.integers() | st.text(min_size=1, max_size=9)
FIELDS = mostly(USUAL, ODD_TEXT | st.floats() | ODD_VALUES)
ROWS = st.fixed_dictionaries(dict.fromkeys(NAMES, FIELDS))
TARGETS = (
    Target(
        name="templates",
        source=Drawn(st.tuples(TEXTS, st.none() | st.none() | st.sampled_from(NAMES), ROWS)),
        check=check,
        share=60,
    ),
)
