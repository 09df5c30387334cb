"""Does the engine recover a structure that is known, and what do outliers do to it?

Trains the causal engine on synthetic features, as ``causal-qwen simulate`` does, for each seed.

    python benchmarks/simulation.py                  # a minute or two
    python benchmarks/simulation.py --quick --json   # one seed, fewer individuals and steps
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from causal_qwen.simulation import simulate
from measure import Option, Record, Table, run_benchmark, watched

OPTIONS = {
    "seeds": Option("of truth, data and starting point", (0, 1, 2, 3, 4), smoke=(0,), quick=(0,)),
    "count": Option("individuals to train on", 8000, smoke=100, quick=2000),
    "steps": Option("steps of training", 400, smoke=20, quick=100),
}
NAMES = {
    "number_slope": "slope of loc_Y, ‖β̂ − β‖/‖β‖",
    "number_intercept": "its intercept, relative",
    "number_scale": "scale_Y, median relative error where a number comes",
    "prob_num": "probability of a number, median absolute error",
}
HEADS = {"cauchy": "Cauchy law", "squared": "squared error"}


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate and print."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="one small simulation", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """The summary of each simulation, without its time."""
    runs = []
    for seed in watched(arguments.seeds, "seeds"):
        summary = simulate(count=arguments.count, steps=arguments.steps, seed=seed).summary()
        runs.append({name: value for name, value in summary.items() if name != "seconds"})
    return {"runs": runs}


def tables(record: Record) -> list[Table]:
    """Recovery and outliers, each as the median and the worst of the seeds."""
    runs, seeds = record.figures["runs"], len(record.figures["runs"])
    recovery = [
        (
            NAMES[name],
            *_median_and_worst(runs, lambda run, name=name: run["parameter_errors"][name], "{:.2%}"),
            f"{bound:.0%}",
        )
        for name, bound in ((name, runs[0]["tolerances"][name]) for name in NAMES)
    ]
    outliers = [
        (label, *_median_and_worst(runs, lambda run, head=head: run[f"{head}_error_growth"], "{:.2f}×"))
        for head, label in HEADS.items()
    ]
    title = f"Distance from the truth, {record.options['count']:,} individuals, {seeds} seeds"
    return [
        Table(title, ("parameter", "median", "worst", "tolerance"), recovery),
        Table(
            "Median error with 30% outliers over without", ("head trained by", "median", "worst"), outliers
        ),
    ]


def headlines(record: Record) -> list[tuple[str, str]]:
    """What outliers do."""
    (_, cauchy, _), (_, squared, _) = tables(record)[1].rows
    return [
        (
            "median error with 30% outliers over without: Cauchy head; squared-error head",
            f"{cauchy}; {squared}",
        )
    ]


def _median_and_worst(runs: list[Any], figure: Callable[[Any], float], form: str) -> tuple[str, str]:
    values = [figure(run) for run in runs]
    return form.format(statistics.median(values)), form.format(max(values))


if __name__ == "__main__":
    main()
