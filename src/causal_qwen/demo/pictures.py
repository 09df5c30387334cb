"""The pictures of the report, each a PNG in memory. Nothing here computes what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from causal_qwen.figures import new_figure, png

__all__ = ["cause_along_text", "loss_curve"]

Array = npt.NDArray[np.float64]
DPI = 130


def loss_curve(records: Sequence[Mapping[str, float]]) -> bytes:
    """The two parts of the training loss against steps, each on its own axis."""
    names = {"train/cls_loss_mean": "One-vs-Rest loss", "train/reg_loss_effective": "number loss"}
    figure, panels = new_figure((8.4, 3.0), 1, len(names))
    for axes, (name, label), colour in zip(panels, names.items(), ("tab:blue", "tab:orange"), strict=True):
        points = [(record["step"], record[name]) for record in records if name in record]
        axes.plot(*zip(*points, strict=True), color=colour)
        axes.set(xlabel="step", title=label)
        axes.grid(alpha=0.3)
    return png(figure, dpi=DPI)


def cause_along_text(tokens: Sequence[str], loc_U: Array, scale_U: Array, *, dimensions: int = 2) -> bytes:
    """The dimensions of U that move most along the text, and how wide U is.

    Args:
        tokens: T texts.
        loc_U: (T, D).
        scale_U: (T, D); loc ± scale are the quartiles of a Cauchy.
        dimensions: How many are drawn.
    """
    moves = np.subtract(*np.percentile(loc_U, [75, 25], axis=0)) / np.median(scale_U, axis=0)  # (D,)
    chosen = np.argsort(-moves)[:dimensions]
    size = max(7.0, 0.28 * len(tokens)), 1.5 * dimensions + 2.7
    figure, panels = new_figure(size, dimensions + 1, sharex=True)
    positions = np.arange(len(tokens))
    for axes, j in zip(panels[:-1], chosen, strict=True):
        loc, scale = loc_U[:, j], scale_U[:, j]
        axes.fill_between(positions, loc - scale, loc + scale, color="tab:blue", alpha=0.25, lw=0)
        axes.plot(positions, loc, "o-", ms=3, lw=1, color="tab:blue")
        axes.set_ylabel(f"U[{j}]")
    lower, middle, upper = np.percentile(scale_U, [25, 50, 75], axis=1)  # (T,) each
    panels[-1].fill_between(positions, lower, upper, color="tab:green", alpha=0.25, lw=0)
    panels[-1].plot(positions, middle, "o-", ms=3, lw=1, color="tab:green")
    panels[-1].set(ylabel="scale of U", yscale="log")
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[-1].set_xticks(positions, [token.strip() or "␣" for token in tokens], rotation=90, fontsize=8)
    return png(figure, dpi=DPI)
