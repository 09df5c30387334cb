"""Do gradients learn what frozen features lack, with the same number head solved on both?

3,000 generated sentences, whose number is a product of two numbers and a debt that counts for or
against it, which the order of two names alone tells: "7 bags of 12, Bob owes Ann 15: 99". The backbone is
tuned while the number head follows it; then a head is solved on either, on the same rows. The ridge is chosen
on rows of its own, the error is measured on others.

    python benchmarks/tuning.py                     # about ten minutes on two cores
    python benchmarks/tuning.py --quick --json      # a few steps, to see that it runs
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causal_qwen.calibration.cauchy_regression import cauchy_regression
from causal_qwen.calibration.positions import labelled_positions
from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion import load_model
from causal_qwen.data import Reading, labelled_batches
from causal_qwen.figures import BLUE, new_figure
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.training import TrainingRecipe, train
from causal_qwen.training.records import read_records
from causal_qwen.value_space import ValueSpace
from measure import BASE, Option, Record, Table, run_benchmark, watched

TEMPLATE, TARGET = "{a} bags of {b}, {debtor} owes {creditor} {c}: {total}", "total"
MOST_SOLVED = 1024  # rows that a head is solved on
STRENGTHS = tuple(10.0**-power for power in range(1, 7))
OPTIONS = {
    "base": BASE,
    "rows": Option("generated sentences", 3000, smoke=60, quick=240),
    "steps": Option("of tuning", 120, smoke=1, quick=4),
    "batch_size": Option("rows per step", 16, smoke=4, quick=8),
    "learning_rate": Option("of the backbone", 1e-4, smoke=1e-4),
}
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Tune on sentences, and print errors before and after."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="a few steps", argv=argv, picture=draw)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Errors before and after, and the curve of the number loss."""
    return compare(sentences(arguments.rows), TEMPLATE, TARGET, arguments.steps, arguments)


def sentences(count: int) -> list[Row]:
    """Ann's bags, and a debt that Ann has or is owed."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        a, b = draw.randint(2, 12), draw.randint(2, 12)
        c = draw.randint(1, a * b - 1)
        debtor, creditor = draw.choice((("Ann", "Bob"), ("Bob", "Ann")))
        total = a * b + (c if creditor == "Ann" else -c)
        rows.append({"a": a, "b": b, "c": c, "debtor": debtor, "creditor": creditor, "total": total})
    return rows


def compare(
    rows: list[Row],
    template: str,
    target: str,
    steps: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Frozen and tuned on the same parts: a tenth chooses the ridge, a tenth is for the error."""
    order = random.Random(1).sample(rows, len(rows))
    tenth = max(len(rows) // 10, 5)
    parts = Parts(order[2 * tenth :], order[tenth : 2 * tenth], order[:tenth])
    reading = Reading(template, target)
    with tempfile.TemporaryDirectory() as directory:
        output = f"{directory}/tuned"
        recipe = TrainingRecipe(
            output=output, model=arguments.base, template=template, target=target, method="full",
            max_steps=steps, batch_size=arguments.batch_size, learning_rate=arguments.learning_rate,
            warmup=0.2, bf16=True, loss_impl="sampled", validation_fraction=0.0, calibration_fraction=0.0,
            save_steps=0, logging_steps=max(steps // 32, 1), diagnostics=False, max_length=256,
        )  # fmt: skip
        metrics = train(recipe, rows=parts.train).metrics
        curve = [
            (record["step"], record["train/reg_loss_effective"])
            for record in read_records(Path(output) / "metrics.jsonl")
            if "train/reg_loss_effective" in record
        ]
        tuned, processor = load_model(output, dtype="float32", seed=0)
        after = solved_error(tuned, processor, reading, parts)
    frozen, _ = load_model(arguments.base, dtype="float32", seed=0)
    for name in ("value_space", "value_center", "value_spread"):
        setattr(frozen.config, name, getattr(tuned.config, name))
    before = solved_error(frozen, processor, reading, parts)
    labels = [row[target] for row in parts.test]
    middle = statistics.median(row[target] for row in parts.train)
    return {
        "training_rows": len(parts.train),
        "test_rows": len(parts.test),
        "steps": steps,
        "seconds": metrics["train/seconds"],
        "median_mdae": statistics.median(abs(label - middle) for label in labels),
        "frozen_mdae": before.error,
        "tuned_mdae": after.error,
        "change": after.error / before.error - 1,
        "frozen_strength": before.strength,
        "tuned_strength": after.strength,
        "frozen_seconds": before.seconds,
        "tuned_seconds": metrics["train/seconds"] + after.seconds,
        "curve": curve,
    }


class Parts(NamedTuple):
    """Rows to train on, to choose the ridge on, and to test on."""

    train: list[Row]
    choice: list[Row]
    test: list[Row]


class Solved(NamedTuple):
    """A head by maximum Cauchy likelihood."""

    error: float  # median, of test rows, in the target's unit
    strength: float  # of its ridge
    seconds: float  # of features and solution


def solved_error(model: CausalLM, processor: CausalQwen2Processor, reading: Reading, parts: Parts) -> Solved:
    """Solve on training rows with every ridge, and test the one that errs least on the rows for choice."""
    start = time.perf_counter()
    (x, y), choice, test = (
        features(model, processor, reading, rows)
        for rows in (parts.train[:MOST_SOLVED], parts.choice, parts.test)
    )
    fits = [
        cauchy_regression(x, y, strengths=(strength,), folds=0) for strength in watched(STRENGTHS, "ridges")
    ]

    def error(index: int, rows: tuple[Tensor, Tensor]) -> float:
        predicted = rows[0].double() @ fits[index].slope + fits[index].intercept
        space: ValueSpace = model.value_space
        return float((space.decode(predicted) - space.decode(rows[1])).abs().median())

    best = min(range(len(fits)), key=lambda index: error(index, choice))
    return Solved(error(best, test), STRENGTHS[best], time.perf_counter() - start)


def features(
    model: CausalLM, processor: CausalQwen2Processor, reading: Reading, rows: list[Row]
) -> tuple[Tensor, Tensor]:
    """loc_U (N, D) before each number, and g(v) (N,)."""
    columns: list[tuple[Tensor, Tensor]] = []
    for positions in labelled_positions(model, _batches(processor, reading, rows)):
        is_num = positions.labels == model.config.num_token_id
        columns.append((positions.U.loc[is_num], model.value_space.encode(positions.values[is_num])))
    loc_U, target = zip(*columns, strict=True)
    return torch.cat(loc_U), torch.cat(target)


def _batches(
    processor: CausalQwen2Processor, reading: Reading, rows: list[Row]
) -> Iterator[dict[str, Tensor]]:
    yield from labelled_batches(processor, rows, reading=reading, max_length=256, batch_size=32)


def tables(record: Record) -> list[Table]:
    """One row."""
    return [comparison({"generated sentences": record.figures})]


def comparison(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """What `compare` has measured, a row for each."""
    columns = (
        "median error of a solved head", "rows", "training median", "frozen", "tuned", "change", "steps",
        "seconds, frozen", "seconds, tuned",
    )  # fmt: skip
    rows = [
        (
            name, f"{run['training_rows']:,}", f"{run['median_mdae']:.3g}", f"{run['frozen_mdae']:.3g}",
            f"{run['tuned_mdae']:.3g}", f"{run['change']:+.0%}", str(run["steps"]),
            f"{run['frozen_seconds']:.0f}", f"{run['tuned_seconds']:.0f}",
        )
        for name, run in runs.items()
    ]  # fmt: skip
    return Table("A frozen backbone and a tuned one, one split each", columns, rows)


def headlines(record: Record) -> list[tuple[str, str]]:
    """What tuning is worth."""
    run = record.figures
    return [
        (
            "median error on generated sentences (a product, and the order of words): frozen → tuned",
            f"{run['frozen_mdae']:.2g} → {run['tuned_mdae']:.2g} ({run['change']:+.0%})",
        )
    ]


def draw(record: Record, path: Path) -> None:
    """The number loss over steps."""
    figure, (axes,) = new_figure((6, 4))
    axes.plot(*zip(*record.figures["curve"], strict=True), color=BLUE)
    axes.set(title="generated sentences", xlabel="step", ylabel="number loss, nats")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
