"""Numbers as numbers against digits as text, on a real table: fuel economy of 392 cars.

The embedded base is trained by examples/configs/cars.yaml, and once more with digits as text: same rows, same
sentences, full fine-tuning with plain cross-entropy, at least as many seconds of training (``--seconds``);
the value is read back from the greedy continuation. Beside them the training median, and gradient boosting on
the columns. Each seed draws its own split; the median absolute error is in miles per gallon, on rows that
nobody has trained or calibrated on.

    python benchmarks/cars.py --seeds 0 1 2            # about eight minutes per seed on two cores
    python benchmarks/cars.py --quick --json           # a few steps, to see that it runs
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

from causal_qwen.conversion import load_base
from causal_qwen.data import BadRows, Reading, Template, read_rows
from causal_qwen.training import TrainingRecipe, train
from causal_qwen.training.preparation import split
from measure import BASE, Option, Record, Table, run_benchmark, watched

CONFIG = Path(__file__).parent.parent / "examples/configs/cars.yaml"
COLUMNS = ("Cylinders", "Displacement", "Horsepower", "Weight_in_lbs", "Acceleration")
OPTIONS = {
    "base": BASE,
    "seeds": Option("of the splits and of training", (0, 1, 2), smoke=(0,), quick=(0,)),
    "steps": Option("steps of training", 45, smoke=2, quick=2),
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
    "values_seconds": "seconds of training",
    "values_total_seconds": "… with conversion, calibration and evaluation",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Compare on every seed, and print the medians over seeds."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="two steps of one seed", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every seed's figures, and their medians."""
    runs = [compare(seed, arguments) for seed in arguments.seeds]
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0] if name != "seed"}
    # One split has few rows: what 90% intervals hold is said over all of them.
    covered = sum(run["values_coverage_90"] * run["test_rows"] for run in runs)
    medians["values_coverage_90_pooled"] = covered / sum(run["test_rows"] for run in runs)
    return {"medians": medians, "runs": runs}


def compare(seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """All four on one split."""
    with tempfile.TemporaryDirectory() as directory:
        recipe = TrainingRecipe.from_yaml(
            CONFIG, output=f"{directory}/values", seed=seed, model=arguments.base, max_steps=arguments.steps
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
        if list(reading.examples([row], BadRows("skip"))):
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
    """Each seed and the median; coverage over all rows of all seeds."""
    runs, medians = record.figures["runs"], record.figures["medians"]
    rows = [
        (label, *(_text(name, values[name]) for values in (*runs, medians))) for name, label in LABELS.items()
    ]
    predictions = sum(run["test_rows"] for run in runs)
    label = f"share of 90% intervals that hold, of all {predictions} predictions"
    pooled = "values_coverage_90_pooled"
    rows.append((label, *("" for _ in runs), _text(pooled, medians[pooled])))
    title = "{training_rows} cars for training, {test_rows} for the test; {steps} steps".format(
        **runs[0], **record.options
    )
    return [Table(title, ("", *(f"seed {run['seed']}" for run in runs), "median"), rows)]


def _text(name: str, value: float) -> str:
    return f"{value:.0%}" if "coverage" in name else f"{value:.3g}"


def headlines(record: Record) -> list[tuple[str, str]]:
    """Errors beside each other, and what the intervals hold."""
    runs, medians = record.figures["runs"], record.figures["medians"]
    errors = "; ".join(
        f"{medians[f'{name}_mdae']:.1f}" for name in ("values", "digits", "constant", "boosting")
    )
    who = "numbers; digits as text; training median; boosting"
    predictions = sum(run["test_rows"] for run in runs)
    return [
        (
            f"fuel economy of unseen cars, {len(runs)} split{'s' * (len(runs) > 1)}, median error: {who}",
            f"{errors} miles per gallon",
        ),
        (
            f"90% intervals that hold, of {predictions} predictions",
            f"{medians['values_coverage_90_pooled']:.0%}",
        ),
    ]


if __name__ == "__main__":
    main()
