"""Training throughput and memory against transformers' Trainer on the plain base.

The same rows, batch size, precision and optimizer: the embedded base with transformers' own Trainer and
cross-entropy, and converted with `CausalTrainer`, with the exact loss and with sampled negatives. Each in a
process of its own; times are the median of the steps after the first two.

    python benchmarks/training.py                  # about ten minutes on two cores
    python benchmarks/training.py --quick --json   # fewer and shorter steps
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from causal_qwen.conversion import convert, load_base
from causal_qwen.data import Collator, Encoded
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.trainer import CausalTrainer
from measure import BASE, Option, Record, Table, in_child, peak_beyond, python_manual, run_benchmark, watched

VARIANTS = ("plain", "exact", "sampled")
NAMES = {"plain": "the plain base", "exact": "exact loss", "sampled": "sampled negatives"}
OPTIONS = {
    "base": BASE,
    "steps": Option("steps of training", 12, smoke=3, quick=5),
    "rows": Option("sequences per step", 4, smoke=1, quick=2),
    "length": Option("tokens per sequence", 256, smoke=16, quick=128),
    "rounds": Option("runs of each variant", 2, smoke=1, quick=1),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each variant in a child, in rounds, and print the ratios."""
    run_benchmark(
        __file__, __doc__, OPTIONS, figures, tables, quick="fewer and shorter steps", argv=argv, child=measure
    )


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Throughput and memory ratios, round by round against the plain base of the same round."""
    sizes = {name: getattr(arguments, name) for name in ("base", "steps", "rows", "length")}
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for variant in watched(VARIANTS * arguments.rounds, "variants"):
        measured = in_child(__file__, {"variant": variant, **sizes})
        if "error" in measured:
            raise SystemExit(f"{variant}: {measured['error']}")
        runs[variant].append(measured)
    return summary(runs, arguments.rows * arguments.length)


def summary(runs: dict[str, list[dict[str, Any]]], tokens: int) -> dict[str, float]:
    """Throughput and memory ratios, round by round against the plain base of the same round."""
    result: dict[str, float] = {}
    for variant, measured in runs.items():
        pairs = list(zip(runs["plain"], measured, strict=True))
        result |= {
            f"{variant}_ratio": statistics.median(plain["step"] / ours["step"] for plain, ours in pairs),
            f"{variant}_memory_ratio": statistics.median(
                ours["bytes"] / plain["bytes"] for plain, ours in pairs
            ),
            f"{variant}_tokens_per_second": tokens / statistics.median(ours["step"] for ours in measured),
        }
    return result


class Clock(TrainerCallback):
    """Times of the steps."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **options: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def measure(variant: str, base: str, steps: int, rows: int, length: int) -> dict[str, float]:
    """{"step", "bytes"}: the median time of a step, and peak memory beyond the loaded model."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        trainer, clock = make_trainer(variant, base, steps, rows, length, directory)
        memory = peak_beyond(trainer.train)["bytes"]
    spans = [end - start for start, end in itertools.pairwise(clock.ends[1:])]
    return {"step": statistics.median(spans), "bytes": memory}


def make_trainer(
    variant: str, source: str, steps: int, rows: int, length: int, directory: str
) -> tuple[Any, Clock]:
    """The trainer of one variant, on the manual that ships with Python."""
    if variant == "plain":
        base = load_base(source)
        model, tokenizer = base.model, base.tokenizer
    else:
        conversion = convert(source, calibration="none")
        model, tokenizer = conversion.model, conversion.tokenizer
        model.config.loss_impl = "fused" if variant == "exact" else "sampled"
    ids = tokenizer(python_manual(), verbose=False)["input_ids"]
    count = steps * rows
    data = [
        Encoded(part, [0.0] * length, part)
        for part in (ids[i * length : (i + 1) * length] for i in range(count))
    ]
    clock = Clock()
    options: dict[str, Any] = {
        "model": model,
        "args": arguments_for(directory, steps, rows),
        "train_dataset": data,
        "callbacks": [clock],
    }
    collate = Collator(0)
    if variant == "plain":

        def plain(batch: list[Encoded]) -> dict[str, torch.Tensor]:
            return {name: x for name, x in collate(batch).items() if name != "numeric_values"}

        return Trainer(data_collator=plain, **options), clock
    recipe = TrainingRecipe(output=str(Path(directory) / "out"), learning_rate=1e-5, heads_learning_rate=1e-5)
    lengths = [length] * count
    number = model.config.num_token_id
    return CausalTrainer(
        recipe=recipe, num_token_id=number, lengths=lengths, data_collator=collate, **options
    ), clock


def arguments_for(directory: str, steps: int, rows: int) -> TrainingArguments:
    """The same for all."""
    return TrainingArguments(
        output_dir=directory, max_steps=steps, per_device_train_batch_size=rows, learning_rate=1e-5,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        remove_unused_columns=False, dataloader_pin_memory=False, seed=0,
    )  # fmt: skip


def tables(record: Record) -> list[Table]:
    """One row per variant."""
    rows = [
        (
            NAMES[variant],
            f"{record.figures[f'{variant}_tokens_per_second']:.0f}",
            f"{record.figures[f'{variant}_ratio']:.2f}×",
            f"{record.figures[f'{variant}_memory_ratio']:.2f}×",
        )
        for variant in VARIANTS
    ]
    title = "Training, {rows} × {length} tokens per step".format(**record.options)
    return [Table(title, ("", "tokens per second", "against plain", "peak memory against plain"), rows)]


def headlines(record: Record) -> list[tuple[str, str]]:
    """Throughput of both losses."""
    values = "{exact_ratio:.2f}×; {sampled_ratio:.2f}×".format(**record.figures)
    what = "training against transformers' Trainer, tokens per second: exact loss; sampled negatives"
    return [(what, values)]


if __name__ == "__main__":
    main()
