"""Pictures of an evaluation: calibration, errors, coverage, and predictions with their intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from causal_qwen.evaluation import metrics
from causal_qwen.evaluation.run import Evaluation
from causal_qwen.figures import BLUE, GREY, ORANGE, new_figure, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_calibration", "draw_coverage", "draw_errors", "draw_predictions", "picture"]

LEVELS = torch.linspace(0.02, 0.98, 49).tolist()
MOST_POINTS = 300
LARGEST_DRAWN = 1e100  # axes cannot be laid out beyond


def picture(draw: Callable[..., None], *contents: Any) -> bytes:
    """A PNG of one drawing: ``draw(axes, *contents)``.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    figure, (axes,) = new_figure((5.2, 4.0))
    draw(axes, *contents)
    return png(figure)


def draw_calibration(axes: Axes, result: Evaluation) -> None:
    """How often the chosen token is right, by the probability P_k/ΣP that it was given."""
    count, stated, right = metrics.calibration_bins(result.confidence, result.correct)
    filled = count > 0
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="perfectly calibrated")
    sizes = 20 + 180 * count[filled] / count.max()
    axes.plot(stated[filled], right[filled], color=BLUE, linewidth=1)
    axes.scatter(
        stated[filled], right[filled], s=sizes, color=BLUE, alpha=0.8, label="tokens (area: how many)"
    )
    error = metrics.expected_calibration_error(result.confidence, result.correct)
    axes.set(
        xlabel="probability of the chosen token", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1.02)
    )
    axes.set_title(f"Calibration (ECE {error:.3f})")
    axes.legend(loc="upper left", frameon=False, fontsize=8)


def draw_errors(axes: Axes, result: Evaluation) -> None:
    """The share of numbers whose error is at most so large."""
    errors = (result.predicted - result.values).abs().clamp(max=LARGEST_DRAWN).sort().values
    shares = torch.arange(1, len(errors) + 1) / len(errors)
    middle, tail = metrics.quantile(errors, 0.5), metrics.quantile(errors, 0.9)
    axes.step(errors, shares, where="post", color=BLUE)
    axes.axvline(middle, color=ORANGE, linewidth=1, label=f"median {middle:.3g}")
    axes.axvline(tail, color=ORANGE, linewidth=1, linestyle=":", label=f"90% below {tail:.3g}")
    if errors[-1] > 50 * max(middle, 1e-12) and middle > 0:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set(xlabel="|prediction − number|", ylabel="share of numbers", ylim=(0, 1.02), title="Errors")
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def draw_coverage(axes: Axes, result: Evaluation) -> None:
    """The share of numbers inside their interval, by its nominal level."""
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="as stated")
    raw = [result.coverage(level, raw=True) for level in LEVELS]
    axes.plot(LEVELS, raw, color=ORANGE, linewidth=1.5, label="Cauchy law")
    if result.config.conformal_scores is not None:
        mapped = [result.coverage(level) for level in LEVELS]
        axes.plot(LEVELS, mapped, color=BLUE, linewidth=2, label="reported (conformal)")
        believed = [result.coverage(level, believed=True) for level in LEVELS]
        axes.plot(LEVELS, believed, color=BLUE, linewidth=1, linestyle=":", label="of believed labels")
    axes.set(xlabel="nominal level", ylabel="share of numbers inside", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title("Interval coverage")
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def draw_predictions(
    axes: Axes, values: Tensor, predicted: Tensor, lower: Tensor, upper: Tensor, level: float, unit: str = ""
) -> None:
    """Predictions with intervals against the truth; at most 300, evenly spread over the true values.

    Tensors are (M,): true numbers, point predictions, and the ends of the intervals of probability ``level``.
    """
    of_unit = f", {unit}" if unit else ""
    order = values.argsort()
    step = max(len(order) / MOST_POINTS, 1.0)
    shown = order[(torch.arange(min(len(order), MOST_POINTS)) * step).long()]
    truth = values[shown].clamp(-LARGEST_DRAWN, LARGEST_DRAWN)
    ends = [float(truth[0]), float(truth[-1])]
    span = max(ends[1] - ends[0], abs(ends[1]) * 1e-6, 1e-9)
    # What lies far outside of the picture need not be drawn to scale, and could not be where it overflows.
    far = (ends[0] - 100 * span, ends[1] + 100 * span)
    predicted, lower, upper = (column[shown].clamp(*far) for column in (predicted, lower, upper))
    inside = (lower <= truth) & (truth <= upper)
    for covered, color, name in ((inside, BLUE, "inside"), (~inside, ORANGE, "outside")):
        if covered.any():
            reach = torch.stack([predicted - lower, upper - predicted])[:, covered].clamp(min=0)
            axes.errorbar(
                truth[covered], predicted[covered], yerr=reach, fmt="o", markersize=3, color=color,
                ecolor=color, elinewidth=0.6, alpha=0.6, label=f"truth {name} the {level:.0%} interval",
            )  # fmt: skip
    axes.plot(ends, ends, color=GREY, linestyle="--", linewidth=1)
    if ends[0] > 0 and ends[1] > 30 * ends[0]:
        axes.set(xscale="log", yscale="log", ylim=(ends[0] / 10, ends[1] * 10))
    else:
        # A few wide intervals must not hide the rest.
        low, high = metrics.quantile(lower, 0.05), metrics.quantile(upper, 0.95)
        axes.set_ylim(max(min(low, ends[0]), ends[0] - 2 * span), min(max(high, ends[1]), ends[1] + 2 * span))
    axes.set(xlabel=f"truth{of_unit}", ylabel=f"prediction{of_unit}", title="Predictions")
    axes.legend(loc="upper left", frameon=False, fontsize=8)
