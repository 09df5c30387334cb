"""One picture of a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from causal_qwen.figures import BLUE, GREY, ORANGE, new_figure, png
from causal_qwen.simulation.experiments import Convergence, Robustness, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_simulation"]


def draw_simulation(simulation: Simulation, path: Path) -> None:
    """Classification, gate and regression over the steps, and errors by the share of outliers, as a PNG.

    Raises:
        ValueError: If matplotlib is not installed, or the file is no .png.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; the picture is a .png")
    figure, panels = new_figure((10, 7), 2, 2)
    for axes, draw in zip(panels, (_classification, _gate, _regression), strict=False):
        draw(axes, simulation.convergence)
    _outliers(panels[3], simulation.robustness)
    path.write_bytes(png(figure))


def _classification(axes: Axes, curves: Convergence) -> None:
    axes.plot(curves.steps, curves.accuracy, color=BLUE, label="One-vs-Rest choice")
    _best(axes, curves.best_accuracy)
    axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1), title="Classification")
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def _gate(axes: Axes, curves: Convergence) -> None:
    axes.plot(curves.steps, curves.prob_num_at_numbers, color=BLUE, label="where a number comes")
    axes.plot(curves.steps, curves.prob_num_elsewhere, color=ORANGE, label="elsewhere")
    axes.set(xlabel="step", ylabel="median of P(<NUM>)", ylim=(0, 1), title="Gate")
    axes.legend(loc="center right", frameon=False, fontsize=8)


def _regression(axes: Axes, curves: Convergence) -> None:
    axes.plot(curves.steps, curves.number_error, color=BLUE, label="Cauchy head")
    _best(axes, curves.best_number_error)
    axes.set(xlabel="step", ylabel="median |error|", yscale="log", title="Regression")
    axes.legend(loc="upper right", frameon=False, fontsize=8)


def _outliers(axes: Axes, errors: Robustness) -> None:
    shares = [100 * share for share in errors.shares]
    axes.plot(shares, errors.squared, color=ORANGE, marker="o", label="squared error")
    axes.plot(shares, errors.cauchy, color=BLUE, marker="o", label="Cauchy")
    axes.set(xlabel="outliers in training (%)", ylabel="median |error| on clean numbers", yscale="log")
    axes.set_title("Outliers")
    axes.legend(loc="center right", frameon=False, fontsize=8)


def _best(axes: Axes, level: float) -> None:
    axes.axhline(level, color=GREY, linestyle="--", linewidth=1, label="whoever knows the structure")
