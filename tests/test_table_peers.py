"""Tables, scores and answers that benchmarks/tables.py and outliers.py rely on."""

import importlib
import string
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from causal_qwen.data import Template

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def table_data(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("table_data")


@pytest.fixture
def peers(table_data):
    return importlib.import_module("peers")


@pytest.mark.slow
def test_every_table_is_whole(table_data):
    """A sentence has every column, a target is a number, and the test rows are not trained on."""
    for name, table in table_data.load(table_data.TABLES).items():
        assert 100 <= len(table.rows) <= table_data.MOST_ROWS, name
        template = Template(table.template, table.target)
        columns = {
            "Year" if name == "cars" and c == "year" else c
            for c in (*table.numbers, *table.words, *table.texts)
        }
        fields = {field for _, field, _, _ in string.Formatter().parse(table.template) if field}
        assert fields == columns | {table.target}, name
        assert all(template.prompt(row).text for row in table.rows)
        train, test = table.split(0)
        assert len(train) + len(test) == len(table.rows)
        assert {id(row) for row in train}.isdisjoint(id(row) for row in test)


def test_wrong_labels_are_a_share_and_nothing_else_changes(table_data):
    table = table_data.occupations()
    wrong = table.with_wrong_labels(table.rows, 0.3, seed=1)
    changed = [new for old, new in zip(table.rows, wrong, strict=True) if old is not new]
    assert len(changed) == round(0.3 * len(table.rows))
    labels = [row["prestige"] for row in table.rows]
    assert all(min(labels) <= row["prestige"] <= 10 * max(labels) for row in changed)
    assert max(row["prestige"] for row in changed) > 5 * max(labels)
    names = [row["name"] for row in table.rows]
    assert [row["name"] for row in wrong] == names
    assert table.with_wrong_labels(table.rows, 0.0, seed=1) == table.rows


def test_an_unknown_table_is_named(table_data):
    with pytest.raises(ValueError, match="there is no table 'ships'; there are cars, "):
        table_data.load(["ships"])


def test_interval_score_prefers_the_true_quantiles(peers):
    truth = np.random.default_rng(0).normal(size=20_000)

    def score(width):
        end = np.full(len(truth), width)
        return peers.interval_score(-end, end, truth, 0.9).mean()

    right = stats.norm.ppf(0.95)
    assert score(right) < min(score(0.9 * right), score(1.1 * right))


def test_crps_is_near_that_of_the_law(peers):
    """Seven quantiles of a normal law: 0.5642 is the mean CRPS of its own draws."""
    truth = np.random.default_rng(0).normal(size=20_000)
    ends = {
        level: tuple(np.full(len(truth), stats.norm.ppf((1 + sign * level) / 2)) for sign in (-1, 1))
        for level in peers.LEVELS
    }
    found = peers.scores(peers.Predictions(np.zeros(len(truth)), ends, 0.0), truth)
    assert found["crps"] == pytest.approx(1 / np.sqrt(np.pi), rel=0.05)
    assert found["coverage"] == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    ("text", "number"), [(" 23.5\nGermany", 23.5), ("1,234 dollars", 1234.0), (" -97.1.", -97.1), ("7", 7.0)]
)
def test_answers_are_read(peers, text, number):
    assert peers.as_number(text) == number


@pytest.mark.parametrize("text", ["", " about 20", "-", "\n"])
def test_answers_that_are_no_number_are_nan(peers, text):
    assert np.isnan(peers.as_number(text))
