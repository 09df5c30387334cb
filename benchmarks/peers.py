"""Who a table is also given to: learners on its columns, and the base that continues rows as text.

Every learner's intervals are conformal, at several levels: regressors by CV+ (MAPIE's), the quantile forest
by its own quantiles, widened by what its out-of-bag errors ask for. What suits a learner is chosen for it by
cross-validation on the training rows: boosting's implementation, how free text becomes columns, and whether
the target's logarithm is learned.
"""

from __future__ import annotations

import math
import random
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from causal_qwen.conversion import load_base
from causal_qwen.data import Template
from causal_qwen.decoder import Engine
from table_data import Dataset, Row

LEVELS = (0.3, 0.6, 0.9)  # with the median, their ends are the quantiles 0.05, 0.2, …, 0.95
FOLDS = 10  # of CV+
CHOOSING_FOLDS = 3
MOST_DIGITS = 8  # tokens
NUMBER = re.compile(r"\s*(-?\d[\d,]*(?:\.\d+)?)")
Array = np.ndarray[Any, Any]
Learner = Callable[[Dataset, list[Row], list[Row]], "Predictions"]


@dataclass(frozen=True)
class Predictions:
    """Of the test rows.

    Args:
        median: (N,) point predictions.
        ends: By level, the lower and upper ends (N,) of intervals; empty where there are none.
        seconds: Of everything before the first prediction.
        unreadable: Answers that are no number; the training median stands in for them.
    """

    median: Array
    ends: Mapping[float, tuple[Array, Array]]
    seconds: float
    unreadable: int = 0


def labels_of(table: Dataset, rows: Sequence[Row]) -> Array:
    """(N,) true numbers."""
    return np.array([row[table.target] for row in rows], dtype=float)


def scores(predictions: Predictions, truth: Array) -> dict[str, float]:
    """Errors and, where there are intervals, what they are worth.

    ``crps`` is the weighted interval score over `LEVELS`, which tends to the continuous ranked probability
    score as levels are added.
    """
    errors = np.abs(predictions.median - truth)
    found = {"mdae": float(np.median(errors)), "mae": float(errors.mean()), "seconds": predictions.seconds}
    if predictions.ends:
        lower, upper = predictions.ends[0.9]
        penalties = {level: interval_score(*ends, truth, level) for level, ends in predictions.ends.items()}
        weighted = errors / 2 + sum((1 - level) / 2 * score for level, score in penalties.items())
        found |= {
            "crps": float(np.mean(weighted) / (len(penalties) + 0.5)),
            "interval_score": float(np.mean(penalties[0.9])),
            "coverage": float(np.mean((lower <= truth) & (truth <= upper))),
            "width": float(np.median(upper - lower)),
        }
    return found


def interval_score(lower: Array, upper: Array, truth: Array, level: float) -> Array:
    """(N,) width, plus 2/(1 − level) times the distance of a number that lies outside."""
    outside = np.maximum(lower - truth, 0) + np.maximum(truth - upper, 0)
    return upper - lower + 2 / (1 - level) * outside


# Learners on the columns -----------------------------------------------------------------------------------


def boosting(table: Dataset, train: list[Row], test: list[Row]) -> Predictions:
    """Gradient boosting by squared error."""
    return _cv_plus(table, train, test, _boosting_choices(table, train, absolute=False))


def boosting_l1(table: Dataset, train: list[Row], test: list[Row]) -> Predictions:
    """Gradient boosting by absolute error."""
    return _cv_plus(table, train, test, _boosting_choices(table, train, absolute=True))


def ridge(table: Dataset, train: list[Row], test: list[Row]) -> Predictions:
    """Ridge regression on standardised columns."""
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline

    strengths = np.logspace(-3, 4, 15)
    choices = [
        _in_logarithms(make_pipeline(_columns(table, text, standardised=True), RidgeCV(strengths)), logarithm)
        for text in _text_forms(table)
        for logarithm in _spaces(table, train)
    ]
    return _cv_plus(table, train, test, choices)


def forest(table: Dataset, train: list[Row], test: list[Row]) -> Predictions:
    """A quantile forest; out-of-bag errors say how far its quantiles have to be moved apart."""
    from quantile_forest import RandomForestQuantileRegressor

    start = time.perf_counter()
    x, new, y = _frame(table, train), _frame(table, test), labels_of(table, train)
    quantiles = [0.5] + [(1 + sign * level) / 2 for level in LEVELS for sign in (-1, 1)]
    fitted = []
    for text in _text_forms(table):
        columns = _columns(table, text).fit(x)
        model = RandomForestQuantileRegressor(n_estimators=200, min_samples_leaf=3, random_state=0)
        model.fit(columns.transform(x), y)
        left_out = model.predict(columns.transform(x), quantiles=quantiles, oob_score=True)
        fitted.append((float(np.median(np.abs(left_out[:, 0] - y))), columns, model, left_out))
    _, columns, model, left_out = min(fitted, key=lambda entry: entry[0])
    seconds = time.perf_counter() - start
    predicted = model.predict(columns.transform(new), quantiles=quantiles)
    ends = {}
    for index, level in enumerate(LEVELS):
        low, high = 1 + 2 * index, 2 + 2 * index
        excess = np.sort(np.maximum(left_out[:, low] - y, y - left_out[:, high]))
        rank = min(math.ceil((len(y) + 1) * level), len(y))
        ends[level] = (predicted[:, low] - excess[rank - 1], predicted[:, high] + excess[rank - 1])
    return Predictions(predicted[:, 0], ends, seconds)


def constant(table: Dataset, train: list[Row], test: list[Row]) -> Predictions:
    """The training median, and quantiles of the training labels."""
    y = labels_of(table, train)
    ends = {}
    for level in LEVELS:
        lower, upper = np.quantile(y, [(1 - level) / 2, (1 + level) / 2])
        ends[level] = (np.full(len(test), lower), np.full(len(test), upper))
    return Predictions(np.full(len(test), np.median(y)), ends, 0.0)


def _boosting_choices(table: Dataset, train: list[Row], *, absolute: bool) -> list[Any]:
    """Two implementations: the one by histograms wants twenty rows per leaf, which rare words lack."""
    from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor
    from sklearn.pipeline import make_pipeline

    losses = {True: "absolute_error", False: "squared_error"}
    models = (
        HistGradientBoostingRegressor(loss=losses[absolute], random_state=0),
        GradientBoostingRegressor(loss=losses[absolute], random_state=0),
    )
    return [
        _in_logarithms(make_pipeline(_columns(table, text), model), logarithm)
        for model in models
        for text in _text_forms(table)
        # A median's logarithm is the logarithms' median: absolute error has nothing to choose.
        for logarithm in ((False,) if absolute else _spaces(table, train))
    ]


def _cv_plus(table: Dataset, train: list[Row], test: list[Row], choices: Sequence[Any]) -> Predictions:
    """The choice with the least median error in cross-validation, fitted, with CV+ intervals."""
    from mapie.regression import CrossConformalRegressor
    from sklearn.model_selection import KFold, cross_val_score

    start = time.perf_counter()
    x, new, y = _frame(table, train), _frame(table, test), labels_of(table, train)
    chosen = choices[0]
    if len(choices) > 1:
        folds = KFold(CHOOSING_FOLDS, shuffle=True, random_state=0)
        errors = [
            -cross_val_score(choice, x, y, cv=folds, scoring="neg_median_absolute_error").mean()
            for choice in choices
        ]
        chosen = choices[int(np.argmin(errors))]
    folds = KFold(FOLDS, shuffle=True, random_state=0)
    model = CrossConformalRegressor(chosen, confidence_level=list(LEVELS), method="plus", cv=folds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # words of a fold that another has not
        model.fit_conformalize(x, y)
        seconds = time.perf_counter() - start
        median, ends = model.predict_interval(new, aggregate_point_predictions=None)  # (N,), (N, 2, levels)
    return Predictions(
        median, {level: (ends[:, 0, i], ends[:, 1, i]) for i, level in enumerate(LEVELS)}, seconds
    )


def _frame(table: Dataset, rows: Sequence[Row]) -> Any:
    import pandas

    names = (*table.numbers, *table.words, *table.texts)
    return pandas.DataFrame({name: [row[name] for row in rows] for name in names}).astype(
        dict.fromkeys((*table.words, *table.texts), object)
    )


def _text_forms(table: Dataset) -> tuple[str | None, ...]:
    return ("words", "letters") if table.texts else (None,)


def _spaces(table: Dataset, train: Sequence[Row]) -> tuple[bool, ...]:
    """Whether the target's logarithm is learned."""
    return (False, True) if min(labels_of(table, train)) > 0 else (False,)


def _columns(table: Dataset, text: str | None, *, standardised: bool = False) -> Any:
    """Numbers as they are, categories one-hot, free text by TF-IDF of words or of parts of words."""
    from sklearn.compose import ColumnTransformer
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    parts: list[Any] = []
    if table.numbers:
        parts.append(("numbers", StandardScaler() if standardised else "passthrough", list(table.numbers)))
    if table.words:
        encoder = OneHotEncoder(handle_unknown="ignore", min_frequency=3, sparse_output=False)
        parts.append(("words", encoder, list(table.words)))
    for name in table.texts:
        if text == "words":
            vectors: Any = TfidfVectorizer(token_pattern=r"\w+", min_df=2)
        else:
            letters = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), min_df=2)
            vectors = make_pipeline(letters, TruncatedSVD(40, random_state=0))
        parts.append((name, vectors, name))
    return ColumnTransformer(parts, sparse_threshold=0)


def _in_logarithms(model: Any, logarithm: bool) -> Any:
    from sklearn.compose import TransformedTargetRegressor

    return TransformedTargetRegressor(model, func=np.log, inverse_func=np.exp) if logarithm else model


# The base, with digits as text -----------------------------------------------------------------------------


class DigitsAsText:
    """The base reads some training rows and a test row up to its number, and writes on, greedily."""

    def __init__(self, base: str, shots: int) -> None:
        loaded = load_base(base)
        self.shots = shots
        self.tokenizer = loaded.tokenizer
        self.engine = Engine.from_model(loaded.model)

    def __call__(self, table: Dataset, train: list[Row], test: list[Row]) -> Predictions:
        """No intervals: greedy text has none."""
        start = time.perf_counter()
        template = Template(table.template, table.target)
        lines = []
        for row in random.Random(0).sample(train, min(self.shots, len(train))):
            prompt, completion = template.render(row)
            lines.append(f"{prompt.text.rstrip()} {completion.text}\n")
        context = self._ids("".join(lines))
        questions = [self._ids(template.prompt(row).text.rstrip()) for row in test]
        room = len(context) + max(map(len, questions)) + MOST_DIGITS
        cache = self.engine.new_cache(1, room)
        self.engine.hidden(torch.tensor([context]), None, cache)
        seconds = time.perf_counter() - start
        answers = []
        for question in questions:
            cache.length = len(context)  # every row continues the same context, which is read once
            answers.append(as_number(self._continuation(question, cache)))
        readable = np.array(answers)
        missing = np.isnan(readable)
        readable[missing] = np.median(labels_of(table, train))
        return Predictions(readable, {}, seconds, int(missing.sum()))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _continuation(self, question: Sequence[int], cache: Any) -> str:
        tokens, written = torch.tensor([question]), []
        for _ in range(MOST_DIGITS):
            best = int(self.engine.head(self.engine.hidden(tokens, None, cache)[:, -1]).argmax())
            written.append(best)
            tokens = torch.tensor([[best]])
        return str(self.tokenizer.decode(written))


def as_number(text: str) -> float:
    """The number that a continuation begins with; NaN if it does not."""
    match = NUMBER.match(text)
    return float(match[1].replace(",", "")) if match else math.nan
