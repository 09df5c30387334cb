"""What does a cache of keys and values save? One step of our decoder at growing lengths, with and without.

With a cache a step reads the weights and a little per token; without one it reads the whole text again.

    python benchmarks/decoder_cache.py                  # under a minute
    python benchmarks/decoder_cache.py --quick --json   # up to 1,024 tokens
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from causal_qwen.conversion import bundled_text, load_base
from causal_qwen.decoder import Engine
from measure import BASE, Option, Record, Table, run_benchmark, seconds

KINDS = ("with a cache", "without")
OPTIONS = {
    "base": BASE,
    "lengths": Option("tokens so far", (64, 256, 1024, 4096), smoke=(64, 128), quick=(64, 256, 1024)),
    "steps": Option("steps with a cache, of which the median counts", 12, smoke=2),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and draw both curves."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="shorter texts", argv=argv, picture=draw)


@torch.no_grad()
def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one step by the tokens so far: O(n) with a cache, O(n²) without."""
    base = load_base(arguments.base)
    engine = Engine.from_model(base.model)
    ids = base.tokenizer(bundled_text("heldout"), return_tensors="pt").input_ids
    text = ids.repeat(1, 1 + max(arguments.lengths) // ids.shape[1])  # (1, T), T > every length
    rows = {}
    for length in arguments.lengths:
        prompt = text[:, :length]
        whole = [seconds(functools.partial(engine.hidden, prompt)) for _ in range(2)]
        cache = engine.new_cache(1, length + arguments.steps)
        engine.hidden(prompt, None, cache)
        step = functools.partial(engine.hidden, ids[:, :1], None, cache)
        steps = [seconds(step) for _ in range(arguments.steps)]
        rows[str(length)] = {"with a cache": statistics.median(steps), "without": min(whole)}
    return rows


def tables(record: Record) -> list[Table]:
    """One row per length."""
    rows = [
        (f"{length:,}", *(f"{1000 * record.figures[str(length)][kind]:.1f}" for kind in KINDS))
        for length in record.options["lengths"]
    ]
    return [Table("Milliseconds per step", ("tokens so far", *KINDS), rows)]


def draw(record: Record, file: Path) -> None:
    """Both curves of a step's cost on logarithmic axes, with the slope of n² for the eye."""
    from matplotlib.figure import Figure

    rows = {length: record.figures[str(length)] for length in record.options["lengths"]}
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, marker in zip(KINDS, "so", strict=True):
        axes.plot(list(rows), [1000 * row[name] for row in rows.values()], marker=marker, label=name)
    ends = list(rows)[-2:]
    last = 1000 * rows[ends[-1]]["without"]
    axes.plot(ends, [last * (n / ends[-1]) ** 2 for n in ends], ":", color="gray", label="slope of n²")
    axes.set(xscale="log", yscale="log", xlabel="tokens so far", ylabel="milliseconds per step")
    axes.set_xticks(list(rows), [f"{length:,}" for length in rows])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
