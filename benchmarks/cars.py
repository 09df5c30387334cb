"""Numbers as numbers against digits as text, on a real table: fuel economy of 392 cars.

The embedded base is trained by examples/configs/cars.yaml, and once more with digits as text: same rows, same
sentences, full fine-tuning with plain cross-entropy, at least as many seconds of training (``--seconds``);
the value is read back from the greedy continuation. Beside them the training median, and gradient boosting on
the columns. Each seed draws its own split; the median absolute error is in miles per gallon, on rows that
nobody has trained or calibrated on.

Then many splits, for what intervals hold: features of a frozen backbone do not depend on the split, so they
are computed once, and the number head is solved and calibrated anew on each.

    python benchmarks/cars.py                          # about ten minutes on two cores
    python benchmarks/cars.py --quick --json           # a few seconds of training, to see that it runs
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import peers
from causal_qwen.conversion import load_base
from causal_qwen.data import BadRows, Reading, Template, read_rows
from causal_qwen.training import TrainingRecipe, train
from causal_qwen.training.preparation import split
from frozen import Frozen
from measure import BASE, Option, Record, Table, run_benchmark, watched
from table_data import load

CONFIG = Path(__file__).parent.parent / "examples/configs/cars.yaml"
COLUMNS = ("Cylinders", "Displacement", "Horsepower", "Weight_in_lbs", "Acceleration")
OPTIONS = {
    "base": BASE,
    "seeds": Option("of the splits that are trained on from the beginning", (0,), smoke=(0,)),
    "splits": Option("on which the head is solved", 20, smoke=2, quick=2),
    "seconds": Option("least training time of digits as text", 120.0, smoke=0.0, quick=0.0),
    "digits_learning_rate": Option("of digits as text", 1e-4, smoke=1e-4),
}
LABELS = {
    "values_mdae": "median absolute error, numbers as numbers",
    "digits_mdae": "… digits as text, same base and at least the same seconds",
    "constant_mdae": "… the training median",
    "boosting_mdae": "… gradient boosting on the columns",
    "values_num_f1": "F1 of where numbers are written",
    "values_coverage_90": "share of 90% intervals that hold",
    "values_coverage_90_raw": "… of the law before calibration",
    "values_width_90_median": "their median width, miles per gallon",
    "values_total_seconds": "seconds, with conversion, calibration and evaluation",
    "digits_steps": "steps of digits as text in its seconds",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Compare on every seed, and print the medians over seeds."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="one seed, two splits", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every seed's figures and their medians; the means over many splits."""
    runs = [compare(seed, arguments) for seed in arguments.seeds]
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0] if name != "seed"}
    return {"medians": medians, "runs": runs, "splits": over_splits(arguments)}


def over_splits(arguments: argparse.Namespace) -> dict[str, Any]:
    """The head's and boosting's errors and intervals, on each split."""
    recipe = TrainingRecipe.from_yaml(CONFIG, output="unused", model=arguments.base)
    rows = usable_rows(recipe)
    assert isinstance(recipe.template, str)
    assert recipe.target is not None
    frozen = Frozen(arguments.base, rows, recipe.template, recipe.target)
    table = load(("cars",))["cars"]
    found: dict[str, list[dict[str, float]]] = {"values": [], "boosting": []}
    for seed in watched(range(arguments.splits), "splits"):
        test, _, rest = split(len(rows), dataclasses.replace(recipe, seed=seed))
        truth = targets(rows, test)
        ours = frozen.solve(rest, test)
        found["values"].append(_held(ours.median, *ours.ends[0.9], truth))
        columns = [row | {"year": int(row["Year"][:4])} for row in rows]
        other = peers.boosting(table, [columns[i] for i in rest], [columns[i] for i in test])
        found["boosting"].append(_held(other.median, *other.ends[0.9], truth))
    return {arm: _summary(runs) for arm, runs in found.items()}


def _held(median: Any, lower: Any, upper: Any, truth: np.ndarray[Any, Any]) -> dict[str, float]:
    inside = (lower <= truth) & (truth <= upper)
    return {
        "mdae": median_error(median, truth),
        "coverage_90": float(inside.mean()),
        "width_90": float(np.median(upper - lower)),
    }


def _summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Means over splits, the first five apart, and half the width of a 95% interval of the mean."""
    summary: dict[str, Any] = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        summary[name] = statistics.fmean(values)
        summary[f"{name}_first_five"] = statistics.fmean(values[:5])
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        summary[f"{name}_margin"] = 1.96 * deviation / math.sqrt(len(values))
    return summary


def compare(seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """All four on one split."""
    with tempfile.TemporaryDirectory() as directory:
        recipe = TrainingRecipe.from_yaml(
            CONFIG, output=f"{directory}/values", seed=seed, model=arguments.base
        )
        start = time.perf_counter()
        metrics = train(recipe).metrics
        total = time.perf_counter() - start
    rows = usable_rows(recipe)
    test, _, rest = split(len(rows), recipe)
    truth = targets(rows, test)
    constant = np.median(targets(rows, rest))
    digits_recipe = dataclasses.replace(recipe, learning_rate=arguments.digits_learning_rate)
    least = max(metrics["train/seconds"], arguments.seconds) if arguments.seconds else 0.0
    predicted, steps = digits_as_text(digits_recipe, rows, rest, test, seconds=least)
    # A continuation that is no number is as wrong as the constant.
    readable = np.where(np.isfinite(predicted), predicted, constant)
    return {
        "seed": seed,
        "training_rows": len(rest),
        "test_rows": len(test),
        "values_mdae": metrics["eval/reg_mdae"],
        "values_num_f1": metrics["eval/num_f1"],
        "values_coverage_90": metrics["eval/coverage_90"],
        "values_coverage_90_raw": metrics["eval/coverage_90_raw"],
        "values_width_90_median": metrics["eval/width_90_median"],
        "values_seconds": metrics["train/seconds"],
        "values_total_seconds": total,
        "constant_mdae": median_error(np.full(len(test), constant), truth),
        "boosting_mdae": median_error(boosting(rows, rest, test), truth),
        "digits_mdae": median_error(readable, truth),
        "digits_unreadable": float((~np.isfinite(predicted)).mean()),
        "digits_steps": steps,
    }


def usable_rows(recipe: TrainingRecipe) -> list[dict[str, Any]]:
    """The rows that training uses, in its order."""
    assert isinstance(recipe.data, str)
    assert isinstance(recipe.template, str)
    reading = Reading(recipe.template, recipe.target)
    whole = []
    for _, row in read_rows(recipe.data, bad_rows=BadRows("skip")):
        if list(reading.examples([row], BadRows("skip", silent=True))):
            whole.append(dict(row))
    return whole


def targets(rows: list[dict[str, Any]], chosen: list[int]) -> np.ndarray[Any, Any]:
    """Miles per gallon of the chosen rows."""
    return np.array([rows[i]["Miles_per_Gallon"] for i in chosen], dtype=float)


def median_error(predicted: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> float:
    """Median absolute error."""
    return float(np.median(np.abs(predicted - truth)))


def boosting(rows: list[dict[str, Any]], rest: list[int], test: list[int]) -> np.ndarray[Any, Any]:
    """Gradient boosting on the columns, origin and year included."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    origins = sorted({row["Origin"] for row in rows})
    table = np.array(
        [
            [*(row[name] for name in COLUMNS), int(row["Year"][:4]), origins.index(row["Origin"])]
            for row in rows
        ],
        dtype=float,
    )
    model = HistGradientBoostingRegressor(random_state=0).fit(table[rest], targets(rows, rest))
    return np.asarray(model.predict(table[test]))


def digits_as_text(
    recipe: TrainingRecipe,
    rows: list[dict[str, Any]],
    rest: list[int],
    test: list[int],
    *,
    seconds: float,
) -> tuple[np.ndarray[Any, Any], int]:
    """Predictions of the plain base, fine-tuned on the same sentences for the same seconds."""
    assert isinstance(recipe.template, str)
    torch.manual_seed(recipe.seed)
    base = load_base(recipe.model)
    model: Any = base.model
    tokenizer = base.tokenizer
    template = Template(recipe.template, recipe.target)
    encoded = []
    for i in rest:
        prompt, completion = template.render(rows[i])
        before = tokenizer(prompt.text.rstrip(), add_special_tokens=False)["input_ids"]
        after = tokenizer(f" {completion.text}", add_special_tokens=False)["input_ids"] + [
            tokenizer.eos_token_id
        ]
        encoded.append((before + after, [-100] * len(before) + after))
    steps = fine_tune(model, encoded, tokenizer.eos_token_id, recipe, seconds=seconds)
    model.eval()
    predicted = []
    for i in test:
        prompt = template.prompt(rows[i]).text.rstrip()
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        outputs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
            pad_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        predicted.append(as_number(tokenizer.decode(outputs[0, ids.shape[1] :], skip_special_tokens=True)))
    return np.array(predicted), steps


def fine_tune(
    model: Any,
    encoded: list[tuple[list[int], list[int]]],
    padding: int,
    recipe: TrainingRecipe,
    *,
    seconds: float,
) -> int:
    """AdamW with the recipe's learning rate, warm-up and cosine, for as many steps as the seconds allow.

    The first three steps, timed on a copy of the weights that is then put back, say how many that are.
    """

    def batches() -> Any:
        generator = torch.Generator().manual_seed(recipe.seed)
        while True:
            order = torch.randperm(len(encoded), generator=generator).tolist()
            for start in range(0, len(order) - recipe.batch_size + 1, recipe.batch_size):
                yield collate([encoded[i] for i in order[start : start + recipe.batch_size]], padding)

    def step(batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    model.train()
    stream = batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    step(next(stream), optimizer)
    start = time.perf_counter()
    for _ in range(3):
        step(next(stream), optimizer)
    count = max(int(seconds / ((time.perf_counter() - start) / 3)), 1)
    warm = max(int(recipe.warmup * count), 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, 0.5 * (1 + math.cos(math.pi * i / count)))
    )
    for _, batch in zip(watched(range(count), "digits as text"), stream, strict=False):
        step(batch, optimizer)
        schedule.step()
    return count


def collate(rows: list[tuple[list[int], list[int]]], padding: int) -> dict[str, torch.Tensor]:
    """Padded on the right."""
    longest = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [padding] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
    }


def as_number(text: str) -> float:
    """The number that a continuation begins with; NaN if it does not."""
    words = text.split()
    try:
        return float(words[0].rstrip(".,;"))
    except (ValueError, IndexError):
        return math.nan


def tables(record: Record) -> list[Table]:
    """Each seed and the median; then the means over many splits."""
    runs, medians = record.figures["runs"], record.figures["medians"]
    rows = [
        (label, *(_text(name, values[name]) for values in (*runs, medians))) for name, label in LABELS.items()
    ]
    title = "{training_rows} cars for training, {test_rows} for the test".format(**runs[0])
    trained = Table(title, ("", *(f"seed {run['seed']}" for run in runs), "median"), rows)
    splits = record.figures["splits"]
    labels = {
        "mdae": "median absolute error",
        "coverage_90": "90% intervals that hold",
        "width_90": "their median width",
    }
    means = [
        (
            label,
            *(
                f"{_text(name, splits[arm][name])} ± {_text(name, splits[arm][f'{name}_margin'])}"
                for arm in ("values", "boosting")
            ),
        )
        for name, label in labels.items()
    ]
    title = f"Mean of {record.options['splits']} splits; boosting has CV+ intervals too"
    return [trained, Table(title, ("", "numbers as numbers", "boosting"), means)]


def _text(name: str, value: float) -> str:
    return f"{value:.0%}" if "coverage" in name else f"{value:.3g}"


def headlines(record: Record) -> list[tuple[str, str]]:
    """Errors beside each other, and what the intervals hold."""
    runs, medians = record.figures["runs"], record.figures["medians"]
    errors = "; ".join(f"{medians[f'{name}_mdae']:.1f}" for name in ("values", "constant", "boosting"))
    who = "numbers; training median; boosting"
    splits = record.figures["splits"]["values"]
    return [
        (
            f"fuel economy of unseen cars, {len(runs)} split{'s' * (len(runs) > 1)}, median error: {who}",
            f"{errors} miles per gallon",
        ),
        (
            f"90% intervals that hold, and their median width, mean of {record.options['splits']} splits",
            f"{splits['coverage_90']:.0%}, {splits['width_90']:.1f} miles per gallon",
        ),
    ]


if __name__ == "__main__":
    main()
