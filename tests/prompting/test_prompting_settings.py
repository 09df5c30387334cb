"""Settings say what is out of range and what does nothing."""

import math

import pytest

from causal_qwen.prompting import Settings


@pytest.mark.parametrize(
    ("name", "value", "law"),
    [
        ("top_p", 2.0, "above 0 and up to 1"),
        ("top_p", 0.0, "above 0 and up to 1"),
        ("temperature", -1.0, "finite number ≥ 0"),
        ("temperature", math.nan, "finite number ≥ 0"),
        ("temperature", math.inf, "finite number ≥ 0"),
        ("temperature", True, "finite number ≥ 0"),
        ("top_k", -1, "integer ≥ 0"),
        ("top_k", 1.5, "integer ≥ 0"),
        ("seed", -1, "from 0 to 2"),
        ("seed", 2**64, "from 0 to 2"),
        ("seed", "7", "from 0 to 2"),
        ("max_new_tokens", 0, "integer ≥ 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("persistence", 1.5, "from 0 to 1"),
        ("density_floor", 1.0, "from 0 to below 1"),
        ("level", 1.0, "strictly between 0 and 1"),
        ("mode", "loud", "choose one of standard, causal, compatible"),
        ("stop", ("",), "not empty"),
    ],
)
def test_out_of_range_is_refused_by_name_and_value(name, value, law):
    with pytest.raises(ValueError, match=name) as caught:
        Settings(**{name: value})
    assert repr(value) in str(caught.value)
    assert law in str(caught.value)


def test_temperature_zero_divides_nothing():
    with pytest.raises(ValueError, match="by which mode compatible would divide"):
        Settings(mode="compatible", sample=True, temperature=0.0)
    assert Settings(mode="causal", temperature=0.0).options()["temperature"] == 0.0


SAMPLING = {"seed": 1, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "persistence": 0.1, "density_floor": 0.1}


@pytest.mark.parametrize(
    ("mode", "sample", "inert"),
    [
        ("standard", False, {*SAMPLING}),
        ("standard", True, set()),
        ("causal", False, set()),
        ("compatible", False, {*SAMPLING}),
        ("compatible", True, {"persistence", "density_floor"}),
    ],
)
def test_what_has_no_effect_is_named_and_not_handed_on(mode, sample, inert):
    settings = Settings(mode=mode, sample=sample, **SAMPLING)
    assert set(settings.inert()) == inert
    assert not set(settings.options()) & inert
    assert Settings(mode=mode, sample=sample).inert() == []


def test_people_are_the_seed_and_those_after_it():
    assert [person.seed for person in Settings(seed=2**64 - 1).people(2)] == [2**64 - 1, 0]
