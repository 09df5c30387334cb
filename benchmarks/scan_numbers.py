"""How fast are numbers found in text, and does the time grow like the text?

Scans ordinary and adversarial texts of growing size and prints, for each, the CPU time, the throughput at the
largest size and the growth exponent: the slope of log time against log size, 1 is linear, 2 quadratic.

    python benchmarks/scan_numbers.py
    python benchmarks/scan_numbers.py --quick --json
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from causal_qwen.numbers import scan
from measure import Option, Record, Table, frozen, run_benchmark, watched

PROSE = "the model reads words, and it writes what it knows about every price of that long and quiet year."
SENTENCES = (
    "It sold {a} units at ${b} each, up {c}% from {d}. ",
    "The sample weighed {b}kg at {c} degrees, {a} times the limit of {d}. ",
    "2024年销量为{a}台，单价{b}元，同比-{c}%。",
)
ADVERSARIAL = {
    "digits": "7",
    "minus signs": "-",
    "commas": ",",
    "points": ".",
    '"1,"': "1,",
    '"1e"': "1e",
    '"1-"': "1-",
    '"1."': "1.",
    '"a1"': "a1",
    '"1,111-"': "1,111-",
    "full-width digits": "\uff17",
}


OPTIONS = {
    "sizes": Option("megabytes of each text", (1.0, 2.0, 4.0, 8.0), smoke=(0.01, 0.02), quick=(0.5, 1.0)),
    "repeat": Option("the best of so many runs counts", 3, smoke=1, quick=1),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table or one JSON object."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="half and one megabyte, once", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time, throughput and growth of every text."""
    sizes = sorted(set(arguments.sizes))
    if len(sizes) < 2 or sizes[0] <= 0 or arguments.repeat < 1:
        raise SystemExit(f"sizes are {sizes} and repeat {arguments.repeat}; growth needs two sizes and a run")
    with frozen():
        timings = {
            name: [best_time(make(round(size * 1e6)), arguments.repeat) for size in sizes]
            for name, make in watched(list(texts().items()), "texts")
        }
    cases = {}
    for name, runs in timings.items():
        seconds, count = [elapsed for elapsed, _ in runs], runs[-1][1]
        growth = slope(sizes, seconds)
        speed = sizes[-1] / seconds[-1]
        cases[name] = {"seconds": seconds, "mb_per_second": speed, "growth": growth, "numbers": count}
    return {"sizes_mb": sizes, "repeat": arguments.repeat, "cases": cases}


def tables(record: Record) -> list[Table]:
    """One row per text."""
    rows = [
        (
            name,
            *(f"{second:.4f} s" for second in case["seconds"]),
            f"{case['mb_per_second']:.1f}",
            f"{case['growth']:.2f}",
            f"{case['numbers']:,}",
        )
        for name, case in ((name, record.figures["cases"][name]) for name in texts())
    ]
    columns = ("text", *(f"{size:g} MB" for size in record.figures["sizes_mb"]), "MB/s", "growth", "numbers")
    return [Table("Finding numbers in text", columns, rows)]


def prose(draw: random.Random) -> str:
    """A line without a number."""
    return " ".join(draw.choices(PROSE.split(), k=16)) + "\n"


def sentences(draw: random.Random) -> str:
    """A sentence with three or four numbers."""
    return draw.choice(SENTENCES).format(
        a=draw.randrange(1, 10_000), b=round(draw.uniform(0, 500), 2), c=draw.randrange(100) / 10, d=1990
    )


def table(draw: random.Random) -> str:
    """A row of a table that is nothing but numbers."""
    return "".join(f"| {draw.gauss(0, 1000):,.2f} " for _ in range(6)) + "|\n"


def grow(line: Callable[[random.Random], str], size: int) -> str:
    """Lines up to a size in UTF-8 bytes."""
    draw = random.Random(0)
    lines, length = [], 0
    while length < size:
        lines.append(line(draw))
        length += len(lines[-1].encode())
    return "".join(lines)


def repeat_unit(unit: str, size: int) -> str:
    """A unit again and again, up to a size in UTF-8 bytes."""
    return unit * (size // len(unit.encode()))


def texts() -> dict[str, Callable[[int], str]]:
    """Name of a case → the text of a size in bytes."""
    ordinary = {"prose": prose, "numbers in sentences": sentences, "numbers in a table": table}
    return {
        **{name: functools.partial(grow, line) for name, line in ordinary.items()},
        **{name: functools.partial(repeat_unit, unit) for name, unit in ADVERSARIAL.items()},
    }


def best_time(text: str, repeat: int) -> tuple[float, int]:
    """The least CPU seconds that a scan took, and how many numbers there are."""
    best, count = math.inf, 0
    for _ in range(repeat):
        gc.collect()
        start = time.process_time()
        count = len(scan(text))
        best = min(best, time.process_time() - start)
    return best, count


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The growth exponent: least squares through (log size, log seconds)."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


if __name__ == "__main__":
    main()
