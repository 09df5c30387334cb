"""Every metric against an independent reference on random data."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special, stats
from sklearn import metrics as reference

from causal_qwen import Cauchy
from causal_qwen.evaluation import metrics

RNG = np.random.default_rng(0)
BOOLEANS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40)


@pytest.fixture
def tokens():
    """P (N, V), logits (N, V), labels (N,) and the most probable tokens (N,)."""
    rng = np.random.default_rng(1)
    prob = rng.random((200, 12)) ** 4
    return prob, rng.normal(size=(200, 12)) * 3, rng.integers(0, 12, 200), prob.argmax(-1)


def test_accuracy():
    chosen, labels = RNG.integers(0, 5, (2, 1000))
    measured = metrics.accuracy(torch.from_numpy(chosen), torch.from_numpy(labels))
    assert measured == pytest.approx(reference.accuracy_score(labels, chosen), rel=1e-12)


@given(BOOLEANS)
def test_precision_recall_and_f1(pairs):
    predicted, actual = (np.array(column) for column in zip(*pairs, strict=True))
    measured = [
        metric(torch.from_numpy(predicted), torch.from_numpy(actual))
        for metric in (metrics.precision, metrics.recall, metrics.f1)
    ]
    expected = reference.precision_recall_fscore_support(
        actual, predicted, average="binary", zero_division=math.nan
    )[:3]
    np.testing.assert_allclose(measured, expected, rtol=1e-6)


def test_ovr_nll(tokens):
    prob, _, labels, _ = tokens
    measured = metrics.ovr_nll(torch.from_numpy(prob), torch.from_numpy(labels))
    normalised = prob / prob.sum(-1, keepdims=True)
    expected = reference.log_loss(labels, normalised, labels=range(12))
    assert measured.mean().item() == pytest.approx(expected, rel=1e-10)


def test_ovr_nll_of_an_impossible_label_is_finite():
    prob = torch.tensor([[0.0, 1.0]])
    assert torch.isfinite(metrics.ovr_nll(prob, torch.tensor([0]))).all()


def test_softmax_nll(tokens):
    _, logits, labels, _ = tokens
    measured = metrics.softmax_nll(torch.from_numpy(logits), torch.from_numpy(labels))
    expected = reference.log_loss(labels, special.softmax(logits, -1), labels=range(12))
    assert measured.mean().item() == pytest.approx(expected, rel=1e-10)
    shifted = metrics.softmax_nll(torch.from_numpy(logits + 7.0), torch.from_numpy(labels))
    torch.testing.assert_close(shifted, measured)


def test_brier(tokens):
    prob, _, labels, _ = tokens
    measured = metrics.brier(torch.from_numpy(prob), torch.from_numpy(labels))
    normalised = prob / prob.sum(-1, keepdims=True)
    expected = reference.brier_score_loss(labels, normalised, labels=range(12), scale_by_half=False)
    assert measured.mean().item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_expected_calibration_error_by_a_plain_loop(tokens, bins):
    prob, _, labels, chosen = tokens
    stated = metrics.confidence(torch.from_numpy(prob), torch.from_numpy(chosen))
    expected = 0.0
    for bin_index in range(bins):
        inside = [
            index
            for index, value in enumerate(stated.tolist())
            if bin_index / bins < value <= (bin_index + 1) / bins
        ]
        if inside:
            right = sum(chosen[index] == labels[index] for index in inside) / len(inside)
            said = sum(stated[index].item() for index in inside) / len(inside)
            expected += len(inside) / len(labels) * abs(right - said)
    correct = torch.from_numpy(chosen == labels)
    assert metrics.expected_calibration_error(stated, correct, bins=bins) == pytest.approx(expected)


def test_confidence_is_the_normalised_probability(tokens):
    prob, _, _, chosen = tokens
    stated = metrics.confidence(torch.from_numpy(prob), torch.from_numpy(chosen))
    np.testing.assert_allclose(stated, (prob / prob.sum(-1, keepdims=True)).max(-1))


def test_calibrated_statements_have_no_error():
    """Right with the probability that is stated: the error is sampling noise, √(1/(4·n_b)) per bin."""
    rng = np.random.default_rng(5)
    stated = rng.random(200_000)
    correct = rng.random(200_000) < stated
    error = metrics.expected_calibration_error(torch.from_numpy(stated), torch.from_numpy(correct))
    assert error < math.sqrt(15 / (4 * 200_000)) * 2
    count, said, right = metrics.calibration_bins(torch.from_numpy(stated), torch.from_numpy(correct), bins=5)
    assert count.sum() == 200_000
    np.testing.assert_allclose(said, [0.1, 0.3, 0.5, 0.7, 0.9], atol=0.01)
    np.testing.assert_allclose(right, said, atol=0.02)


def test_certainty_and_ignorance_have_a_bin():
    count, _, _ = metrics.calibration_bins(torch.tensor([0.0, 1.0]), torch.tensor([False, True]))
    assert count[0] == count[-1] == 1


@pytest.mark.parametrize("size", [1, 2, 101])
def test_errors_of_numbers(size):
    predicted, values = RNG.standard_cauchy((2, size)) * 100
    pair = torch.from_numpy(predicted), torch.from_numpy(values)
    assert metrics.mean_absolute_error(*pair) == pytest.approx(
        reference.mean_absolute_error(values, predicted), rel=1e-12
    )
    assert metrics.median_absolute_error(*pair) == pytest.approx(
        reference.median_absolute_error(values, predicted), rel=1e-12
    )


@pytest.mark.parametrize(("y", "loc", "scale"), [(0.3, 0.3, 1.0), (2.0, -1.0, 0.5), (-40.0, 3.0, 2.0)])
def test_crps_by_numerical_integration(y, loc, scale):
    """∫ (F(t) − 1{t ≥ y})² dt of scipy's F."""
    law = stats.cauchy(loc, scale)
    below, _ = integrate.quad(lambda t: law.cdf(t) ** 2, -np.inf, y, limit=400)
    above, _ = integrate.quad(lambda t: law.sf(t) ** 2, y, np.inf, limit=400)
    measured = metrics.crps(Cauchy(torch.tensor([loc]), torch.tensor([scale])), torch.tensor([y]))
    assert measured == pytest.approx(below + above, rel=1e-5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_are_numpys(entries, prob):
    measured = metrics.quantile(torch.tensor(entries, dtype=torch.float64), prob)
    assert measured == pytest.approx(np.quantile(entries, prob), rel=1e-9, abs=1e-9)


def test_nothing_is_nan():
    nothing, no_tokens = torch.empty(0), torch.empty(0, dtype=torch.long)
    nobody = torch.empty(0, dtype=torch.bool)
    undefined = [
        metrics.accuracy(no_tokens, no_tokens),
        metrics.f1(nobody, nobody),
        metrics.expected_calibration_error(nothing, nobody),
        metrics.mean_absolute_error(nothing, nothing),
        metrics.median_absolute_error(nothing, nothing),
        metrics.crps(Cauchy(nothing, nothing), nothing),
    ]
    assert all(math.isnan(value) for value in undefined)
