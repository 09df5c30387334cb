"""The metrics, each a small pure function; spec names in `causal_qwen.evaluation.run`.

Functions "of each position" return one number per position and are averaged by whoever calls them, so that a
run over data never holds the scores of more than a few positions. The others take all of the data. What is
undefined (a precision without predictions, an error without numbers) is NaN.

A Cauchy has no mean and no variance; the means here are over positions, of finite quantities.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy

__all__ = [
    "accuracy",
    "brier",
    "calibration_bins",
    "confidence",
    "crps",
    "expected_calibration_error",
    "f1",
    "mean",
    "mean_absolute_error",
    "median",
    "median_absolute_error",
    "ovr_nll",
    "precision",
    "quantile",
    "recall",
    "softmax_nll",
]

ECE_BINS = 15


def accuracy(chosen: Tensor, labels: Tensor) -> float:
    """Share of positions (N,) whose chosen token is the label."""
    return mean((chosen == labels).double())


def precision(predicted: Tensor, actual: Tensor) -> float:
    """True positives among the predicted ones, of two boolean (N,)."""
    return _ratio((predicted & actual).sum(), predicted.sum())


def recall(predicted: Tensor, actual: Tensor) -> float:
    """True positives among the actual ones, of two boolean (N,)."""
    return _ratio((predicted & actual).sum(), actual.sum())


def f1(predicted: Tensor, actual: Tensor) -> float:
    """2·TP/(2·TP + FP + FN), of two boolean (N,)."""
    return _ratio(2 * (predicted & actual).sum(), predicted.sum() + actual.sum())


def ovr_nll(prob: Tensor, labels: Tensor) -> Tensor:
    """−log(P_y/ΣP) of each position.

    Args:
        prob: (n, V) P_k = P(S_k > C_k).
        labels: (n,) y.
    """
    smallest = torch.finfo(prob.dtype).tiny
    prob_label = prob.gather(-1, labels[:, None]).squeeze(-1).clamp(min=smallest)
    return prob.sum(-1).log() - prob_label.log()


def softmax_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """−log softmax(logits)_y of each position; a common shift of a position's logits does not matter.

    Args:
        logits: (n, V).
        labels: (n,) y.
    """
    return logits.logsumexp(-1) - logits.gather(-1, labels[:, None]).squeeze(-1)


def brier(prob: Tensor, labels: Tensor) -> Tensor:
    """Σ_k (p_k − y_k)² with p = P/ΣP of each position: between 0 and 2.

    Args:
        prob: (n, V) P_k.
        labels: (n,) y.
    """
    total = prob.sum(-1)
    prob_label = prob.gather(-1, labels[:, None]).squeeze(-1) / total
    length: Tensor = torch.linalg.vector_norm(prob, dim=-1) / total
    return length.square() - 2 * prob_label + 1


def confidence(prob: Tensor, chosen: Tensor) -> Tensor:
    """P_k/ΣP of the chosen token k, of each position.

    Args:
        prob: (n, V) P_k.
        chosen: (n,) k.
    """
    return prob.gather(-1, chosen[:, None]).squeeze(-1) / prob.sum(-1)


def calibration_bins(
    stated: Tensor, correct: Tensor, *, bins: int = ECE_BINS
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions by confidence, in bins ((b − 1)/B, b/B]: their number, mean confidence and accuracy.

    Args:
        stated: (N,) confidences in [0, 1].
        correct: (N,) whether each was right.
        bins: B.

    Returns:
        Three (B,); mean and accuracy are NaN in an empty bin.
    """
    index = (stated.double() * bins).ceil().long().clamp(1, bins) - 1
    count = torch.bincount(index, minlength=bins)
    sums = (torch.bincount(index, weights=weights.double(), minlength=bins) for weights in (stated, correct))
    mean_stated, share_correct = (total / count for total in sums)
    return count, mean_stated, share_correct


def expected_calibration_error(stated: Tensor, correct: Tensor, *, bins: int = ECE_BINS) -> float:
    """Σ_b (n_b/N)·|accuracy_b − confidence_b| over equal-width bins; arguments as `calibration_bins`."""
    if stated.numel() == 0:
        return math.nan
    count, mean_stated, share_correct = calibration_bins(stated, correct, bins=bins)
    gaps = (share_correct - mean_stated).abs().nan_to_num() * count
    return float(gaps.sum() / count.sum())


def mean_absolute_error(predicted: Tensor, values: Tensor) -> float:
    """Mean of |predicted − value|, (M,) each."""
    return mean((predicted.double() - values.double()).abs())


def median_absolute_error(predicted: Tensor, values: Tensor) -> float:
    """Median of |predicted − value|, (M,) each."""
    return median((predicted.double() - values.double()).abs())


def crps(Y: Cauchy, target: Tensor) -> float:
    """Mean continuous ranked probability score of the laws Y (M,) in value space, against g(v) (M,)."""
    law = Cauchy(Y.loc.double(), Y.scale.double())
    return mean(law.crps(target.double()))


def mean(entries: Tensor) -> float:
    """Mean in float64; NaN of nothing."""
    return float(entries.double().mean()) if entries.numel() else math.nan


def median(entries: Tensor) -> float:
    """Median, halfway between the two middle entries of an even number; NaN of nothing."""
    return quantile(entries, 0.5)


def quantile(entries: Tensor, prob: float) -> float:
    """Quantile of all entries, linear between neighbours; NaN of nothing."""
    if entries.numel() == 0:
        return math.nan
    # torch.quantile stops at 2²⁴ entries.
    ordered = entries.double().flatten().sort().values
    place = prob * (len(ordered) - 1)
    below, above = ordered[math.floor(place)].item(), ordered[math.ceil(place)].item()
    share = place - math.floor(place)
    return below if share == 0 else below * (1 - share) + above * share


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if whole else math.nan
