"""Figures of matplotlib, as PNG in memory: without pyplot, so that nothing global changes.

It does not know what is drawn.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BLUE", "GREY", "ORANGE", "new_figure", "png"]

BLUE, ORANGE, GREY = "#2166ac", "#d6604d", "#777777"


def new_figure(
    size: tuple[float, float], rows: int = 1, columns: int = 1, *, sharex: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of ``size`` inches and its panels, row by row.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install 'causal-qwen[train]'") from None
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=sharex).flat)


def png(figure: Figure, *, dpi: int = 110) -> bytes:
    """The figure as a file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi)
    return stream.getvalue()
