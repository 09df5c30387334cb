"""CV+ ends of plain ridge regressions, by MAPIE and by `cv_plus`: the same order statistics."""

import numpy as np
import pytest
import torch

from causal_qwen.cauchy import Cauchy
from causal_qwen.intervals import cv_plus

mapie = pytest.importorskip("mapie.regression")
linear_model = pytest.importorskip("sklearn.linear_model")
model_selection = pytest.importorskip("sklearn.model_selection")


@pytest.mark.parametrize("rows", [37, 60, 101])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_ends_are_mapies(rows, level):
    random = np.random.default_rng(rows)
    x, new = random.normal(size=(rows, 4)), random.normal(size=(20, 4))
    y = x @ random.normal(size=4) + random.standard_t(3, size=rows)
    splitter = model_selection.KFold(5, shuffle=True, random_state=0)
    reference = mapie.CrossConformalRegressor(
        linear_model.Ridge(2.0), confidence_level=level, method="plus", cv=splitter
    )
    _, ends = reference.fit_conformalize(x, y).predict_interval(new)  # (20, 2, 1)

    residuals, folds, locs = np.empty(rows), np.empty(rows, dtype=int), []
    for fold, (train, left_out) in enumerate(splitter.split(x)):
        model = linear_model.Ridge(2.0).fit(x[train], y[train])
        residuals[left_out] = np.abs(y[left_out] - model.predict(x[left_out]))
        folds[left_out] = fold
        locs.append(model.predict(new))
    fold_locs = torch.tensor(np.stack(locs, -1))  # (20, 5)
    law = Cauchy(fold_locs.mean(-1), torch.ones(20, dtype=torch.float64))
    lower, upper = cv_plus(law, fold_locs, level, residuals.tolist(), folds.tolist())
    np.testing.assert_allclose(lower, ends[:, 0, 0], rtol=1e-9)
    np.testing.assert_allclose(upper, ends[:, 1, 0], rtol=1e-9)
