"""CV+ intervals against MAPIE's, and their invariants."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from sklearn.model_selection import KFold

from causal_qwen.cauchy import Cauchy
from causal_qwen.intervals import cv_plus, farthest, interval


def test_ends_are_those_of_mapie():
    regression = pytest.importorskip("mapie.regression")
    generator = np.random.default_rng(0)
    x, new = generator.normal(size=(60, 4)), generator.normal(size=(25, 4))
    y = x @ generator.normal(size=4) + generator.standard_cauchy(60)
    splits = KFold(6, shuffle=True, random_state=0)
    reference = regression.CrossConformalRegressor(
        Ridge(alpha=1.0), confidence_level=0.8, method="plus", cv=splits
    ).fit_conformalize(x, y)
    _, ends = reference.predict_interval(new)

    fold, residual, locs = np.empty(60, int), np.empty(60), np.empty((25, 6))
    for k, (inside, outside) in enumerate(splits.split(x)):
        fit = Ridge(alpha=1.0).fit(x[inside], y[inside])
        fold[outside], residual[outside] = k, np.abs(y[outside] - fit.predict(x[outside]))
        locs[:, k] = fit.predict(new)
    Y = Cauchy(torch.zeros(25, dtype=torch.float64), torch.ones(25, dtype=torch.float64))
    lower, upper = cv_plus(Y, torch.from_numpy(locs), 0.8, residual.tolist(), fold.tolist())
    np.testing.assert_allclose(upper.numpy(), ends[:, 1, 0], rtol=1e-9)
    np.testing.assert_allclose(lower.numpy(), ends[:, 0, 0], rtol=1e-9)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 3)), min_size=1, max_size=40),
    st.floats(0.01, 0.99),
    st.floats(-10, 10),
)
@settings(max_examples=60, deadline=None)
def test_heads_that_agree_give_the_split_conformal_interval(pairs, level, loc):
    pairs = sorted(pairs)
    scores, folds = [list(column) for column in zip(*pairs, strict=True)]
    Y = Cauchy(torch.tensor([loc], dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64))
    ends = cv_plus(Y, torch.full((1, 4), loc, dtype=torch.float64), level, scores, folds)
    torch.testing.assert_close(ends, interval(Y, level, scores))


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_the_farthest_ends_are_ten_times_the_range(low, width):
    first, last = farthest([low, low + width])
    assert first <= low <= low + width <= last
    if width > 1e-3 * abs(low):
        assert last - first == pytest.approx(10 * width, rel=1e-6)
