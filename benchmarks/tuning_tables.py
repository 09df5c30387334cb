"""When does a backbone that learns beat a frozen one on small tables?

The comparison of benchmarks/tuning.py on real tables, one split each: few rows, of which the words themselves
say much. Each is tuned for about two minutes.

    python benchmarks/tuning_tables.py                     # about twenty minutes on two cores
    python benchmarks/tuning_tables.py --quick --json      # one table, a few steps
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

from measure import BASE, Option, Record, Table, run_benchmark
from table_data import load
from tuning import compare, comparison

SMALL = ("cars", "car names", "diamonds", "occupations", "countries", "movies")
OPTIONS = {
    "base": BASE,
    "tables": Option("real tables", SMALL, smoke=("occupations",), quick=("occupations",)),
    "rows": Option("most rows of a table", 200, smoke=40, quick=60),
    "steps": Option("of tuning", 40, smoke=1, quick=2),
    "batch_size": Option("rows per step", 8, smoke=4),
    "learning_rate": Option("of the backbone", 2e-5, smoke=2e-5),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Tune on every table, and print errors before and after."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="one table, a few steps", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each table's errors before and after."""
    runs = {}
    for name, table in load(arguments.tables).items():
        rows = random.Random(0).sample(table.rows, min(len(table.rows), arguments.rows))
        runs[name] = compare(rows, table.template, table.target, arguments.steps, arguments)
    return runs


def tables(record: Record) -> list[Table]:
    """A row for each table."""
    return [comparison(record.figures)]


def headlines(record: Record) -> list[tuple[str, str]]:
    """On how many tables tuning is worth anything."""
    better = sum(run["change"] < 0 for run in record.figures.values())
    what = "small tables on which two epochs of tuning lower the median error, one split each"
    return [(what, f"{better} of {len(record.figures)}")]


if __name__ == "__main__":
    main()
