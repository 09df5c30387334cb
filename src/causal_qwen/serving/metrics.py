"""Counts and times of a server, as Prometheus reads them."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Mapping

__all__ = ["Counter", "Histogram", "Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
PREFIX = "causal_qwen_"


class Counter:
    """Something that only grows, by labels."""

    def __init__(self, name: str, meaning: str) -> None:
        self.name, self.meaning = name, meaning
        self._counts: dict[tuple[tuple[str, str], ...], int] = {}
        self._lock = threading.Lock()

    def add(self, count: int = 1, **labels: str) -> None:
        """Count some more."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + count

    def value(self, **labels: str) -> int:
        """How many there have been."""
        return self._counts.get(tuple(sorted(labels.items())), 0)

    def lines(self) -> list[str]:
        """As Prometheus reads it."""
        with self._lock:
            counts = dict(self._counts) or {(): 0}
        rows = [f"{PREFIX}{self.name}{_labels(dict(key))} {count}" for key, count in sorted(counts.items())]
        return [*_head(self.name, self.meaning, "counter"), *rows]


class Histogram:
    """How long something takes, in seconds."""

    def __init__(self, name: str, meaning: str) -> None:
        self.name, self.meaning = name, meaning
        self._counts, self._sum = [0] * (len(SECONDS) + 1), 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        """It took so long once."""
        with self._lock:
            self._counts[bisect.bisect_left(SECONDS, seconds)] += 1
            self._sum += seconds

    def lines(self) -> list[str]:
        """As Prometheus reads it."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        rows, below = [], 0
        for bound, count in zip([*map(str, SECONDS), "+Inf"], counts, strict=True):
            below += count
            rows.append(f"{PREFIX}{self.name}_bucket{_labels({'le': bound})} {below}")
        rows += [f"{PREFIX}{self.name}_sum {total:.6f}", f"{PREFIX}{self.name}_count {below}"]
        return [*_head(self.name, self.meaning, "histogram"), *rows]


class Metrics:
    """What a server counts."""

    def __init__(self) -> None:
        self.requests = Counter("requests_total", "Requests, by path and status.")
        self.tokens = Counter("tokens_total", "Tokens of prompts, and generated ones.")
        self.reused = Counter("reused_tokens_total", "Tokens of prompts that were not read again.")
        self.rejected = Counter("rejected_total", "Requests that found the queue full.")
        self.disconnected = Counter("disconnected_total", "Texts whose client went away.")
        self.steps = Counter("steps_total", "Steps of the decoder.")
        self.first_token = Histogram("first_token_seconds", "From a request to its first token.")
        self.request = Histogram("request_seconds", "From a request to its last token.")
        self.step = Histogram("step_seconds", "One step of the decoder.")

    def text(self, gauges: Mapping[str, Callable[[], int]]) -> str:
        """All of it, and some figures of now."""
        lines = []
        for name, value in gauges.items():
            lines += [*_head(name, f"Texts that are {name}.", "gauge"), f"{PREFIX}{name} {value()}"]
        for metric in vars(self).values():
            lines += metric.lines()
        return "\n".join(lines) + "\n"


def _head(name: str, meaning: str, kind: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {meaning}", f"# TYPE {PREFIX}{name} {kind}"]


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return f"{{{inside}}}" if inside else ""
