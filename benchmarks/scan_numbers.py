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
import json
import math
import random
import time
from collections.abc import Callable, Sequence

from causal_qwen.numbers import scan

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
    """Name of a case → the text of a given size in bytes."""
    ordinary = {"prose": prose, "numbers in sentences": sentences, "numbers in a table": table}
    return {
        **{name: functools.partial(grow, line) for name, line in ordinary.items()},
        **{name: functools.partial(repeat_unit, unit) for name, unit in ADVERSARIAL.items()},
    }


def best_time(text: str, repeat: int) -> tuple[float, int]:
    """The least CPU seconds that a scan took, and how many numbers it found."""
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


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[1, 2, 4, 8], metavar="MB", help="text sizes"
    )
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many runs counts")
    parser.add_argument("--quick", action="store_true", help="half and one megabyte, once")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sizes, arguments.repeat = [0.5, 1], 1
    sizes, repeat = sorted(set(arguments.sizes)), arguments.repeat
    if len(sizes) < 2 or sizes[0] <= 0 or repeat < 1:
        parser.error("growth needs at least two different positive sizes and one run")

    if not arguments.json:
        head = "".join(f"{f'{size:g} MB':>10}" for size in sizes)
        print(f"{'text':<22}{head}{'MB/s':>10}{'growth':>8}{'numbers':>10}")
    cases = {}
    for name, make in texts().items():
        runs = [best_time(make(round(size * 1e6)), repeat) for size in sizes]
        seconds, count = [run[0] for run in runs], runs[-1][1]
        speed, growth = sizes[-1] / seconds[-1], slope(sizes, seconds)
        cases[name] = {"seconds": seconds, "mb_per_second": speed, "growth": growth, "numbers": count}
        if not arguments.json:
            row = "".join(f"{f'{second:.4f} s':>10}" for second in seconds)
            print(f"{name:<22}{row}{speed:>10.1f}{growth:>8.2f}{count:>10}", flush=True)
    if arguments.json:
        print(json.dumps({"sizes_mb": sizes, "repeat": repeat, "cases": cases}))


if __name__ == "__main__":
    main()
