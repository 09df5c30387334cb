"""Progress without printing: long work says how far it is, and whoever asked for it decides what is shown.

A *watch* is told the name of a phase and the amount of work in it, and hands back how to advance it:

    with watch("reading", total) as advance:
        for part in parts:
            ...
            advance(len(part))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

__all__ = ["Advance", "Watch", "unwatched"]

Advance = Callable[[int], None]
Watch = Callable[[str, int], AbstractContextManager[Advance]]


@contextmanager
def unwatched(phase: str, total: int) -> Iterator[Advance]:
    """Nobody looks."""
    yield lambda amount: None
