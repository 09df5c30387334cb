"""What does one decision cost: loc_S and scale_S of a few positions, against the plain head's F.linear?

F.linear alone is what a softmax model computes per token. The causal head needs W·loc_U and |W|·scale_U.

    python benchmarks/decision_head.py                 # both sizes, batches 1 to 16, memory
    python benchmarks/decision_head.py --quick --json  # the figures of the acceptance list
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from causal_qwen.kernels.decision import TokenScorer
from measure import in_child, interleaved, peak_beyond, progress, ratio, seconds, show

SIZES = ((49_152, 576), (151_936, 896))
BATCHES = (1, 2, 4, 8, 16)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VARIANTS = ("linear", "dense", "ours", "ours, no compiler", "ours, choice")


def main() -> None:
    """Measure, and print tables or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the figures of the acceptance list")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--repeats", type=int, default=30, help="interleaved rounds per size")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(**json.loads(arguments.child))))
        return
    result: dict[str, Any] = quick(arguments.repeats) if arguments.quick else full(arguments.repeats)
    if arguments.json:
        print(json.dumps(result))
    elif arguments.quick:
        rows = [(name, f"{value:.3f}") for name, value in result.items()]
        show("loc_S and scale_S against F.linear, 151,936 × 896", ("figure", "ratio"), rows)
    else:
        show_full(result)


def quick(repeats: int) -> dict[str, float]:
    """Ratios at (151,936, 896), batch 1 in both precisions and batch 8 in float32."""
    figures = {}
    for name, dtype, batch in (
        ("float32", "float32", 1),
        ("bfloat16", "bfloat16", 1),
        ("batch8", "float32", 8),
    ):
        runs = decisions(("linear", "ours"), *SIZES[1], batch, dtype)
        figures[f"{name}_ratio"] = ratio(interleaved(runs, repeats=repeats), "ours", "linear")
    return figures


def full(repeats: int) -> dict[str, Any]:
    """Times of every variant, first-use compile times, and peak memory of one decision."""
    tasks = [(*size, batch, dtype) for size in SIZES for dtype in DTYPES for batch in BATCHES]
    rows = []
    for vocab, width, batch, dtype in progress(tasks, "sizes"):
        runs = decisions(VARIANTS, vocab, width, batch, dtype)
        first_use = seconds(runs["ours"])
        times = interleaved(runs, repeats=max(repeats // 3, 3))
        rows.append(
            {
                "vocab": vocab,
                "width": width,
                "batch": batch,
                "dtype": dtype,
                "first_use": first_use,
                "times": times,
            }
        )
    memory = [
        {"variant": name, "dtype": dtype} | in_child(__file__, {"variant": name, "dtype": dtype})
        for dtype in DTYPES
        for name in VARIANTS
    ]
    return {"times": rows, "memory": memory}


def child(variant: str, dtype: str) -> dict[str, float]:
    """Peak memory of one decision at batch 1, after one that compiles on a matrix a fifth as large."""
    decisions((variant,), 30_000, 896, 1, dtype)[variant]()
    return peak_beyond(decisions((variant,), *SIZES[1], 1, dtype)[variant])


def decisions(
    variants: tuple[str, ...], vocab: int, width: int, batch: int, dtype: str
) -> dict[str, Callable[[], object]]:
    """One decision by each variant."""
    generator = torch.Generator().manual_seed(0)
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


def show_full(result: dict[str, Any]) -> None:
    """The tables."""
    rows = []
    for row in result["times"]:
        cells = [f"{ratio(row['times'], name, 'linear'):.2f}" for name in VARIANTS[1:]]
        linear = statistics.median(row["times"]["linear"])
        rows.append(
            (
                f"{row['vocab']:,} × {row['width']}",
                row["dtype"],
                str(row["batch"]),
                f"{linear * 1e3:.1f}",
                *cells,
                f"{row['first_use']:.1f}",
            )
        )
    columns = ("V × H", "dtype", "batch", "F.linear ms", *VARIANTS[1:], "first use s")
    show("Ratios to F.linear", columns, rows)
    memory = [(m["variant"], m["dtype"], f"{m['bytes'] / 1e6:,.1f}") for m in result["memory"]]
    show("Peak memory beyond W, 151,936 × 896, batch 1", ("variant", "dtype", "MB"), memory)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
