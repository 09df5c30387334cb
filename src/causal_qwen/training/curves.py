"""Curves: the records of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_curves"]


def draw_curves(records: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw losses, gradient norm and evaluation over steps; False if there is nothing to draw."""
    panels = {
        "loss": ("train/total_loss", "train/cls_loss_mean", "train/reg_loss_effective", "eval/total_loss"),
        "gradient norm": ("train/grad_norm",),
        "numbers": ("eval/num_f1", "eval/coverage_50", "eval/coverage_90"),
        "median absolute error": ("eval/reg_mdae",),
    }
    curves = {
        title: {name: points for name in names if (points := _points(records, name))}
        for title, names in panels.items()
    }
    curves = {title: lines for title, lines in curves.items() if lines}
    if not curves:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(curves), 4), layout="constrained")
    for axis, (title, lines) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 20 else None)
        axis.set(title=title, xlabel="step")
        axis.legend()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=100)
    partial.replace(path)
    return True


def _points(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]
