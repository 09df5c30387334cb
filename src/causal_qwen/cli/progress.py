"""Bars for long work: one per phase, where somebody watches; off a terminal, a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from causal_qwen.cli.console import note
from causal_qwen.progress import Advance

__all__ = ["bar", "counted"]

SECONDS_BETWEEN_LINES = 10.0
Item = TypeVar("Item")


@contextmanager
def bar(phase: str, total: int) -> Iterator[Advance]:
    """Shows how far a phase is and how long it will take, on standard error, which ``--quiet`` silences."""
    with _drawn(phase, total) if sys.stderr.isatty() else _told(phase, total) as advance:
        yield advance


@contextmanager
def _drawn(phase: str, total: int) -> Iterator[Advance]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(phase, total=total)
        yield lambda amount: shown.advance(task, amount)


@contextmanager
def _told(phase: str, total: int) -> Iterator[Advance]:
    start = last = time.monotonic()
    done = 0

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES and done < total:
            last = now
            left = (now - start) * (total - done) / done
            note(f"{phase}: {done / total:.0%}, about {left:.0f} seconds left")

    yield advance


def counted(
    items: Iterable[Item], phase: str, units: str, *, total: int | None = None, done: int = 0
) -> Iterator[Item]:
    """Hands items on and shows how many there were, as `bar` does; their number may be unknown.

    Args:
        items: Made one by one.
        phase: What is being done.
        units: What several items are called.
        total: How many there will be, with those that were there before.
        done: How many were there before.
    """
    from tqdm import tqdm

    last = time.monotonic()
    of_all = "" if total is None else f" of {total}"
    for count, item in enumerate(
        tqdm(items, desc=phase, unit=f" {units}", total=total, initial=done, disable=None), start=done + 1
    ):
        yield item
        now = time.monotonic()
        if not sys.stderr.isatty() and now - last >= SECONDS_BETWEEN_LINES:
            last = now
            note(f"{phase}: {count}{of_all} {units}")
