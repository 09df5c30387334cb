"""Ten real tables: sentences and the default recipe, against learners on the columns.

Each table is split five times, four fifths to train on. Ours is the default recipe of ``causal-qwen train``,
intervals included, and nothing of it is chosen for a table but its sentence. The first split is trained from
the beginning; the others have the same features of the frozen base (`frozen`), and what the two differ by on
the first is published. The other learners (`peers`) get the same columns, free text by TF-IDF, and conformal
intervals. "Digits as text" is the base, unchanged, which reads some training rows and writes the number of
the next one, on the first split. Figures are means over splits.

    python benchmarks/tables.py                                    # half an hour on two cores
    python benchmarks/tables.py --tables occupations cars --splits 2
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import peers
from causal_qwen.conversion import convert, load_model
from causal_qwen.data import Reading
from causal_qwen.evaluation import predict
from causal_qwen.training import TrainingRecipe, train
from frozen import Frozen
from measure import BASE, Option, Record, Table, run_benchmark, watched
from peers import LEVELS, Predictions, labels_of, scores
from table_data import TABLES, Dataset, Row, load

OPTIONS = {
    "base": BASE,
    "tables": Option("which", tuple(TABLES), smoke=("occupations",), quick=("cars", "occupations")),
    "splits": Option("of each table", 5, smoke=1, quick=1),
    "shots": Option("training rows that digits as text reads", 16, smoke=2),
    "threads": Option("of torch", 2, smoke=1),
}
OURS = "causal"
ARMS = {
    OURS: "ours",
    "boosting": "boosting",
    "boosting_l1": "boosting, absolute error",
    "ridge": "ridge",
    "forest": "quantile forest",
    "digits": "digits as text",
    "constant": "training median",
}
BOOSTING = ("boosting", "boosting_l1")


def main(argv: Sequence[str] | None = None) -> None:
    """Compare on every split of every table, and print the means over splits."""
    run_benchmark(
        __file__, __doc__, OPTIONS, figures, tables, quick="one split of two tables", argv=argv, picture=draw
    )


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """By table: its size, and each arm's mean figures over splits and the error of each split."""
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        converted = f"{directory}/base"
        convert(arguments.base, converted)  # once, and not counted as training
        return _compare(arguments, converted)


def _compare(arguments: argparse.Namespace, converted: str) -> dict[str, Any]:
    digits = peers.DigitsAsText(arguments.base, arguments.shots)
    found = {}
    for name, table in load(arguments.tables).items():
        runs: dict[str, list[dict[str, float]]] = {}
        frozen = Frozen(converted, table.rows, table.template, table.target)
        differences = []
        for seed in watched(range(arguments.splits), name):
            train, test = table.split_indices(seed)
            train_rows, test_rows = ([table.rows[i] for i in part] for part in (train, test))
            arms = {
                OURS: frozen.solve(train, test),
                "boosting": peers.boosting(table, train_rows, test_rows),
                "boosting_l1": peers.boosting_l1(table, train_rows, test_rows),
                "ridge": peers.ridge(table, train_rows, test_rows),
                "forest": peers.forest(table, train_rows, test_rows),
                "constant": peers.constant(table, train_rows, test_rows),
            }
            if seed == 0:
                arms["digits"] = digits(table, train_rows, test_rows)
                whole = causal(table, train_rows, test_rows, model=converted, seed=seed)
                width = np.subtract(*whole.ends[0.9][::-1])
                differences = list(np.abs(whole.median - arms[OURS].median) / width)
                arms[OURS] = whole
            truth = labels_of(table, test_rows)
            for arm, predictions in arms.items():
                unreadable = {"unreadable": float(predictions.unreadable)} if arm == "digits" else {}
                runs.setdefault(arm, []).append(scores(predictions, truth) | unreadable)
        found[name] = {
            "about": table.about,
            "source": table.source,
            "rows": len(table.rows),
            "test_rows": len(test_rows),
            "free_text": bool(table.texts),
            "frozen_difference": float(np.median(differences)),
            "arms": {arm: _means(measured) for arm, measured in runs.items()},
        }
    return {"tables": found, "free_text_wins": _wins(found)}


def causal(
    table: Dataset, train_rows: list[Row], test_rows: list[Row], *, model: str, seed: int
) -> Predictions:
    """The default recipe, from a converted model to a calibrated one; then predictions at every level."""
    with tempfile.TemporaryDirectory() as directory:
        recipe = TrainingRecipe(
            output=f"{directory}/model",
            model=model,
            template=table.template,
            target=table.target,
            seed=seed,
            validation_fraction=0.0,  # the test rows are ours
        )
        start = time.perf_counter()
        output = train(recipe, rows=train_rows, progress=None).output
        seconds = time.perf_counter() - start
        trained, processor = load_model(str(output))
        reading = Reading.of(output)
        ends, median = {}, np.zeros(0)
        for level in LEVELS:
            answers = list(predict(trained, processor, test_rows, reading=reading, level=level))
            median = np.array([answer.median for answer in answers])
            ends[level] = (
                np.array([answer.lower for answer in answers]),
                np.array([answer.upper for answer in answers]),
            )
    return Predictions(median, ends, seconds)


def _means(runs: list[dict[str, float]]) -> dict[str, Any]:
    means: dict[str, Any] = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
    return means | {"mdae_of_splits": [run["mdae"] for run in runs]}


def _wins(found: dict[str, Any]) -> list[str]:
    """Tables with free text on which our median error is below that of either boosting."""
    return [
        name
        for name, table in found.items()
        if table["free_text"]
        and table["arms"][OURS]["mdae"] < min(table["arms"][arm]["mdae"] for arm in BOOSTING)
    ]


def tables(record: Record) -> list[Table]:
    """Errors of all tables side by side, then scores and intervals of each arm that has them."""
    found = record.figures["tables"]
    splits = record.options["splits"]
    errors = [
        (
            f"{name}{' (free text)' * table['free_text']}: {table['about']}",
            f"{table['rows']:,}",
            *(_least(table["arms"], arm, "mdae") for arm in ARMS),
        )
        for name, table in found.items()
    ]
    title = (
        f"Median absolute error, mean of {splits} splits (digits as text: of the first); the least is bold"
    )
    shown = [Table(title, ("table", "rows", *ARMS.values()), errors)]
    columns = {
        "mae": "Mean absolute error",
        "crps": "CRPS (weighted interval score of seven quantiles)",
        "interval_score": "Interval score of 90% intervals",
    }
    for figure, label in columns.items():
        arms = [arm for arm in ARMS if all(figure in table["arms"][arm] for table in found.values())]
        rows = [
            (name, *(_least(table["arms"], arm, figure) for arm in arms)) for name, table in found.items()
        ]
        shown.append(Table(label, ("table", *(ARMS[arm] for arm in arms)), rows))
    arms = [arm for arm in ARMS if arm != "digits"]
    rows = [
        (name, *("{coverage:.0%}, {width:.3g}".format(**table["arms"][arm]) for arm in arms))
        for name, table in found.items()
    ]
    heading = "What 90% intervals hold, and their median width"
    shown.append(Table(heading, ("table", *(ARMS[arm] for arm in arms)), rows))
    rows = [
        (
            name,
            *(f"{table['arms'][arm]['seconds']:.1f}" for arm in arms[:-1]),
            f"{table['arms']['digits']['unreadable']:.1f} of {table['test_rows']}",
        )
        for name, table in found.items()
    ]
    heading = "Seconds of training, choices and calibration; answers of digits as text that are no number"
    shown.append(Table(heading, ("table", *(ARMS[arm] for arm in arms[:-1]), "no number"), rows))
    return shown


def _least(arms: dict[str, Any], arm: str, figure: str) -> str:
    value = arms[arm][figure]
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"**{text}**" if value == min(other.get(figure, np.inf) for other in arms.values()) else text


def headlines(record: Record) -> list[tuple[str, str]]:
    """Where the default wins, and how often its intervals hold."""
    found = record.figures["tables"]
    wins = record.figures["free_text_wins"]
    texts = sum(table["free_text"] for table in found.values())
    covered = statistics.fmean(table["arms"][OURS]["coverage"] for table in found.values())
    return [
        (
            f"tables with free text on which the default recipe errs less than either boosting, of {texts}",
            f"{len(wins)}{': ' * bool(wins)}{', '.join(wins)}",
        ),
        (f"90% intervals that hold, mean of {len(found)} tables", f"{covered:.0%}"),
    ]


def draw(record: Record, file: Path) -> None:
    """Errors relative to the training median's, a row per table."""
    from matplotlib.figure import Figure

    found = record.figures["tables"]
    names = sorted(found, key=lambda name: (found[name]["free_text"], name), reverse=True)
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    marks = {OURS: "D", "boosting": "o", "boosting_l1": "s", "ridge": "^", "forest": "v", "digits": "x"}
    highest = 1.6
    for arm, mark in marks.items():
        ratios = [
            found[name]["arms"][arm]["mdae"] / found[name]["arms"]["constant"]["mdae"] for name in names
        ]
        # Hollow, so that nobody is hidden behind it.
        hollow: dict[str, Any] = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 2.5}
        front = hollow if arm == OURS else {"markersize": 6, "alpha": 0.8}
        # What lies beyond the axis stands at its end, with its value.
        inside = [min(ratio, highest) for ratio in ratios]
        drawn = axes.plot(inside, range(len(names)), mark, label=ARMS[arm], linestyle="none", **front)
        for place, ratio in enumerate(ratios):
            if ratio > highest:
                axes.annotate(
                    f"{ratio:.1f} →", (highest, place), xytext=(-8, 5), textcoords="offset points",
                    ha="right", fontsize=8, color=drawn[0].get_color(),
                )  # fmt: skip
    axes.axvline(1.0, color="grey", linewidth=1, label="training median")
    labels = [f"{name}{' (free text)' * found[name]['free_text']}" for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.set(xlim=(0, highest + 0.05), xlabel="median absolute error, relative to the training median's")
    axes.set_title(f"Unseen rows, mean of {record.options['splits']} splits: further left is better")
    axes.grid(axis="both", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
