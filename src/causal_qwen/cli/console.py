"""What the commands print with: JSON, tables, errors, and quiet libraries."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

__all__ = ["QUIET", "cell_text", "fail", "note", "print_json", "print_table", "quiet_libraries"]

# Whether --quiet was given.
QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


def print_json(value: Any) -> None:
    """One JSON object on standard output, and nothing else."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def cell_text(value: object) -> str:
    """A figure with six digits, exact zeros and ones as they are; anything else as it says."""
    return f"{value:.6g}" if isinstance(value, float) and value not in (0.0, 1.0) else str(value)


def print_table(
    title: str, rows: Iterable[Sequence[object]], *, header: tuple[str, ...] | None = None
) -> None:
    """A table on standard output, of rows of the same length; the last column may be long."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_header=header is not None,
    )
    cells = [[cell_text(value) for value in row] for row in rows]
    for index in range(len(cells[0])):
        table.add_column(header[index] if header else "", style="cyan" if index == 0 else "", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))  # a file name may look like markup
    Console(highlight=False).print(table)


def note(message: str) -> None:
    """A line about progress, on standard error so that standard output stays clean."""
    if not QUIET.get():
        print(message, file=sys.stderr)


def fail(message: str, *, code: int = 1) -> NoReturn:
    """Say what is wrong on standard error and leave."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def quiet_libraries() -> None:
    """No library chatter; progress bars only where a person is looking."""
    if QUIET.get() or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported, which transformers does
    from transformers.utils import logging

    logging.set_verbosity_error()
