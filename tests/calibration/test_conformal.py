"""Intervals cover what they say: the map from level to multiple, its fit, and where it is used."""

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen import Cauchy, CausalQwen2Config, CausalQwen2ForCausalLM
from causal_qwen.calibration import fit_conformal
from causal_qwen.calibration.conformal import FEWEST_SCORES, MOST_SCORES, keep_scores, standardised_residuals
from causal_qwen.intervals import interval, multiple
from conftest import number_batches, tiny_causal

LEVELS = st.floats(1e-6, 1 - 1e-6)
SCORES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60).map(sorted)
NUM = 258


# ---- the map


@given(SCORES, LEVELS, LEVELS)
def test_a_higher_level_never_gets_a_narrower_interval(scores, one, other):
    low, high = sorted([one, other])
    assert multiple(low, scores) <= multiple(high, scores)


@given(LEVELS)
def test_without_scores_it_is_the_law(level):
    assert multiple(level) == multiple(level, []) == math.tan(math.pi * level / 2)


@given(SCORES, LEVELS)
def test_enough_scores_lie_inside(scores, level):
    """The definition: at least ⌈(n + 1)·level⌉ of n scores, or all of them, are no larger."""
    inside = sum(score <= multiple(level, scores) for score in scores)
    assert inside >= min(math.floor((len(scores) + 1) * level), len(scores))


def test_ranks_are_decimal():
    """(99 + 1)·0.29 is 28.999999999999996 or 29.000000000000004 by float, and rank 29 by arithmetic."""
    scores = [float(rank) for rank in range(1, 100)]
    for percent in range(1, 100):
        assert multiple(percent / 100, scores) == percent


def test_beyond_the_scores_the_law_takes_over():
    scores = [0.5] * 9
    assert multiple(0.9, scores) == 0.5
    assert multiple(0.95, scores) == math.tan(math.pi * 0.475)
    assert multiple(0.95, [100.0] * 9) == 100.0


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, math.nan])
def test_impossible_levels_are_named(level):
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        multiple(level, [1.0])


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_coverage_is_valid_in_finite_samples(level):
    """Exchangeable light-tailed data, many splits of 39 + 20: level ≤ coverage ≤ level + 1/(n + 1).

    With n = 39 the rank ⌈40·level⌉ is 40·level exactly, so the coverage of continuous scores is ``level``.
    The law itself covers far more.
    """
    rng = np.random.default_rng(3)
    splits, calibration, test = 1500, 39, 20
    y = torch.from_numpy(rng.normal(size=(splits, calibration + test)))
    Y = Cauchy(torch.zeros_like(y), torch.full_like(y, 1.3))  # a wrong law
    scores = standardised_residuals(Y, y)
    covered, covered_raw = [], []
    for row in range(splits):
        ordered = keep_scores(scores[row, :calibration]).scores
        lower, upper = interval(Y[row, calibration:], level, ordered)
        covered.append(((lower <= y[row, calibration:]) & (y[row, calibration:] <= upper)).double().mean())
        raw_lower, raw_upper = Y[row, calibration:].interval(level)
        covered_raw.append(
            ((raw_lower <= y[row, calibration:]) & (y[row, calibration:] <= raw_upper)).double().mean()
        )
    covered = torch.stack(covered)
    error = covered.std().item() / math.sqrt(splits)
    assert abs(covered.mean().item() - level) < 4 * error
    assert torch.stack(covered_raw).mean() > level + 0.05


def test_a_subsample_is_still_valid():
    """5,000 scores are cut to 999, whose map covers new ones as it should: ±4 standard errors."""
    rng = torch.Generator().manual_seed(0)
    covered = []
    for seed in range(200):
        scores = torch.rand(5000, generator=rng).double()
        subsample = keep_scores(scores, seed=seed).scores
        assert len(subsample) == MOST_SCORES
        assert subsample == sorted(subsample)
        covered.append(multiple(0.9, subsample))  # of uniform scores, the multiple is its own coverage
    covered = np.array(covered)
    assert abs(covered.mean() - 0.9) < 4 * covered.std() / math.sqrt(len(covered))


def test_the_subsample_is_seeded():
    scores = torch.rand(2000)
    assert keep_scores(scores, seed=1) == keep_scores(scores, seed=1) != keep_scores(scores, seed=2)


def test_too_few_scores_stay_raw_and_say_so(caplog):
    with caplog.at_level(logging.WARNING):
        assert keep_scores(torch.rand(FEWEST_SCORES - 1))[0] is None
    assert "19 numbers" in caplog.text
    assert len(keep_scores(torch.rand(FEWEST_SCORES))[0]) == FEWEST_SCORES


def test_nan_scores_are_named_and_infinite_ones_kept_as_the_largest():
    with pytest.raises(ValueError, match="residual 1 is NaN"):
        keep_scores(torch.tensor([1.0, math.nan]))
    assert keep_scores(torch.tensor([math.inf] * 20))[0][0] == torch.finfo(torch.float64).max


# ---- the fit


def test_fit_takes_the_numbers_that_are_labels():
    model = tiny_causal(value_center=1.5, value_spread=2.0)
    batches = number_batches()
    fit_conformal(model, batches)
    expected = []
    for batch in batches:
        outputs = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "numeric_values")})
        value = batch["numeric_values"][:, -1]
        y = (torch.sign(value) * torch.log1p(value.abs()) - 1.5) / 2.0
        expected.append((y - outputs.loc_Y[:, -2].double()).abs() / outputs.scale_Y[:, -2].double())
    assert len(model.config.conformal_scores) == 48  # the number at position 3 is no label
    np.testing.assert_allclose(model.config.conformal_scores, torch.cat(expected).sort().values.detach())


def test_fit_prefers_labels_values_and_restores_the_mode():
    model = tiny_causal().train()
    batches = number_batches()
    fit_conformal(model, [batch | {"labels_values": batch["numeric_values"] * 1000} for batch in batches])
    far = model.config.conformal_scores
    assert model.training
    fit_conformal(model, batches)
    assert far[-1] > model.config.conformal_scores[-1]


def test_fit_without_numbers_resets_to_the_law(caplog):
    model = tiny_causal(conformal_scores=[1.0, 2.0])
    fit_conformal(model, [])
    assert model.config.conformal_scores is None
    assert "0 numbers" in caplog.text
    with pytest.raises(ValueError, match="no <NUM>"):
        fit_conformal(tiny_causal(num_token_id=None), [])


# ---- where it is used


def test_predict_number_covers_its_calibration_numbers():
    model = tiny_causal()
    batches = number_batches(count=10)
    fit_conformal(model, batches)
    for level in (0.5, 0.9):
        inside = []
        for batch in batches:
            prompts = {
                name: batch[name][:, :-1] for name in ("input_ids", "attention_mask", "numeric_values")
            }
            read = model.predict_number(prompts, level)
            truth = batch["numeric_values"][:, -1]
            inside.append(((read.lower <= truth) & (truth <= read.upper)).double())
        # ⌈81·level⌉ of the 80 scores, by the rounding of float32 perhaps one fewer
        assert torch.cat(inside).sum() == pytest.approx(math.ceil(81 * level), abs=1)


def test_raw_is_the_law_and_none_is_raw():
    model = tiny_causal()
    prompts = {"input_ids": torch.randint(0, 256, (3, 7))}
    law = model.predict_number(prompts, 0.9)
    outputs = model(**prompts)
    lower, upper = Cauchy(outputs.loc_Y[:, -1], outputs.scale_Y[:, -1]).interval(0.9)
    torch.testing.assert_close(law.lower, model.value_space.decode(lower), rtol=0, atol=0)
    torch.testing.assert_close(law.upper, model.value_space.decode(upper), rtol=0, atol=0)
    model.config.conformal_scores = [0.1] * 30
    narrow, raw = model.predict_number(prompts, 0.9), model.predict_number(prompts, 0.9, raw=True)
    assert torch.equal(raw.lower, law.lower)
    assert torch.equal(narrow.median, law.median)
    assert (narrow.lower > law.lower).all()
    assert (narrow.upper < law.upper).all()


@pytest.fixture
def writer():
    """A model that writes nothing but numbers."""
    model = tiny_causal(conformal_scores=[0.25] * 30)
    with torch.no_grad():
        model.action.bias[NUM] = 1e4
    return model


def generated(model, **options):
    prompt = torch.arange(5)[None]
    return model.generate(prompt, max_new_tokens=3, return_dict_in_generate=True, pad_token_id=257, **options)


def half_widths(outputs, model):
    """In value space, of the generated numbers."""
    encode = model.value_space.encode
    return (encode(outputs.numeric_upper[:, 5:]) - encode(outputs.numeric_lower[:, 5:])) / 2


@pytest.mark.parametrize("mode", ["standard", "causal", "compatible"])
def test_generated_numbers_carry_the_same_intervals(writer, mode):
    options = {"inference_mode": mode} | ({"individual": 1} if mode == "causal" else {})
    calibrated = generated(writer, **options)
    raw = generated(writer, raw_intervals=True, **options)
    assert torch.equal(calibrated.numeric_values, raw.numeric_values)
    ratio = half_widths(raw, writer) / half_widths(calibrated, writer)
    torch.testing.assert_close(ratio, torch.full_like(ratio, multiple(0.9) / 0.25), rtol=1e-4, atol=0.0)


def test_generate_and_predict_agree(writer):
    outputs = generated(writer)
    read = writer.predict_number({"input_ids": torch.arange(5)[None]}, 0.9)
    torch.testing.assert_close(outputs.numeric_lower[0, 5], read.lower[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outputs.numeric_upper[0, 5], read.upper[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"do_sample": True, "individual": 1}, {"do_sample": True, "temperature": 0.0}]
)
def test_another_law_than_the_calibrated_one_stays_raw(writer, options):
    both = [half_widths(generated(writer, raw_intervals=raw, **options), writer) for raw in (False, True)]
    assert torch.equal(*both)


def test_scores_are_saved_and_loaded(tmp_path):
    model = tiny_causal()
    fit_conformal(model, number_batches())
    model.save_pretrained(tmp_path)
    loaded = CausalQwen2ForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.conformal_scores == model.config.conformal_scores
    prompt = {"input_ids": torch.arange(6)[None]}
    assert torch.equal(loaded.predict_number(prompt).lower, model.predict_number(prompt).lower)


@pytest.mark.parametrize("scores", [[], [2.0, 1.0], [-1.0, 1.0], [1.0, math.nan], [1.0, math.inf]])
def test_scores_that_are_none_are_named(scores):
    with pytest.raises(ValueError, match="conformal_scores"):
        CausalQwen2Config(conformal_scores=scores)
