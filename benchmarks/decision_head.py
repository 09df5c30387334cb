"""What does one decision cost: loc_S and scale_S of a few positions, against the plain head's F.linear?

F.linear alone is what a softmax model computes per token. The causal head needs W·loc_U and |W|·scale_U.

    python benchmarks/decision_head.py                 # both sizes, batches 1 to 16, memory
    python benchmarks/decision_head.py --quick --json  # the figures of the acceptance list
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from causal_qwen.kernels.decision import TokenScorer
from measure import (
    Option,
    Record,
    Table,
    in_child,
    interleaved,
    peak_beyond,
    ratio,
    run_benchmark,
    seconds,
    watched,
)

WIDTHS = {49_152: 576, 151_936: 896, 1024: 64}  # D by V: the embedded base, Qwen2.5-0.5B, tests
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIONS = {
    "vocabularies": Option("sizes V, the last one measured closely", (49_152, 151_936), smoke=(1024,)),
    "batches": Option("positions at a time", (1, 2, 4, 8, 16), smoke=(1, 2)),
    "repeats": Option("interleaved rounds per size", 30, smoke=2),
}
QUICK = {
    "float32": "one token, float32",
    "bfloat16": "one token, bfloat16",
    "batch8": "eight tokens, float32",
}
VARIANTS = ("linear", "dense", "ours", "ours, no compiler", "ours, choice")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print tables or one JSON object."""
    with torch.inference_mode():
        run_benchmark(
            __file__, __doc__, OPTIONS, figures, tables,
            quick="only the figures of the acceptance list", argv=argv, child=child,
        )  # fmt: skip


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Quick: ratios of the largest size. Else times of every variant, first-use compile times and memory."""
    largest = arguments.vocabularies[-1]
    if arguments.quick:
        cases = {"float32": ("float32", 1), "bfloat16": ("bfloat16", 1), "batch8": ("float32", 8)}
        return {
            f"{name}_ratio": ratio(
                interleaved(decisions(("linear", "ours"), largest, batch, dtype), repeats=arguments.repeats),
                "ours", "linear",
            )
            for name, (dtype, batch) in cases.items()
        }  # fmt: skip
    sizes = [
        (V, batch, dtype) for V in arguments.vocabularies for dtype in DTYPES for batch in arguments.batches
    ]
    times = [measured(*size, repeats=max(arguments.repeats // 3, 2)) for size in watched(sizes, "sizes")]
    tasks = [{"variant": name, "dtype": dtype, "vocab": largest} for dtype in DTYPES for name in VARIANTS]
    return {"times": times, "memory": [task | in_child(__file__, task) for task in watched(tasks, "memory")]}


def measured(vocab: int, batch: int, dtype: str, *, repeats: int) -> dict[str, Any]:
    """Times of every variant at one size."""
    runs = decisions(VARIANTS, vocab, batch, dtype)
    first_use = seconds(runs["ours"])
    size = {"vocab": vocab, "width": WIDTHS[vocab], "batch": batch, "dtype": dtype}
    return size | {"first_use": first_use, "times": interleaved(runs, repeats=repeats)}


def child(variant: str, dtype: str, vocab: int) -> dict[str, float]:
    """Peak memory of one decision at batch 1, after one that compiles on a matrix a fifth as large."""
    with torch.inference_mode():
        decisions((variant,), vocab // 5, 1, dtype, width=WIDTHS[vocab])[variant]()
        return peak_beyond(decisions((variant,), vocab, 1, dtype)[variant])


def decisions(
    variants: tuple[str, ...], vocab: int, batch: int, dtype: str, *, width: int | None = None
) -> dict[str, Callable[[], object]]:
    """One decision by each variant."""
    generator = torch.Generator().manual_seed(0)
    width = width or WIDTHS[vocab]
    weight = torch.empty(vocab, width, dtype=DTYPES[dtype]).normal_(0, 0.02, generator=generator)
    loc_U = torch.randn(batch, width, generator=generator)
    scale_U = torch.rand(batch, width, generator=generator) + 0.01
    narrow_loc, narrow_scale = loc_U.to(weight.dtype), scale_U.to(weight.dtype)
    scorer = TokenScorer(weight, threshold=torch.zeros(vocab))

    def dense() -> None:
        F.linear(narrow_loc, weight)
        F.linear(narrow_scale, weight.abs())

    def without_compiler() -> None:
        os.environ["CAUSAL_QWEN_COMPILE"] = "0"
        try:
            TokenScorer(weight).scores(loc_U, scale_U)
        finally:
            del os.environ["CAUSAL_QWEN_COMPILE"]

    runs: dict[str, Callable[[], object]] = {
        "linear": lambda: F.linear(narrow_loc, weight),
        "dense": dense,
        "ours": lambda: TokenScorer(weight).scores(loc_U, scale_U),
        "ours, no compiler": without_compiler,
        "ours, choice": lambda: scorer.z_scores(loc_U, scale_U)[1],
    }
    return {name: runs[name] for name in variants}


def tables(record: Record) -> list[Table]:
    """Ratios to F.linear, and memory."""
    vocab = record.options["vocabularies"][-1]
    if "times" not in record.figures:
        ratios = [(label, f"{record.figures[f'{name}_ratio']:.2f}×") for name, label in QUICK.items()]
        title = f"loc_S and scale_S, {vocab:,} × {WIDTHS[vocab]}, against the plain head's F.linear"
        return [Table(title, ("", "time"), ratios)]
    rows = []
    for row in record.figures["times"]:
        linear = statistics.median(row["times"]["linear"])
        rows.append(
            (
                f"{row['vocab']:,} × {row['width']}",
                row["dtype"],
                str(row["batch"]),
                f"{linear * 1e3:.1f}",
                *(f"{ratio(row['times'], name, 'linear'):.2f}" for name in VARIANTS[1:]),
                f"{row['first_use']:.1f}",
            )
        )
    memory = [
        (task["variant"], task["dtype"], task.get("error") or f"{task['bytes'] / 1e6:,.1f}")
        for task in record.figures["memory"]
    ]
    columns = ("V × D", "dtype", "batch", "F.linear ms", *VARIANTS[1:], "first use s")
    return [
        Table("Ratios to F.linear", columns, rows),
        Table(f"Peak memory beyond W, V = {vocab:,}, batch 1", ("variant", "dtype", "MB"), memory),
    ]


if __name__ == "__main__":
    main()
