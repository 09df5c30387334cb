"""Two models whose gains differ, compared with the same movement of the cause."""

import pytest
import torch

from causal_qwen import Engine, Side, compare
from causal_qwen.counterfactual.comparison import Comparison, PlainSpeaker
from causal_qwen.counterfactual.comparison.speakers import CausalTalker
from causal_qwen.prompting import Settings, Speaker
from conftest import tiny_base, tiny_causal, tiny_processor, tiny_tokenizer

PROMPTS = ["Hello", "It cost 12 euros"]
SHORT = Settings(max_new_tokens=6)


def speaker(gain, *, native=True):
    model = tiny_causal(noise_gain=gain)
    return Speaker(model, tiny_processor(), Engine.from_model(model) if native else None)


@pytest.mark.parametrize("native", [True, False])
def test_models_that_differ_by_their_gain_alone_say_the_same_with_equal_noise(one_thread, native):
    a, b = Side(speaker(0.005, native=native), PROMPTS, SHORT), Side(speaker(0.04), PROMPTS, SHORT, "copy")
    own, equal = (compare(a, b, individuals=6, scores=["length"], noise=noise) for noise in ("own", "equal"))
    assert own.first.differing > 0
    assert equal.first.differing == 0
    assert own.names[1] == "copy"
    assert equal.names[1] == "copy, temperature 0.125"


def test_the_temperature_that_was_asked_for_holds_on_both_sides(one_thread):
    warm = Settings(max_new_tokens=6, temperature=2.0)
    a, b = (Side(speaker(gain), PROMPTS, warm) for gain in (5.0, 20.0))
    plan = Comparison(a, b, individuals=2, noise="equal")
    assert plan.a.settings.temperature == 2.0
    assert plan.b.settings.temperature == pytest.approx(0.5, rel=1e-6)


def test_the_width_is_that_of_the_noise_behind_the_prompts(one_thread):
    """κ·(scale_U + |b_noise|), whoever runs the backbone."""
    model, processor = tiny_causal(noise_gain=5.0), tiny_processor()
    model.action.b_noise.data.fill_(-0.25)
    with torch.no_grad():
        scales = [model(**processor(prompt, return_tensors="pt")).scale_U.flatten() for prompt in PROMPTS]
    expected = 5.0 * (torch.cat(scales).median().item() + 0.25)
    for engine in (None, Engine.from_model(model)):
        width = CausalTalker(Speaker(model, processor, engine)).noise_width(PROMPTS)
        assert width == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("coupling", ["gumbel", "independent"])
def test_it_belongs_to_individuals(one_thread, coupling):
    side = Side(speaker(5.0), PROMPTS, SHORT)
    with pytest.raises(ValueError, match=f"noise is 'equal' with coupling '{coupling}'; choose 'own'"):
        Comparison(side, side, individuals=2, coupling=coupling, noise="equal")


def test_noise_that_moves_nothing_cannot_be_made_equal(one_thread):
    a, b = (Side(speaker(gain), PROMPTS, SHORT) for gain in (5.0, 0.0))
    with pytest.raises(ValueError, match="noise 'equal' needs causes on both sides that noise moves"):
        Comparison(a, b, individuals=2, noise="equal")


def test_a_model_without_causes_has_no_width():
    assert PlainSpeaker(tiny_base(), tiny_tokenizer()).noise_width(PROMPTS) is None
