"""Training throughput and memory against transformers' Trainer on the plain base.

The same rows, batch size, precision and optimizer: the embedded base with transformers' own Trainer and
cross-entropy, and converted with `CausalTrainer`, with the exact loss and with sampled negatives. Each in a
process of its own; times are the median of the steps after the first two.

    python benchmarks/training.py                  # about ten minutes on two cores
    python benchmarks/training.py --quick --json   # fewer and shorter steps
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from causal_qwen.conversion import convert, load_base
from causal_qwen.data import Collator, Encoded
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.trainer import CausalTrainer
from measure import in_child, peak_beyond, progress, show

VARIANTS = ("plain", "exact", "sampled")


def main() -> None:
    """Measure each variant in a child, in rounds, and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=4, help="sequences per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(**json.loads(arguments.child))))
        return
    if arguments.quick:
        arguments.steps, arguments.rows, arguments.length, arguments.rounds = 5, 2, 128, 1
    sizes = {"steps": arguments.steps, "rows": arguments.rows, "length": arguments.length}
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for variant in progress([v for _ in range(arguments.rounds) for v in VARIANTS], "variants"):
        run = in_child(__file__, {"variant": variant, **sizes})
        if "error" in run:
            raise SystemExit(f"{variant}: {run['error']}")
        runs[variant].append(run)
    result = summary(runs, arguments.rows * arguments.length)
    if arguments.json:
        print(json.dumps(result))
        return
    rows = [
        (
            v,
            f"{result[f'{v}_tokens_per_second']:.0f}",
            f"{result[f'{v}_ratio']:.2f}",
            f"{result[f'{v}_memory_ratio']:.2f}",
        )
        for v in VARIANTS
    ]
    show("training", ("", "tokens/s", "against plain", "peak memory against plain"), rows)


def summary(runs: dict[str, list[dict[str, Any]]], tokens: int) -> dict[str, float]:
    """Throughput and memory ratios, round by round against the plain base of the same round."""
    result: dict[str, float] = {}
    for variant, found in runs.items():
        pairs = list(zip(runs["plain"], found, strict=True))
        result |= {
            f"{variant}_ratio": statistics.median(plain["step"] / ours["step"] for plain, ours in pairs),
            f"{variant}_memory_ratio": statistics.median(
                ours["bytes"] / plain["bytes"] for plain, ours in pairs
            ),
            f"{variant}_tokens_per_second": tokens / statistics.median(ours["step"] for ours in found),
        }
    return result


class Clock(TrainerCallback):
    """Times of the steps."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **options: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def measure(variant: str, steps: int, rows: int, length: int) -> dict[str, float]:
    """{"step", "bytes"}: the median time of a step, and peak memory beyond the loaded model."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        trainer, clock = make_trainer(variant, steps, rows, length, directory)
        memory = peak_beyond(trainer.train)["bytes"]
    spans = [end - start for start, end in zip(clock.ends[1:], clock.ends[2:], strict=False)]
    return {"step": statistics.median(spans), "bytes": memory}


def make_trainer(variant: str, steps: int, rows: int, length: int, directory: str) -> tuple[Any, Clock]:
    """The trainer of one variant, on the manual that ships with Python."""
    if variant == "plain":
        base = load_base("smollm2")
        model, tokenizer = base.model, base.tokenizer
    else:
        conversion = convert("smollm2", calibration="none")
        model, tokenizer = conversion.model, conversion.tokenizer
        model.config.loss_impl = "fused" if variant == "exact" else "sampled"
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = tokenizer(text, verbose=False)["input_ids"]
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


if __name__ == "__main__":
    main()
