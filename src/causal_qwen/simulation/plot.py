"""One picture of a simulation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from causal_qwen.simulation.experiments import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_simulation"]

BLUE, ORANGE, GREY = "#2166ac", "#d6604d", "#777777"


def draw_simulation(found: Simulation, path: Path) -> None:
    """Classification, gate and regression over the steps, and errors by the share of outliers, as a PNG.

    Raises:
        ValueError: If matplotlib is not installed, or the file is no .png.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; the picture is a .png")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install 'causal-qwen[train]'") from None
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(2, 2)
    _classification(panels[0, 0], found)
    _gate(panels[0, 1], found)
    _regression(panels[1, 0], found)
    _outliers(panels[1, 1], found)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        figure.savefig(temporary, format="png", dpi=110)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _classification(axes: Axes, found: Simulation) -> None:
    seen = found.convergence
    axes.plot(seen.steps, seen.accuracy, color=BLUE, label="One-vs-Rest choice")
    axes.axhline(
        seen.best_accuracy, color=GREY, linestyle="--", linewidth=1, label="whoever knows the structure"
    )
    axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1), title="Classification")
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def _gate(axes: Axes, found: Simulation) -> None:
    seen = found.convergence
    axes.plot(seen.steps, seen.prob_num_at_numbers, color=BLUE, label="where a number comes")
    axes.plot(seen.steps, seen.prob_num_elsewhere, color=ORANGE, label="elsewhere")
    axes.set(xlabel="step", ylabel="median of P(<NUM>)", ylim=(0, 1), title="Gate")
    axes.legend(loc="center right", frameon=False, fontsize=8)


def _regression(axes: Axes, found: Simulation) -> None:
    seen = found.convergence
    axes.plot(seen.steps, seen.number_error, color=BLUE, label="Cauchy head")
    axes.axhline(
        seen.best_number_error, color=GREY, linestyle="--", linewidth=1, label="whoever knows the structure"
    )
    axes.set(xlabel="step", ylabel="median |error|", yscale="log", title="Regression")
    axes.legend(loc="upper right", frameon=False, fontsize=8)


def _outliers(axes: Axes, found: Simulation) -> None:
    seen = found.robustness
    shares = [100 * share for share in seen.shares]
    axes.plot(shares, seen.squared, color=ORANGE, marker="o", label="squared error")
    axes.plot(shares, seen.cauchy, color=BLUE, marker="o", label="Cauchy")
    axes.set(xlabel="outliers in training (%)", ylabel="median |error| on clean numbers", yscale="log")
    axes.set_title("Outliers")
    axes.legend(loc="center right", frameon=False, fontsize=8)
