"""Curves: the records of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from causal_qwen.figures import new_figure

__all__ = ["draw_curves"]

PANELS = {
    "loss": ("train/total_loss", "train/cls_loss_mean", "train/reg_loss_effective", "eval/total_loss"),
    "gradient norm": ("train/grad_norm",),
    "numbers": ("eval/num_f1", "eval/coverage_50", "eval/coverage_90"),
    "median absolute error": ("eval/reg_mdae",),
}


def draw_curves(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw losses, gradient norm and evaluation over steps, as far as they were recorded."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for title, names in PANELS.items():
        for name in names:
            points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
            if points:
                curves.setdefault(title, {})[name] = points
    if not curves:
        return
    figure, panels = new_figure((6 * len(curves), 4), 1, len(curves))
    for axes, (title, lines) in zip(panels, curves.items(), strict=True):
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 20 else None)
        axes.set(title=title, xlabel="step")
        axes.legend()
    figure.savefig(path, dpi=100)
