"""What the commands print with: JSON, tables, errors, and silence."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from contextvars import ContextVar
from typing import Any, NoReturn, TextIO

__all__ = [
    "cell_text",
    "complain",
    "fail",
    "note",
    "print_json",
    "print_table",
    "quiet_libraries",
    "silent_stderr",
]

# Where errors go while standard error is silent.
_ERRORS: ContextVar[TextIO | None] = ContextVar("errors", default=None)


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

    table = Table(box=SIMPLE_HEAD, show_header=header is not None)
    cells = [[cell_text(value) for value in row] for row in rows]
    for index in range(len(cells[0])):
        table.add_column(header[index] if header else "", style="cyan" if index == 0 else "", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))  # a file name may look like markup
    console = Console(highlight=False)
    console.print(Text(title, style="bold"))  # not the table's own, which is folded to the table's width
    console.print(table)


def note(message: str) -> None:
    """A line about progress, on standard error so that standard output stays clean."""
    print(message, file=sys.stderr, flush=True)


def fail(message: str, *, code: int = 1) -> NoReturn:
    """Say what is wrong on standard error and leave."""
    complain(message)
    raise SystemExit(code)


def complain(message: object) -> None:
    """Say what is wrong on standard error, which --quiet does not silence, and go on."""
    print(f"error: {message}", file=_ERRORS.get() or sys.stderr, flush=True)


def quiet_libraries() -> None:
    """No library chatter; progress bars only where a person is looking."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported, which transformers does
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Nothing but `complain` reaches standard error, be it from us, from a library or from compiled code."""
    stream = sys.stderr
    stream.flush()
    before = os.dup(2)
    with open(before, "w", encoding="utf-8") as errors, open(os.devnull, "w", encoding="utf-8") as void:
        _ERRORS.set(errors if _is_descriptor_2(stream) else stream)
        os.dup2(void.fileno(), 2)
        try:
            with redirect_stderr(void):
                yield
        finally:
            os.dup2(before, 2)
            _ERRORS.set(None)


def _is_descriptor_2(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 2
    except OSError:  # a stream in memory
        return False
