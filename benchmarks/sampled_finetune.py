"""Does training on sampled negatives arrive where the exact loss arrives?

Fine-tunes the converted base twice on the same batches of the manual that ships with Python, once with the
exact loss and once with sampled negatives, and measures the exact loss of both on held-out pages.

    python benchmarks/sampled_finetune.py                  # 200 steps: about 8 minutes on two cores
    python benchmarks/sampled_finetune.py --quick --json   # a few steps, to see that it runs
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from causal_qwen.conversion import Conversion, convert
from measure import BASE, Option, Record, Table, python_manual, run_benchmark, seconds, watched

HELD_OUT = 8  # batches
OPTIONS = {
    "base": BASE,
    "steps": Option("steps of training", 200, smoke=2, quick=4),
    "rows": Option("sequences per step", 2, smoke=1, quick=1),
    "length": Option("tokens per sequence", 96, smoke=16, quick=32),
    "negatives": Option("tokens that the sampled loss draws", 4096, smoke=32),
    "learning_rate": Option("of all parameters", 2e-5, smoke=2e-5),
    "every": Option("steps between measurements", 40, smoke=1, quick=2),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Train twice, and print both curves."""
    run_benchmark(
        __file__, __doc__, OPTIONS, figures, tables, quick="a few short steps, without calibration", argv=argv
    )


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both curves, and the ratio of the final losses."""
    results: dict[str, Any] = {}
    for impl in ("fused", "sampled"):
        conversion = convert(arguments.base, calibration="none" if arguments.quick else "default")
        results[impl] = train(conversion, impl, arguments)
    fused, sampled = (results[impl]["curve"][-1]["loss"] for impl in ("fused", "sampled"))
    return {"final_loss_ratio": sampled / fused, **results}


def train(conversion: Conversion, impl: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The curve of the exact held-out loss, and the median time of a step."""
    model: Any = conversion.model
    model.config.num_negatives = arguments.negatives
    pages = batches(conversion.tokenizer, arguments)
    held_out, training = pages[:HELD_OUT], pages[HELD_OUT : HELD_OUT + arguments.steps]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.learning_rate, weight_decay=0.0, fused=True
    )

    def step(ids: Tensor) -> None:
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    torch.manual_seed(0)
    curve, times = [{"step": 0, "loss": exact_loss(model, held_out)}], []
    for count, ids in enumerate(watched(training, impl), start=1):
        model.train()
        model.config.loss_impl = impl
        times.append(seconds(lambda ids=ids: step(ids)))
        if count % arguments.every == 0 or count == arguments.steps:
            curve.append({"step": count, "loss": exact_loss(model, held_out)})
    return {"curve": curve, "seconds": statistics.median(times)}


@torch.no_grad()
def exact_loss(model: Any, held_out: list[Tensor]) -> float:
    """Mean One-vs-Rest loss over all of the vocabulary."""
    model.eval()
    model.config.loss_impl = "fused"
    losses = [model(input_ids=ids, labels=ids, output_logits=False).cls_loss.item() for ids in held_out]
    return statistics.mean(losses)


def batches(tokenizer: Any, arguments: argparse.Namespace) -> list[Tensor]:
    """Batches (rows, length) of Python's manual, in an order that is always the same."""
    ids = tokenizer(python_manual(), return_tensors="pt").input_ids[0]
    size = arguments.rows * arguments.length
    order = torch.randperm(len(ids) // size, generator=torch.Generator().manual_seed(0)).tolist()
    if len(order) < arguments.steps + HELD_OUT:
        raise SystemExit(f"the text has {len(order)} batches of {size} tokens; ask for fewer steps")
    return [ids[i * size : (i + 1) * size].view(arguments.rows, arguments.length) for i in order]


def tables(record: Record) -> list[Table]:
    """Both curves by step."""
    fused, sampled = (record.figures[impl]["curve"] for impl in ("fused", "sampled"))
    rows = [
        (str(a["step"]), f"{a['loss']:.2f}", f"{b['loss']:.2f}", f"{b['loss'] / a['loss']:.3f}×")
        for a, b in zip(fused, sampled, strict=True)
    ]
    negatives = f"{record.options['negatives']:,} negatives"
    title = "Exact One-vs-Rest loss on held-out pages, {rows} × {length} tokens per step".format(
        **record.options
    )
    return [Table(title, ("step", "trained with the exact loss", f"trained with {negatives}", "ratio"), rows)]


if __name__ == "__main__":
    main()
