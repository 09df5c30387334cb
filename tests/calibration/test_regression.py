"""Ridge regression against scikit-learn, and against fits that leave one row out."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeCV

from causal_qwen.calibration.regression import ridge


def problem(rows, size, *, noise=0.3):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(rows, size, dtype=torch.float64, generator=generator) + 2
    slope = torch.randn(size, dtype=torch.float64, generator=generator)
    disturbance = noise * torch.randn(rows, dtype=torch.float64, generator=generator)
    return features, features @ slope + 5 + disturbance


SHAPES = pytest.mark.parametrize("shape", [(60, 7), (20, 33)], ids=["tall", "wide"])


@SHAPES
def test_strength_slope_and_intercept_are_those_of_ridge_cv(shape):
    features, target = problem(*shape)
    largest = torch.linalg.svdvals(features - features.mean(0))[0].item()
    reference = RidgeCV(largest**2 * np.logspace(-9, 1, 41)).fit(features.numpy(), target.numpy())
    fit = ridge(features, target)
    assert fit.strength == pytest.approx(reference.alpha_)
    assert fit.intercept == pytest.approx(reference.intercept_, rel=1e-6)
    np.testing.assert_allclose(fit.slope, reference.coef_, rtol=1e-6, atol=1e-9)
    assert fit.r2 == pytest.approx(1 + reference.best_score_ / target.var(correction=0).item())


@SHAPES
def test_left_out_predictions_are_those_of_fits_without_the_row(shape):
    features, target = problem(*shape)
    fit = ridge(features, target)
    for row in range(0, len(target), 7):
        others = torch.arange(len(target)) != row
        x, y = features[others], target[others]
        centred = x - x.mean(0)
        gram = centred.T @ centred + fit.strength * torch.eye(x.shape[1], dtype=torch.float64)
        slope = torch.linalg.solve(gram, centred.T @ (y - y.mean()))
        predicted = y.mean() + (features[row] - x.mean(0)) @ slope
        assert fit.left_out[row].item() == pytest.approx(predicted.item(), abs=1e-6)


def test_slack_buys_a_smaller_slope():
    features, target = problem(60, 7, noise=3.0)
    best, relaxed = ridge(features, target), ridge(features, target, slack=0.1)
    assert relaxed.strength > best.strength
    assert relaxed.slope.norm() < best.slope.norm()
    assert best.r2 > relaxed.r2
    assert 1 - relaxed.r2 <= 1.1 * (1 - best.r2)
