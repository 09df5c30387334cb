"""Whether `train --estimate` says what a run takes: its peak of memory against the one that was foretold.

Real runs of a few steps, each in a process of its own, from the converted base to the saved model. The
peak is the resident set of the whole process, Python and its libraries included, as the kernel has kept it;
the estimate is made in another process, by configuration and rows alone, without weights.

    python benchmarks/memory.py                  # about twenty minutes on two cores
    python benchmarks/memory.py --quick --json   # two steps each
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from causal_qwen.conversion import convert
from causal_qwen.conversion.skeleton import skeleton
from causal_qwen.training import TrainingRecipe, train
from causal_qwen.training.estimate import estimate_memory, prepare
from causal_qwen.training.framework import framework_bytes
from causal_qwen.training.preparation import load_processor, prepare_rows
from causal_qwen.training.workload import measured_workload
from measure import BASE, Option, Record, Table, in_child, python_manual, run_benchmark, watched

CHARACTERS_PER_TOKEN = 6  # of the manual, at most
TABLE_ROWS = 60
# What is trained, and how.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "full, float32, 2 × 96": {"method": "full", "batch_size": 2, "max_length": 96},
    "full, bfloat16, checkpointing, 2 × 512": {
        "method": "full",
        "batch_size": 2,
        "max_length": 512,
        "bf16": True,
        "gradient_checkpointing": True,
    },
    "lora, float32, 4 × 256": {"method": "lora", "batch_size": 4, "max_length": 256},
    "heads, a table": {
        "method": "heads",
        "batch_size": 4,
        "template": "{weight} kilograms of apples cost {price}",
        "target": "price",
    },
    "full, sampled negatives alone, 4 × 128, twice": {
        "method": "full",
        "batch_size": 4,
        "max_length": 128,
        "accumulation": 2,
        "loss_impl": "sampled",
        "softmax_loss_weight": 0,
        "classification_loss_weight": 1,
    },
    "lora, bfloat16, rivals, 2 × 384": {
        "method": "lora",
        "batch_size": 2,
        "max_length": 384,
        "bf16": True,
        "ovr_rivals": 32,
    },
}
OPTIONS = {
    "base": BASE,
    "steps": Option("steps of training", 3, smoke=2, quick=2),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each configuration in a child, foretell it in another, and print the ratios."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="two steps each", argv=argv, child=child)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """By configuration: what was foretold, what was measured, and their ratio."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "converted"
        convert(arguments.base, model, calibration="none")
        for name, settings in watched(list(CONFIGURATIONS.items()), "configurations"):
            task = {"model": str(model), "steps": arguments.steps, "settings": settings}
            foretold, measured = (in_child(__file__, {"what": what, **task}) for what in ("estimate", "run"))
            for outcome in (foretold, measured):
                if "error" in outcome:
                    raise SystemExit(f"{name}: {outcome['error']}")
            ratio = foretold["bytes"] / measured["bytes"]
            result[name] = {"measured": measured["bytes"], "ratio": ratio, **foretold}
    return result


def child(what: str, model: str, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The estimate of one configuration, or the peak of its run."""
    with tempfile.TemporaryDirectory() as directory:
        # What integers would change is measured where it is the highest moment.
        proof = {"precision_proof": settings["method"] == "heads"}
        fields = {"model": model, "max_steps": steps, "save_steps": 0, "logging_steps": 1} | proof | settings
        recipe = TrainingRecipe.from_mapping(fields | {"output": str(Path(directory) / "out")})
        rows = table_rows() if recipe.target else text_rows(recipe)
        return foretell(recipe, rows) if what == "estimate" else run(recipe, rows)


def foretell(recipe: TrainingRecipe, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """{"bytes", "moment", "parts"}, without weights."""
    workload = measured_workload(prepare_rows(recipe, load_processor(recipe), rows), recipe)
    bare = skeleton(recipe.model, dtype=recipe.dtype)
    module = prepare(bare, recipe)
    estimate = estimate_memory(bare, module, recipe, workload.batch, framework=framework_bytes())
    return {"bytes": estimate.total, "moment": estimate.peak, "parts": estimate.parts}


def run(recipe: TrainingRecipe, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """{"bytes"}: the most that this process has held, when the run is over."""
    train(recipe, rows=rows, progress=None)
    # Not ru_maxrss: a child process inherits the peak of the process that started it.
    status = Path("/proc/self/status").read_text()
    return {"bytes": int(status.partition("VmHWM:")[2].split()[0]) * 1024}


def text_rows(recipe: TrainingRecipe) -> list[dict[str, Any]]:
    """Enough of Python's manual for all steps, cut into rows of full length, and some to evaluate on."""
    count = (recipe.max_steps or 1) * recipe.batch_size * recipe.accumulation + 4
    return [{"text": python_manual()[: count * recipe.max_length * CHARACTERS_PER_TOKEN]}]


def table_rows() -> list[dict[str, Any]]:
    """A price by weight."""
    return [{"weight": weight, "price": 3 * weight + 2} for weight in range(1, TABLE_ROWS + 1)]


def tables(record: Record) -> list[Table]:
    """One row per configuration."""
    rows = [
        (
            name,
            f"{entry['bytes'] / 1e9:.2f} GB",
            str(entry["moment"]),
            f"{entry['measured'] / 1e9:.2f} GB",
            f"{entry['ratio']:.2f}×",
        )
        for name, entry in record.figures.items()
    ]
    columns = ("what is trained", "estimate", "its peak is at", "measured", "estimate against measured")
    return [Table("Peak memory of a run", columns, rows)]


def headlines(record: Record) -> list[tuple[str, str]]:
    """The farthest ratios."""
    ratios = [entry["ratio"] for entry in record.figures.values()]
    what = "memory that `train --estimate` foretells against what a run took, the least and the most"
    return [(what, f"{min(ratios):.2f}×; {max(ratios):.2f}×")]


if __name__ == "__main__":
    main()
