"""The Cauchy regression against scikit-learn, scipy and refits by brute force."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import cauchy
from sklearn.linear_model import Ridge

from causal_qwen.calibration import cauchy_regression as module
from causal_qwen.calibration import ridge
from causal_qwen.calibration.belief import cauchy_scale
from causal_qwen.calibration.cauchy_regression import cauchy_regression

FEW = [10.0**-power for power in range(1, 6)]  # strengths, for speed


def line(count, width, *, noise=0.3, wrong=0.0, seed=0):
    """Rows on a line with Cauchy noise; of a share of them the label is anything."""
    generator = torch.Generator().manual_seed(seed)
    slope = torch.randn(width, generator=generator, dtype=torch.float64) / math.sqrt(width)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    draws = torch.rand(count, generator=generator, dtype=torch.float64)
    y = x @ slope + 3 + noise * torch.tan(math.pi * (draws - 0.5))
    bad = torch.rand(count, generator=generator) < wrong
    y[bad] = 100 + 300 * torch.rand(int(bad.sum()), generator=generator, dtype=torch.float64)
    return x, y, slope


def centred(x):
    return x - x.mean(0)


@pytest.mark.parametrize(("count", "width"), [(40, 8), (12, 30)])
def test_left_out_residuals_are_those_of_refits_without_the_row(count, width):
    x, y, _ = line(count, width)
    fit = cauchy_regression(x, y, strengths=[0.01], folds=0)
    z = centred(x)
    strength = 0.01 * torch.linalg.eigvalsh(z @ z.T)[-1].item()
    for row in range(count):
        rest = np.arange(count) != row
        refit = Ridge(alpha=strength, solver="svd").fit(z[rest], y[rest], sample_weight=fit.weights[rest])
        expected = y[row].item() - refit.predict(z[row : row + 1]).item()
        assert fit.left_out[row].item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("count", "width"), [(40, 8), (12, 30)])
def test_line_is_the_ridge_with_the_weights_that_its_own_residuals_give(count, width):
    x, y, _ = line(count, width)
    fit = cauchy_regression(x, y, strengths=[0.1, 0.01], folds=0)
    z = centred(x)
    strength = fit.strength * torch.linalg.eigvalsh(z @ z.T)[-1].item()
    reference = Ridge(alpha=strength, solver="svd").fit(z, y, sample_weight=fit.weights)
    predicted = (x @ fit.slope + fit.intercept).numpy()
    np.testing.assert_allclose(predicted, reference.predict(z), rtol=1e-8, atol=1e-8)
    fixed_point = 2 / (1 + (fit.left_out / fit.scale) ** 2)
    torch.testing.assert_close(fit.weights, fixed_point, rtol=0, atol=2 * module.TOLERANCE)


def test_many_rows_give_the_maximum_of_the_likelihood():
    x, y, slope = line(4000, 3)
    fit = cauchy_regression(x, y, strengths=[1e-9])

    def loss(parameters):
        residual = y.numpy() - x.numpy() @ parameters[:3] - parameters[3]
        return -cauchy.logpdf(residual, scale=np.exp(parameters[4])).mean()

    best = minimize(loss, np.array([*slope.tolist(), 3.0, math.log(0.3)]), method="BFGS", tol=1e-10).x
    np.testing.assert_allclose([*fit.slope.tolist(), fit.intercept], best[:4], rtol=0.01, atol=1e-3)
    assert fit.scale == pytest.approx(math.exp(best[4]), rel=0.01)


@given(st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=3, max_size=30), st.floats(1e-3, 1e3))
@settings(max_examples=50, deadline=None)
def test_scale_is_scipys_and_scales(residuals, factor):
    residuals = torch.tensor(residuals, dtype=torch.float64)
    if (residuals.abs() > 1e-3 * residuals.abs().max()).sum() * 2 <= len(residuals):
        return  # where half of them are zero the likelihood has no maximum
    beta = cauchy_scale(residuals)
    half = (1 / (1 + (residuals / beta) ** 2)).mean().item()
    assert half == pytest.approx(0.5, abs=1e-6)
    assert cauchy_scale(residuals * factor) == pytest.approx(beta * factor, rel=1e-6)


def test_scale_of_a_cauchy_sample():
    sample = cauchy.rvs(scale=2.5, size=20_000, random_state=0)
    assert cauchy_scale(torch.from_numpy(sample)) == pytest.approx(cauchy.fit(sample, floc=0)[1], rel=1e-3)


def test_equal_targets_give_a_flat_line():
    fit = cauchy_regression(torch.randn(20, 4), torch.full((20,), 7.0))
    assert fit.slope.abs().max() < 1e-6
    assert fit.intercept == pytest.approx(7.0)
    assert math.isfinite(fit.scale)


@pytest.mark.parametrize(("count", "width"), [(600, 20), (150, 200)])
def test_wrong_labels_do_not_bend_the_line(count, width):
    """A third of the labels may be anything; a ridge by squared error is lost with a tenth of them."""
    x, y, slope = line(count, width, noise=0.05, wrong=0.3, seed=1)
    new = torch.randn(300, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    truth = new @ slope + 3
    spread = (truth - truth.median()).abs().median()

    def error(fit):
        return ((new @ fit.slope + fit.intercept - truth).abs().median() / spread).item()

    clean = cauchy_regression(*line(count, width, noise=0.05, seed=1)[:2], strengths=FEW)
    dirty = cauchy_regression(x, y, strengths=FEW)
    assert error(dirty) < max(2 * error(clean), 0.05) if count > width else error(dirty) < 1
    good = y < 90
    assert dirty.weights[~good].max() < 0.1 * dirty.weights[good].median()


def test_mapped_blocks_change_nothing(monkeypatch):
    x, y, _ = line(100, 6)
    whole = cauchy_regression(x, y)
    monkeypatch.setattr(ridge, "BLOCK", 7)
    pieces = cauchy_regression(x, y)
    torch.testing.assert_close(pieces.slope, whole.slope, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(pieces.left_out, whole.left_out, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("count", "width"), [(60, 5), (40, 70)])
def test_folds_do_not_know_their_labels(count, width):
    x, y, _ = line(count, width)
    fit = cauchy_regression(x, y, strengths=[0.1, 0.01], folds=4)
    assert fit.fold.bincount().tolist() == [count // 4] * 4
    for k in range(4):
        outside = fit.fold == k
        predicted = x @ fit.fold_slopes[k] + fit.fold_intercepts[k]
        torch.testing.assert_close(fit.left_out[outside], (y - predicted)[outside], rtol=1e-9, atol=1e-9)
        broken = torch.where(outside, y + 1e4, y)
        other = cauchy_regression(x, broken, strengths=[fit.strength], folds=4)
        again = x @ other.fold_slopes[k] + other.fold_intercepts[k]
        # Weights are settled to a hundredth, from another start.
        assert (again - predicted).abs().median() < 0.1 * predicted.std()


@pytest.mark.parametrize(("count", "width"), [(80, 6), (30, 50)])
def test_noise_is_a_ridge_of_its_own_shape(count, width):
    """As a fit to many noisy copies of the rows: a direction that rounding destroys gets no slope."""
    x, y, _ = line(count, width, noise=0.05)
    noise = torch.zeros(width, width, dtype=torch.float64)
    noise[0, 0] = 1e9
    plain, proof = (cauchy_regression(x, y, noise=moment) for moment in (None, noise))
    assert proof.slope[0].abs() < 1e-5 < plain.slope[0].abs()
    none = cauchy_regression(x, y, noise=torch.zeros_like(noise))
    torch.testing.assert_close(none.slope, plain.slope, rtol=1e-6, atol=1e-8)


def test_folds_do_not_flatter_where_rows_are_as_few_as_features():
    """The closed form keeps the weights of rows that fit by chance; errors of new rows are larger."""
    x, y, _ = line(2100, 80, noise=1.0)
    new, labels = x[100:], y[100:]
    fit = cauchy_regression(x[:100], y[:100])
    error = (labels - new @ fit.slope - fit.intercept).abs().median()
    assert fit.left_out.abs().median() > 0.7 * error


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="NaN or infinite"):
        cauchy_regression(torch.randn(10, 2), torch.tensor([bad, *[0.0] * 9]))
    with pytest.raises(ValueError, match="at least 3"):
        cauchy_regression(torch.randn(2, 2), torch.zeros(2))


def test_groups_are_left_out_whole():
    x, y, *_ = line(120, 8, noise=0.05, seed=0)
    groups = torch.arange(120) // 4
    fit = cauchy_regression(x, y, strengths=[0.01], groups=groups, folds=5)
    folds = fit.fold.reshape(30, 4)
    assert (folds == folds[:, :1]).all()
    assert fit.fold.unique().tolist() == list(range(5))


def test_copies_of_a_row_do_not_vouch_for_each_other():
    """Labels that say nothing, each row four times: only a fold that leaves out all four sees that."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 100, generator=generator).repeat(4, 1)
    y = torch.randn(60, generator=generator).repeat(4)
    apart, together = (
        cauchy_regression(x, y, strengths=[1e-3], groups=groups, folds=10)
        for groups in (None, torch.arange(60).repeat(4))
    )
    assert apart.left_out.abs().median() < 0.5 * together.left_out.abs().median()


def test_two_groups_are_too_few_for_folds():
    x, y, *_ = line(40, 4, noise=0.05, seed=0)
    assert len(cauchy_regression(x, y, groups=torch.arange(40) // 20).fold) == 0


@pytest.mark.parametrize(("count", "width"), [(120, 8), (60, 90)])
def test_doubt_changes_nothing_where_all_labels_are_believed(count, width):
    generator = torch.Generator().manual_seed(0)
    x, _, slope = line(count, width)
    y = x @ slope + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)
    doubting, trusting = (cauchy_regression(x, y, strengths=FEW, doubt=doubt) for doubt in (True, False))
    assert doubting.believed.all()
    assert doubting.wrong is None
    assert doubting.scale == trusting.scale
    for name in ("slope", "left_out", "weights", "fold_slopes"):
        assert torch.equal(getattr(doubting, name), getattr(trusting, name)), name


@pytest.mark.parametrize(("count", "width", "folds"), [(240, 20, 5), (240, 20, 0), (120, 160, 5)])
def test_wrong_labels_cost_no_more_than_rows_without_labels(count, width, folds):
    """Near a fit that is told which labels are wrong, in error, β and strength; no right row is lost."""
    generator = torch.Generator().manual_seed(3)
    decay = torch.arange(1, width + 1) ** -1.0
    x = torch.randn(count + 500, width, generator=generator, dtype=torch.float64) * decay
    slope = torch.randn(width, generator=generator, dtype=torch.float64)
    truth = x @ slope
    y = truth + 0.05 * torch.randn(count + 500, generator=generator, dtype=torch.float64)
    bad = torch.rand(count, generator=generator) < 0.3
    given = torch.where(bad, 3 + 4 * torch.rand(count, generator=generator, dtype=torch.float64), y[:count])

    def error(fit):
        return (x[count:] @ fit.slope + fit.intercept - truth[count:]).abs().median().item()

    found = cauchy_regression(x[:count], given, strengths=FEW, folds=folds)
    trusting = cauchy_regression(x[:count], given, strengths=FEW, folds=folds, doubt=False)
    told = cauchy_regression(x[:count][~bad], given[~bad], strengths=FEW, folds=folds)
    assert error(found) < 1.25 * error(told)
    assert found.scale < 1.25 * told.scale < trusting.scale
    assert (found.believed == ~bad).double().mean() > 0.95
    assert (found.weights[~found.believed] == 0).all()
    assert found.wrong.share == pytest.approx(bad.double().mean().item(), abs=0.05)


def test_labels_that_are_not_believed_keep_their_residuals():
    """Intervals cover labels as they are given."""
    x, y, _ = line(200, 5, noise=0.05, wrong=0.3)
    fit = cauchy_regression(x, y, folds=4)
    assert not fit.believed.all()
    for k in range(4):
        outside = fit.fold == k
        predicted = x @ fit.fold_slopes[k] + fit.fold_intercepts[k]
        torch.testing.assert_close(fit.left_out[outside], (y - predicted)[outside], rtol=1e-9, atol=1e-9)
