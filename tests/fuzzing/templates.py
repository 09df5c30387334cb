"""Templates: whatever a sentence and a row are, there is a text with every literal part in it, or an error."""

import json
import math
import string

from hypothesis import strategies as st

from causal_qwen.data.templates import Template
from fuzzing.inputs import ODD_TEXT, ODD_VALUES, Drawn
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
SPECS = ["", "", "", ":.2f", ":>8", ":.4", ":d", ":,", ":%Y", ":{price}", "!r", "!s", "!x", ":>99999999", ":e"]
PIECES = st.one_of(
    st.builds("{{{}{}}}".format, st.sampled_from([*NAMES, *NAMES, "a.b", "a[0]", "x"]), st.sampled_from(SPECS)),
    ODD_TEXT.map(lambda text: text.replace("{", "{{").replace("}", "}}")),
    st.sampled_from(["{", "}", "{}", "{{", "{price", " "]),
)
TEXTS = st.lists(PIECES, min_size=1, max_size=4).map("".join)
USUAL = st.floats(-1e9, 1e9) | st.integers() | st.text(min_size=1, max_size=9)
FIELDS = USUAL | USUAL | ODD_TEXT | st.floats() | ODD_VALUES
ROWS = st.fixed_dictionaries(dict.fromkeys(NAMES, FIELDS))
TARGETS = (
    Target(
        name="templates",
        source=Drawn(st.tuples(TEXTS, st.none() | st.none() | st.sampled_from(NAMES), ROWS)),
        check=check,
        share=60,
    ),
)
