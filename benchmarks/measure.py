"""How the benchmarks measure: a child process per memory figure, interleaved repeats, ratios within one run.

Peak memory is the resident set of a child process beyond what it held with its inputs in place, so that
nothing another variant allocated can count. Times are compared round by round: a machine that slows down
slows all variants.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

PAGE = os.sysconf("SC_PAGE_SIZE")


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleaved(
    variants: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """Times of each variant, all of them once per round."""
    if warm_up:
        for run in variants.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in progress(range(repeats), "rounds"):
        for name, run in variants.items():
            times[name].append(seconds(run))
    return times


def ratio(times: Mapping[str, Sequence[float]], variant: str, baseline: str) -> float:
    """The median over rounds of time over the baseline's time in the same round."""
    return statistics.median(
        ours / plain for ours, plain in zip(times[variant], times[baseline], strict=True)
    )


def best_ratio(times: Mapping[str, Sequence[float]], variant: str, baseline: str) -> float:
    """Best time over the baseline's best time: for differences that are smaller than what a round varies."""
    return min(times[variant]) / min(times[baseline])


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def peak_beyond(run: Callable[[], object]) -> dict[str, float]:
    """{"seconds", "bytes"} of one call: its time, and its peak of memory beyond what was resident before."""
    # What loading and compiling left behind is given back, and their peak forgotten.
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    elapsed = seconds(run)
    # Not ru_maxrss: a child process inherits the peak of the process that started it.
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return {"seconds": elapsed, "bytes": float(max(peak - before, 0))}


def available() -> int:
    """Bytes that can be allocated without pushing anything out of memory."""
    return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024


def in_child(script: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """What ``script --child task`` prints, as JSON; {"error": ...} if it fails."""
    command = [sys.executable, script, "--child", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": "out of memory" if done.returncode == -9 else lines[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def progress(items: Sequence[Any] | range, description: str) -> Any:
    """The items, with a bar where somebody watches."""
    console = Console(stderr=True)
    return track(items, description, console=console, disable=not console.is_terminal, transient=True)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
