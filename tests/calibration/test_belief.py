"""Right labels and wrong ones, told apart by two laws."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit, logit
from scipy.stats import cauchy

from causal_qwen.calibration.belief import WrongLabels, believe, cauchy_scale


def labels(count, *, share=0.3, scale=0.1, center=6.0, wide=0.8, seed=0):
    """Labels about predictions between −1 and 1, and wrong ones from a law of their own."""
    draw = np.random.default_rng(seed)
    predicted = draw.uniform(-1, 1, count)
    is_wrong = draw.random(count) < share
    y = np.where(
        is_wrong, center + wide * draw.standard_cauchy(count), predicted + scale * draw.standard_cauchy(count)
    )
    return torch.from_numpy(y - predicted), torch.from_numpy(y), torch.from_numpy(is_wrong)


def test_the_laws_are_the_likeliest():
    """The maximum of the likelihood of all labels, by scipy."""
    e, y, _ = labels(2000)
    found = believe(e, y)

    def loss(parameters):
        share, scale, wide = expit(parameters[0]), math.exp(parameters[1]), math.exp(parameters[3])
        right = (1 - share) * cauchy.pdf(e.numpy(), scale=scale)
        return -np.log(right + share * cauchy.pdf(y.numpy(), parameters[2], wide)).mean()

    start = np.array([logit(0.3), math.log(0.1), 6.0, math.log(0.8)])
    best = minimize(loss, start, method="BFGS", tol=1e-10).x
    share, center, wide = found.wrong
    expected = [expit(best[0]), math.exp(best[1]), best[2], math.exp(best[3])]
    np.testing.assert_allclose([share, found.scale, center, wide], expected, rtol=2e-3)


def test_right_is_bayes_rule():
    e, y, _ = labels(50)
    law = WrongLabels(0.2, 5.0, 0.7)
    right = 0.8 * cauchy.pdf(e.numpy(), scale=0.15)
    wrong = 0.2 * cauchy.pdf(y.numpy(), 5.0, 0.7)
    expected = right / (right + wrong)
    np.testing.assert_allclose(law.right(e, y, torch.tensor(0.15)), expected, rtol=1e-6)


def test_wrong_labels_are_found_and_right_ones_kept():
    e, y, is_wrong = labels(400, seed=1)
    found = believe(e, y)
    assert (found.believed == ~is_wrong).double().mean() > 0.95
    assert found.scale == pytest.approx(0.1, rel=0.2)
    assert cauchy_scale(e) > 2 * found.scale  # one law has to allow for them


@pytest.mark.parametrize("law", ["normal", "cauchy", "uniform"])
@pytest.mark.parametrize("seed", range(5))
def test_labels_of_one_law_are_all_believed(law, seed):
    draw = np.random.default_rng(seed)
    draws = {"normal": draw.normal, "cauchy": draw.standard_cauchy, "uniform": draw.uniform}[law](size=200)
    e = torch.from_numpy(draws)
    found = believe(e, e + torch.from_numpy(draw.normal(size=200)))
    # One of two hundred Cauchy draws may be so far off that it has a law of its own.
    assert (~found.believed).sum() <= (2 if law == "cauchy" else 0)
    if found.wrong is None:
        assert found.scale == cauchy_scale(e)
        assert (found.right == 1).all()


def test_where_most_would_be_wrong_all_are_believed():
    e, y, _ = labels(400, share=0.7)
    assert believe(e, y).wrong is None


@pytest.mark.parametrize("residuals", [torch.zeros(20), torch.ones(20), torch.tensor([0.0, 0.0, 1.0])])
def test_residuals_that_say_nothing(residuals):
    found = believe(residuals, torch.arange(len(residuals)))
    assert torch.isfinite(found.right).all()
    assert math.isfinite(found.scale)


def test_weights_of_a_scale_are_counts():
    e, _, _ = labels(60, share=0.0)
    counts = torch.arange(60) % 3
    repeated = cauchy_scale(e.repeat_interleave(counts))
    assert cauchy_scale(e, counts.double()) == pytest.approx(repeated, rel=1e-9)
