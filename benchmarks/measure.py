"""What every benchmark shares: its command line, how it measures, and the file that it publishes.

Peak memory is the resident set of a child process beyond what it held with its inputs in place, so that
nothing another variant allocated can count. Times are compared round by round: a machine that slows down
slows all variants. This module does not know what is measured, nor how a page shows it (`render`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib.metadata
import json
import os
import pydoc_data.topics
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box, console, progress, table

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "assets"
SECONDS_BETWEEN_LINES = 10.0  # off a terminal
DIGITS = 5  # significant digits of a published figure
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


# The command line -------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """An option that says what, or how much, is measured.

    Args:
        help: What it says.
        full: Its value when nothing is said. A tuple is an option with several values.
        smoke: Its value in the tests, which want to see that everything runs.
        quick: Its value with ``--quick``; None is the full one.
    """

    help: str
    full: Any
    smoke: Any
    quick: Any = None


BASE = Option("embedded base, directory or hub id", "smollm2", smoke="smollm2")


class Table(NamedTuple):
    """A title, the names of the columns, and rows of text; the first column is what a row is about."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def run_benchmark(
    script: str,
    documentation: str | None,
    options: Mapping[str, Option],
    figures: Callable[[argparse.Namespace], dict[str, Any]],
    tables: Callable[[Record], Iterable[Table]],
    *,
    quick: str,
    argv: Sequence[str] | None = None,
    child: Callable[..., Mapping[str, Any]] | None = None,
    picture: Callable[[Record, Path], None] | None = None,
) -> None:
    """Measure, print tables or JSON, and with ``--save`` write the file that is published.

    Args:
        script: Path of the benchmark.
        documentation: Its docstring.
        options: By name.
        figures: Measures, by arguments that hold the options and ``quick``.
        tables: Shows what was measured.
        quick: What ``--quick`` leaves out.
        argv: The command line, or the process's own.
        child: Measures one task of `in_child`.
        picture: Draws what was measured into a file.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    stem = Path(script).stem
    parser = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/{stem}[.quick].json")
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    if child is not None:
        parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    if picture is not None:
        parser.add_argument("--plot", type=Path, help=f"picture to write; {stem}.png with --save")
    for name, option in options.items():
        several = isinstance(option.full, tuple)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(option.full[0] if several else option.full),
            nargs="+" if several else None,
            help=f"{option.help} ({option.full})",
        )
    arguments = parser.parse_args(words)
    if child is not None and arguments.child is not None:
        print(json.dumps(child(**arguments.child)))
        return
    for name, option in options.items():
        if getattr(arguments, name) is None:
            preset = option.quick if arguments.quick and option.quick is not None else option.full
            setattr(arguments, name, option.smoke if arguments.smoke else preset)
    measured = figures(arguments)
    record = Record(
        name=f"{stem}.quick" if arguments.quick else stem,
        command=shlex.join(["python", f"benchmarks/{stem}.py", *_published(words)]),
        machine=machine(),
        options=rounded({name: getattr(arguments, name) for name in options}),
        figures=rounded(measured),
    )
    if arguments.json:
        print(json.dumps(measured, ensure_ascii=False))
    else:
        for shown in tables(record):
            show(shown)
    if arguments.save:
        record.save()
    if picture is not None and (arguments.plot or (arguments.save and not arguments.quick)):
        picture(record, arguments.plot or PICTURES / f"{stem}.png")


def _published(words: Sequence[str]) -> list[str]:
    """The command line without what only says where the figures go."""
    return [word for word in words if word not in ("--save", "--json")]


def show(shown: Table) -> None:
    """A table on standard output."""
    drawn = table.Table(title=shown.title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(shown.columns):
        drawn.add_column(column, justify="left" if index == 0 else "right")
    for row in shown.rows:
        drawn.add_row(*row)
    console.Console().print(drawn)


def watched(items: Sequence[Any] | range, description: str) -> Iterator[Any]:
    """The items, with a bar where somebody watches, and else with a line every ten seconds."""
    screen = console.Console(stderr=True)
    if screen.is_terminal:
        yield from progress.track(items, description, console=screen, transient=True)
        return
    told = time.monotonic()
    for index, item in enumerate(items):
        if time.monotonic() - told >= SECONDS_BETWEEN_LINES:
            print(f"{description}: {index} of {len(items)}", file=sys.stderr, flush=True)
            told = time.monotonic()
        yield item


# What is published ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One run of a benchmark, as its file holds it.

    Args:
        name: Of the file: the script's, with ".quick" for a quick run, which never replaces a full one.
        command: What a user types to measure it again.
        machine: Where it was measured.
        options: How much was measured, and of what.
        figures: What was measured.
    """

    name: str
    command: str
    machine: dict[str, Any]
    options: dict[str, Any]
    figures: dict[str, Any]

    @classmethod
    def load(cls, name: str) -> Record:
        """The published record of this name.

        Raises:
            FileNotFoundError: If nobody has saved it; the message says how to.
        """
        file = RESULTS / f"{name}.json"
        if not file.is_file():
            script, _, quick = name.partition(".")
            command = f"python benchmarks/{script}.py{' --quick' if quick else ''} --save"
            raise FileNotFoundError(f"{RESULTS.name}/{file.name} does not exist: `{command}` measures it")
        return cls(name, **json.loads(file.read_text(encoding="utf-8")))

    def save(self) -> None:
        """Write the file, whole or not at all."""
        fields = dataclasses.asdict(self)
        del fields["name"]
        text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        RESULTS.mkdir(exist_ok=True)
        part = RESULTS / f"{self.name}.json.{os.getpid()}"
        part.write_text(f"{text}\n", encoding="utf-8")
        part.replace(RESULTS / f"{self.name}.json")


def rounded(value: Any) -> Any:
    """As JSON reads it back, every float with five significant digits, so that differences can be read."""
    if isinstance(value, Mapping):
        return {str(name): rounded(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def machine() -> dict[str, Any]:
    """What times and memory depend on, without anything that names this machine."""
    memory = int(Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0]) * 1024
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    vectors = torch.backends.cpu.get_cpu_capability()
    return {"cores": os.cpu_count(), "memory_gb": round(memory / 1e9), "vectors": vectors, **versions}


# Texts and times --------------------------------------------------------------------------------------------


@functools.cache
def python_manual() -> str:
    """The manual that ships with Python, in an order that is always the same: text for every machine."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """No collection walks over what exists now, such as vocabularies and modules."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def interleaved(
    variants: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """Times of each variant, all of them once per round."""
    if warm_up:
        for call in variants.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in watched(range(repeats), "rounds"):
        for name, call in variants.items():
            times[name].append(seconds(call))
    return times


def ratio(times: Mapping[str, Sequence[float]], variant: str, baseline: str) -> float:
    """The median over rounds of a time (or a rate) over the baseline's in the same round."""
    return statistics.median(
        ours / plain for ours, plain in zip(times[variant], times[baseline], strict=True)
    )


def best_ratio(times: Mapping[str, Sequence[float]], variant: str, baseline: str) -> float:
    """Best time over the baseline's best time: for differences that are smaller than what a round varies."""
    return min(times[variant]) / min(times[baseline])


# Memory -----------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def peak_beyond(call: Callable[[], object]) -> dict[str, float]:
    """{"seconds", "bytes"} of one call: its time, and its peak of memory beyond what was resident before."""
    # What loading and compiling left behind is given back, and their peak forgotten.
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    elapsed = seconds(call)
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
