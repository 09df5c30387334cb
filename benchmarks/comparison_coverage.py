"""How often does the interval of a comparison hold a difference that is known?

Differences of pairs are drawn from light, heavy and skewed laws and from rare ones, and shifted by the true
difference. Asked is the 95% interval after few pairs, five or only two for each prompt, after many, and where
one looks before the end and stops once it excludes 0, or once it is narrow enough, too. Student's interval,
without what `statistics` does about skewness, stands beside.

    python benchmarks/comparison_coverage.py            # some minutes on one core
    python benchmarks/comparison_coverage.py --quick    # fewer simulations
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from causal_qwen.counterfactual.comparison.sequential import Design, Look, planned_looks
from causal_qwen.counterfactual.comparison.statistics import Interval, Mean, mean_difference
from measure import Option, Record, Table, run_benchmark, watched

# Mean 0 and a scale near 1.
LAWS: dict[str, Callable[[Any, tuple[int, int]], Any]] = {
    "normal": lambda draw, shape: draw.normal(size=shape),
    "Student, 3 degrees": lambda draw, shape: draw.standard_t(3, shape) / 1.7,
    "Student, 2 degrees": lambda draw, shape: draw.standard_t(2, shape) / 2.5,
    "exponential": lambda draw, shape: draw.exponential(size=shape) - 1,
    "log-normal": lambda draw, shape: (np.exp(draw.normal(size=shape)) - np.exp(0.5)) / 2.16,
    "log-normal, σ = 1.5": lambda draw, shape: (np.exp(1.5 * draw.normal(size=shape)) - np.exp(1.125)) / 8.97,
    "one in ten": lambda draw, shape: (draw.poisson(0.1, shape) - 0.1) / 0.316,
    "right or wrong": lambda draw, shape: (draw.choice([-1, 0, 1], shape, p=[0.03, 0.9, 0.07]) - 0.04) / 0.31,
    "one in fifty": lambda draw, shape: (draw.binomial(1, 0.02, shape) - 0.02) / 0.14,
}
# How far apart the scores of rare differences lie, which matters where none of them is seen.
SPANS = {"one in ten": 1 / 0.316, "right or wrong": 1 / 0.31, "one in fifty": 1 / 0.14}
FEW, TWO, MANY = (5, 10), (2, 25), (100, 10)  # individuals for each prompt, and prompts
LOOKS, SHIFTS, LEVEL, WIDTH = 5, (0.0, 0.1), 0.95, 0.25
COLUMNS = {
    "few": "50 pairs, 10 prompts",
    "two": "50 pairs, 25 prompts",
    "many": "1,000 pairs, 10 prompts",
    "looking": "the same, after looking",
    "narrow": f"… or once it is {WIDTH:g} wide",
}
OPTIONS = {"simulations": Option("of comparisons with a known difference", 2000, smoke=10, quick=200)}


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate and print."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="fewer simulations", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """By law and difference: the share of each interval that holds it, and when one stops."""
    draw, design = np.random.default_rng(0), Design(planned_looks(MANY[0], LOOKS), level=LEVEL)
    rows = {}
    for law, shift in watched([(law, shift) for law in LAWS for shift in SHIFTS], "laws"):
        hits, individuals = Counter[str](), 0
        for _ in range(arguments.simulations):
            few, two, many = (LAWS[law](draw, shape) + shift for shape in (FEW, TWO, MANY))
            for name, student in (("", False), ("_student", True)):
                span = SPANS.get(law, 0.0)
                look = stopped(design, many, span, student=student)
                intervals = {
                    "few": mean(few, span, student=student).interval(LEVEL),
                    "two": mean(two, span, student=student).interval(LEVEL),
                    "many": mean(many, span, student=student).interval(LEVEL),
                    "looking": look.interval,
                    "narrow": stopped(design, many, span, student=student, width=WIDTH).interval,
                }
                for column, interval in intervals.items():
                    hits[column + name] += holds(interval, shift)
                individuals += 0 if student else look.individuals
        shares = {column: share(hits[column], arguments.simulations) for column in sorted(hits)}
        stops = {"individuals": individuals / arguments.simulations}
        rows[f"{law}, {shift}"] = {"law": law, "difference": shift} | shares | stops
    return rows


def mean(values: Any, span: float, *, student: bool) -> Mean:
    """With prompts as strata; of Student alone, as if there were no skewness."""
    found = mean_difference(values, crossed=False, span=span)
    return found._replace(skewness=0.0) if student else found


def stopped(design: Design, values: Any, span: float, *, student: bool, width: float = 0.0) -> Look:
    """The look at which one stops: the first that is significant or narrow enough, or the last."""
    for index, count in enumerate(design.looks):
        look = design.look(index, mean(values[:count], span, student=student))
        if look.significant or look.repeated.upper - look.repeated.lower <= width:
            break
    return look


def holds(interval: Interval, value: float) -> bool:
    """Whether a value lies inside."""
    return interval.lower <= value <= interval.upper


def share(hits: int, count: int) -> dict[str, float]:
    """A share with Wilson's interval."""
    p, z = hits / count, 1.96
    center, reach = p + z * z / (2 * count), z * np.sqrt(p * (1 - p) / count + z * z / (4 * count**2))
    scale = 1 + z * z / count
    return {"share": p, "lower": float((center - reach) / scale), "upper": float((center + reach) / scale)}


def tables(record: Record) -> list[Table]:
    """What intervals hold, and what Student's would."""
    names = [f"{row['law']}, difference {row['difference']:g}" for row in record.figures.values()]
    stops = [f"{row['individuals']:.0f}" for row in record.figures.values()]
    ours, student = ([_shares(row, kind) for row in record.figures.values()] for kind in ("", "_student"))
    columns = ("differences of pairs", *COLUMNS.values())
    return [
        Table(
            "95% intervals that hold the difference",
            (*columns, f"individuals, of {MANY[0]}"),
            [(name, *shares, stop) for name, shares, stop in zip(names, ours, stops, strict=True)],
        ),
        Table(
            "The same, Student's",
            columns,
            [(name, *shares) for name, shares in zip(names, student, strict=True)],
        ),
    ]


def _shares(row: dict[str, Any], kind: str) -> list[str]:
    return ["{share:.1%} ({lower:.1%}–{upper:.1%})".format(**row[name + kind]) for name in COLUMNS]


if __name__ == "__main__":
    main()
