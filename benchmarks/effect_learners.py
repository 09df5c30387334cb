"""Who is asked about effects beside us: learners on the columns; and intervals over resampled answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
RESAMPLES = 2000


def resampled(samples: Sequence[Array], statistic: Callable[..., Any]) -> list[float]:
    """95%, by the bootstrap over the entries that all samples share."""
    draw = np.random.default_rng(0)
    count = len(samples[0])
    values = []
    for _ in range(RESAMPLES):
        chosen = draw.integers(0, count, count)
        values.append(float(statistic(*(sample[chosen] for sample in samples))))
    return [float(end) for end in np.quantile(values, [0.025, 0.975])]


def _boosted(x: Array, y: Array) -> Any:
    """Of the two implementations the one with the smaller cross-validated error, fitted."""
    from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor
    from sklearn.model_selection import cross_val_score

    models = (HistGradientBoostingRegressor(random_state=0), GradientBoostingRegressor(random_state=0))
    scores = [cross_val_score(model, x, y, cv=3, scoring="neg_mean_squared_error").mean() for model in models]
    return models[int(np.argmax(scores))].fit(x, y)


def boosted_worlds(
    columns: Array, world: Array, observed: Array, train_part: Array, test_part: Array
) -> Array:
    """(N, 2) of held-out rows by two models, one for each world."""
    fitted = []
    for index in (0, 1):
        rows = train_part[world[train_part] == index]
        fitted.append(_boosted(columns[rows], observed[rows]).predict(columns[test_part]))
    return np.stack(fitted, axis=1)


def boosted_effect(
    columns: Array, world: Array, observed: Array, train_part: Array, test_part: Array
) -> Array:
    """(N,) by one model that has the world as a column."""
    model = _boosted(np.column_stack([columns, world])[train_part], observed[train_part])
    x = columns[test_part]
    ends = [model.predict(np.column_stack([x, np.full(len(x), index)])) for index in (0, 1)]
    effect: Array = ends[1] - ends[0]
    return effect


def forest_effect(
    columns: Array, world: Array, observed: Array, train_part: Array, test_part: Array, trees: int
) -> Array:
    """(N,) by a causal forest on residuals (double machine learning)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies
        from econml.dml import CausalForestDML
        from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

        forest = CausalForestDML(
            model_y=GradientBoostingRegressor(random_state=0),
            model_t=GradientBoostingClassifier(random_state=0),
            discrete_treatment=True,
            n_estimators=trees,
            random_state=0,
            n_jobs=1,
        )
        forest.fit(observed[train_part], world[train_part], X=columns[train_part])
        effect: Array = forest.effect(columns[test_part]).ravel()
    return effect


# How figures are written ------------------------------------------------------------------------------------


def with_interval(value: float, interval: Sequence[float]) -> str:
    """A figure and the ends of its interval."""
    return f"{_short(value)} ({_short(interval[0])}–{_short(interval[1])})"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
