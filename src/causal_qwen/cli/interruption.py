"""Being interrupted: everything is cleaned up, a line says what is kept, and the exit code names the signal.

Ctrl-C is Python's KeyboardInterrupt, which unwinds every `with` and `finally`; the signals that end a process
from outside do the same here.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

__all__ = [
    "INTERRUPTED",
    "Terminated",
    "kept_by_training",
    "on_interruption",
    "signals_unwind",
    "what_is_kept",
]

SIGNALS = [signal.SIGTERM, signal.SIGHUP]
# Exit codes of a command that a signal ended; typer ends with the first on Ctrl-C.
INTERRUPTED = {128 + number for number in (signal.SIGINT, *SIGNALS)}

_KEPT: ContextVar[Callable[[], str]] = ContextVar("kept")


class Terminated(SystemExit):
    """A signal asked the command to end."""


@contextmanager
def signals_unwind() -> Iterator[None]:
    """Signals that end a process raise `Terminated` instead, once: clean-up runs, and nothing disturbs it."""

    def end(number: int, frame: FrameType | None) -> None:
        for other in (*SIGNALS, signal.SIGINT):
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(128 + number)

    # Under nohup, SIGHUP is ignored and stays so.
    before = {
        number: signal.signal(number, end)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    _KEPT.set(lambda: "nothing is kept")
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_interruption(kept: Callable[[], str]) -> None:
    """Let ``kept`` say, when the command is interrupted, what is kept then and how to go on."""
    _KEPT.set(kept)


def what_is_kept() -> str:
    """What the verb that was interrupted keeps."""
    return _KEPT.get()()


def kept_by_training(output: Path) -> str:
    """The last checkpoint of a run, and the command that goes on from there."""
    from causal_qwen.training.checkpoints import last_checkpoint

    workspace = output.with_name(output.name + ".run")
    checkpoint = last_checkpoint(workspace / "checkpoints")
    if checkpoint is None:
        return "nothing is kept, there was no checkpoint yet (save_steps)"
    arguments = [*sys.argv[1:], *(["--resume"] if "--resume" not in sys.argv else [])]
    # Set by torchrun and accelerate launch.
    together = " in all processes" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    return f"{checkpoint} is kept; go on{together} with: {shlex.join(['causal-qwen', *arguments])}"
