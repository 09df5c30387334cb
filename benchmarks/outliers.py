"""Wrong training labels, through the command line: how much a table's error grows with their share.

Labels are replaced by uniform draws between the smallest and ten times the largest; the test rows are as they
were: a fifth of those that are drawn of a table, and where it is larger, others up to 400. Ours is
``causal-qwen train RECIPE.yaml`` with a recipe that names files, template and target and leaves all else at
its default, then ``causal-qwen predict``; boosting (`peers`) has the columns. Three tables: one of numbers,
one of numbers and categories, one of free text.

    python benchmarks/outliers.py                  # an hour on two cores
    python benchmarks/outliers.py --quick --json   # the tables, clean labels and 30%, one split
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import peers
from measure import BASE, Option, Record, Table, run_benchmark, watched
from peers import Predictions, labels_of
from table_data import Dataset, Row, load

OPTIONS = {
    "base": BASE,
    "tables": Option("which", ("cars", "diamonds", "airports"), smoke=("occupations",)),
    "shares": Option("of wrong labels", (0.0, 0.1, 0.2, 0.3, 0.4), smoke=(0.0, 0.3), quick=(0.0, 0.3)),
    "splits": Option("of each table", 3, smoke=1, quick=1),
}
ARMS = {"causal": "ours", "boosting": "boosting", "boosting_l1": "boosting, absolute error"}
GROWTH = 0.3  # the share whose growth is published
MOST_TESTED = 400  # a median of eighty errors moves by a tenth with the rows that it is of
COLUMNS = ("median", "lower", "upper")


def main(argv: Sequence[str] | None = None) -> None:
    """Errors of every table and share, and how much they grow."""
    run_benchmark(
        __file__,
        __doc__,
        OPTIONS,
        figures,
        tables,
        quick="two shares, one split",
        argv=argv,
        picture=draw,
    )


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """By table and arm: the error at each share, mean over splits, and its growth from no wrong labels."""
    with tempfile.TemporaryDirectory() as directory:
        converted = f"{directory}/base"
        _command("convert", arguments.base, converted)
        return _compare(arguments, converted)


def _compare(arguments: argparse.Namespace, converted: str) -> dict[str, Any]:
    runs = [
        (name, table, share, seed)
        for name, table in load(arguments.tables).items()
        for share in arguments.shares
        for seed in range(arguments.splits)
    ]
    errors: dict[tuple[str, str, float], list[float]] = {}
    widths: dict[tuple[str, float], list[float]] = {}
    for name, table, share, seed in watched(runs, "runs"):
        clean, left = table.split(seed)
        test_rows = left + table.others[: MOST_TESTED - len(left)]
        train_rows = table.with_wrong_labels(clean, share, seed)
        truth = labels_of(table, test_rows)
        ours = causal(table, train_rows, test_rows, model=converted, seed=seed)
        arms = {
            "causal": ours,
            "boosting": peers.boosting(table, train_rows, test_rows),
            "boosting_l1": peers.boosting_l1(table, train_rows, test_rows),
        }
        for arm, predictions in arms.items():
            error = float(np.median(np.abs(predictions.median - truth)))
            errors.setdefault((name, arm, share), []).append(error)
        lower, upper = ours.ends[0.9]
        widths.setdefault((name, share), []).append(float(np.median(upper - lower)))
    shares = [float(share) for share in arguments.shares]
    found: dict[str, Any] = {
        name: {
            "errors": {arm: [statistics.fmean(errors[name, arm, share]) for share in shares] for arm in ARMS},
            "width_90": [statistics.fmean(widths[name, share]) for share in shares],
        }
        for name in arguments.tables
    }
    growth = {}
    if {0.0, GROWTH} <= set(shares):
        first, last = shares.index(0.0), shares.index(GROWTH)
        for name, table_figures in found.items():
            table_figures["growth_30"] = {
                arm: curve[last] / curve[first] for arm, curve in table_figures["errors"].items()
            }
            table_figures["growth_30_by_split"] = {
                arm: [
                    dirty / clean
                    for clean, dirty in zip(errors[name, arm, 0.0], errors[name, arm, GROWTH], strict=True)
                ]
                for arm in ARMS
            }
        growth = {
            f"{arm}_growth_30": statistics.median(entry["growth_30"][arm] for entry in found.values())
            for arm in ARMS
        }
    return growth | {"shares": shares, "tables": found}


def causal(
    table: Dataset, train_rows: list[Row], test_rows: list[Row], *, model: str, seed: int
) -> Predictions:
    """The two commands, on files."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file, rows in (("train.jsonl", train_rows), ("test.jsonl", test_rows)):
            lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
            (directory / file).write_text(lines, encoding="utf-8")
        recipe = {
            "model": model, "data": str(directory / "train.jsonl"), "output": str(directory / "model"),
            "template": table.template, "target": table.target, "seed": seed,
            "validation_fraction": 0.0,  # the test rows are ours
        }  # fmt: skip
        (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
        _command("train", str(directory / "recipe.yaml"))
        answers = str(directory / "answers.jsonl")
        _command("predict", str(directory / "model"), str(directory / "test.jsonl"), "-o", answers)
        lines = Path(answers).read_text(encoding="utf-8").splitlines()
    median, lower, upper = (np.array([json.loads(line)[name] for line in lines]) for name in COLUMNS)
    return Predictions(median, {0.9: (lower, upper)}, 0.0)


def _command(*words: str) -> None:
    """``causal-qwen`` of this environment.

    Raises:
        RuntimeError: If it fails; with what it says.
    """
    command = [sys.executable, "-c", "import causal_qwen_command as c; c.main()", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"causal-qwen {words[0]}: {done.stderr.strip() or done.stdout.strip()}")


def tables(record: Record) -> list[Table]:
    """Errors by share, and growth."""
    found = record.figures["tables"]
    shares = [f"{share:.0%}" for share in record.figures["shares"]]
    has_growth = "causal_growth_30" in record.figures
    rows = [
        (
            f"{name}: {label}",
            *(_text(value) for value in entry["errors"][arm]),
            *([_growth(entry, arm)] if has_growth else []),
        )
        for name, entry in found.items()
        for arm, label in ARMS.items()
    ]
    growth = ["growth at 30% (by split)"] if has_growth else []
    title = f"Median absolute error by share of wrong training labels, {_splits(record)}"
    widths = [(name, *(_text(value) for value in entry["width_90"])) for name, entry in found.items()]
    return [
        Table(title, ("table", *shares, *growth), rows),
        Table("Median width of our 90% intervals, which cover labels as they are given",
              ("table", *shares), widths),
    ]  # fmt: skip


def _growth(entry: dict[str, Any], arm: str) -> str:
    by_split = entry["growth_30_by_split"][arm]
    return f"{entry['growth_30'][arm]:.2f}× ({min(by_split):.2f}–{max(by_split):.2f})"


def _splits(record: Record) -> str:
    count = record.options["splits"]
    return "one split" if count == 1 else f"mean of {count} splits"


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def headlines(record: Record) -> list[tuple[str, str]]:
    """Growth at 30%, ours beside boosting's."""
    figures = record.figures
    return [
        (
            f"error with 30% wrong training labels over that with clean ones, median of "
            f"{len(figures['tables'])} tables: ours; boosting; boosting by absolute error",
            "; ".join(f"{figures[f'{arm}_growth_30']:.2f}×" for arm in ARMS),
        )
    ]


def draw(record: Record, file: Path) -> None:
    """A panel per table, with logarithmic errors: boosting's would hide ours."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    found = record.figures["tables"]
    shares = [100 * share for share in record.figures["shares"]]
    across = len(found) if len(found) <= 3 else 2
    down = math.ceil(len(found) / across)
    figure = Figure(figsize=(3.4 * across, 3.2 * down + 0.8), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (name, entry) in zip(panels, found.items(), strict=False):
        for (arm, label), mark in zip(ARMS.items(), "Dos", strict=True):
            axes.plot(shares, entry["errors"][arm], f"{mark}-", label=label)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(title=name, xlabel="wrong training labels, %", ylabel="median error (logarithmic)")
        axes.grid(alpha=0.3)
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ARMS))
    figure.suptitle(f"What wrong labels do, {_splits(record)}")
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
