"""The pictures of the report, each a PNG in memory. Nothing here computes what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from causal_qwen.figures import BLUE, GREY, ORANGE, new_figure, png

__all__ = ["broken_labels", "loss_curve"]

DPI = 130


def loss_curve(points: Sequence[tuple[float, float]], *, window: int = 5) -> bytes:
    """The number loss of each step, and its mean over the last few."""
    figure, (axes,) = new_figure((7.0, 3.2))
    steps, losses = zip(*points, strict=True)
    recent = [losses[max(end - window, 0) : end] for end in range(1, len(losses) + 1)]
    axes.plot(steps, losses, "o", ms=4, color=BLUE, alpha=0.4, label="one batch")
    means = [sum(some) / len(some) for some in recent]
    axes.plot(steps, means, color=BLUE, lw=2, label=f"mean of the last {window}")
    axes.set(xlabel="step", ylabel="number loss, nats")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return png(figure, dpi=DPI)


def broken_labels(truth: Tensor, predictions: Mapping[str, tuple[Tensor, Tensor]], *, unit: str) -> bytes:
    """Who predicts what for the same rows: one panel per predictor, learned from clean and broken labels.

    Args:
        truth: (n,).
        predictions: Of each predictor, (n,) from clean labels and (n,) from broken ones.
        unit: Of the numbers.
    """
    figure, panels = new_figure((8.4, 3.9), 1, len(predictions))
    ends = [float(truth.min()), float(truth.max())]
    everything = [column for pair in predictions.values() for column in pair] + [truth]
    low, high = (extreme(float(extreme(column)) for column in everything) for extreme in (min, max))
    for axes, (name, (clean, broken)) in zip(panels, predictions.items(), strict=True):
        axes.plot(ends, ends, color=GREY, linestyle="--", linewidth=1)
        axes.plot(truth, clean, "o", ms=4, color=BLUE, alpha=0.7, label="clean labels")
        axes.plot(truth, broken, "^", ms=4, color=ORANGE, alpha=0.7, label="a fifth of them broken")
        axes.set(title=name, xlabel=f"truth, {unit}", ylim=(low - 3, high + 3))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"prediction, {unit}")
    panels[0].legend(loc="upper left", frameon=False, fontsize=9)
    return png(figure, dpi=DPI)
