"""A sentence with fields: what comes before the target, and what follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.data import Template


def texts(passages):
    return tuple(passage.text for passage in passages)


def test_templates():
    template = Template("In {year:.4} {name!r} cost {price:.1f}, {{really}} {name}.", "price")
    row = {"year": "1970-01-01", "name": "fig", "price": 2}
    assert texts(template.render(row)) == ("In 1970 'fig' cost ", "2.0, {really} fig.")
    assert texts(Template("{a} is {b}").render({"a": 1, "b": 2})) == ("", "1 is 2")
    for text, target, message in (
        ("no field", None, "needs fields"),
        ("{a} {}", None, "by name"),
        ("{a", None, "cannot be read"),
        ("{a}", "b", "no field 'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            Template(text, target)
    with pytest.raises(ValueError, match="cannot write"):
        Template("{a:.1f}").render({"a": "word"})


def test_prompts_end_before_the_target_and_do_not_need_it():
    row = {"a": 1, "bc": 2}
    assert Template("{a} {{b}} is {b:.2f}.", "b").prompt(row).text == "1 {b} is "
    assert Template("{a} {bc} {b!r} {b}", "b").prompt(row).text == "1 2 "
    assert Template("It is {b}.", "b").prompt({}).text == "It is "
    assert Template("{a} is {bc}").prompt(row).text == "1 is 2"
    with pytest.raises(ValueError, match="no field 'a'"):
        Template("{a} {b}", "b").prompt({"c": 3})


def test_a_template_that_begins_with_its_target_has_no_prompt():
    assert Template(" {b} is {a}", "b").begins_with_target
    assert not Template("{a} is {b}", "b").begins_with_target
    assert not Template("a: {b}", "b").begins_with_target
    assert not Template("{b}").begins_with_target


@given(st.lists(st.sampled_from(["{a}", "{b:.2f}", "{c!r}", "{{", "}}", " is ", "é"]), max_size=9))
def test_a_sentence_is_cut_but_not_changed(pieces):
    row = {"a": "x", "b": 2, "c": "y"}
    text = "".join([*pieces, "{c}"])
    for target in ("a", "b", "c", None):
        if target is None or f"{{{target}" in text.replace("{{", ""):
            template = Template(text.replace("{a}", "{a!s}").replace("{c}", "{c!s}"), target)
            before, after = texts(template.render(row))
            assert before + after == text.format(**row)
            assert template.prompt(row).text == (before if target else after)
