"""What an input came to: a result, a clear error of ours, or a failure."""

import contextlib
import dis
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from huggingface_hub.errors import StrictDataclassError

import causal_qwen
from fuzzing.target import Target

__all__ = ["Counts", "Hang", "is_ours", "judge"]

SOURCES = Path(causal_qwen.__file__).parents[1]
# What this library declares that it raises.
DECLARED = (ValueError, TypeError, OSError)
RAISE = dis.opmap["RAISE_VARARGS"]
SHORTEST_MESSAGE = 8
LONGEST_MESSAGE = 1000  # of one line


class Hang(BaseException):
    """An input took too long. No `except Exception` of a library can swallow it."""


def is_ours(error: BaseException) -> bool:
    """Whether an error is one that a user may see: a `raise` of this library with something to read.

    What `strict` says of a field of our configurations and recipes is ours too: it names field and value. An
    error from below (json, yaml, arrow, jinja, torch, an int() or a list of our own) is not: nobody has said
    what it means for the file at hand.
    """
    message = str(error)
    if isinstance(error, StrictDataclassError):
        return True
    if "\n" in message or " " not in message or not SHORTEST_MESSAGE <= len(message) <= LONGEST_MESSAGE:
        return False
    innermost = _innermost(error.__traceback__)
    if not isinstance(error, DECLARED) or innermost is None:
        return False
    code = innermost.tb_frame.f_code
    return SOURCES in Path(code.co_filename).parents and code.co_code[innermost.tb_lasti] == RAISE


def _innermost(entry: TracebackType | None) -> TracebackType | None:
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise `Hang` in what takes longer."""

    def ring(signal_number: int, frame: FrameType | None) -> None:
        raise Hang(f"took more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(target: Target, data: bytes) -> tuple[str, str]:
    """("result" | "error" | "failure", what was said) of one input."""
    try:
        with limit(target.seconds):
            target.check(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Rust's panics are no Exception
        if is_ours(error):
            return "error", str(error)
        return "failure", _told(error)
    return "result", ""


def _told(error: BaseException) -> str:
    """Type, message and the innermost places of an error; the last line is where it came out of our code."""
    entries = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(entry.filename).name}:{entry.lineno} {entry.name}" for entry in entries]
    return f"{type(error).__name__}: {str(error)[:300]} ({' < '.join(places[::-1][:5])})"


@dataclass
class Counts:
    """What the inputs of one target came to.

    Args:
        inputs: All of them.
        results: Those with a result.
        errors: Those that were refused by a clear error.
        failures: The rest, (input, what was said).
        seconds: Time of all, in the processes that ran them.
    """

    inputs: int = 0
    results: int = 0
    errors: int = 0
    failures: list[tuple[bytes, str]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, verdict: str, data: bytes, said: str) -> None:
        """Count one."""
        self.inputs += 1
        self.results += verdict == "result"
        self.errors += verdict == "error"
        if verdict == "failure":
            self.failures.append((data, said))

    def __iadd__(self, other: "Counts") -> "Counts":
        self.inputs += other.inputs
        self.results += other.results
        self.errors += other.errors
        self.failures += other.failures
        self.seconds += other.seconds
        return self

    def figures(self) -> dict[str, Any]:
        """As they are published."""
        return {
            "inputs": self.inputs,
            "results": self.results,
            "errors": self.errors,
            "failures": len(self.failures),
            "seconds": self.seconds,
        }
