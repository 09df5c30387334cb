"""Is a converted model its base? Logits, deterministic choices and the One-vs-Rest law on held-out text.

Once as conversion calibrates it, and beside it with the published constants and with those of the
configuration alone: the same measurement as ``causal-qwen parity --calibration NAME``.

    python benchmarks/transfer.py                  # about a minute
    python benchmarks/transfer.py --quick --json   # on less text
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from causal_qwen.conversion import bundled_text, convert, load_base, measure_parity
from measure import BASE, Option, Record, Table, run_benchmark, watched

CALIBRATIONS = ("default", "published", "none")
OPTIONS = {"base": BASE, "characters": Option("of held-out text, at most", 1_000_000, smoke=300, quick=2000)}


def main(argv: Sequence[str] | None = None) -> None:
    """Convert three times, and compare with the base."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="less text", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parity of each calibration."""
    base = load_base(arguments.base)
    text = bundled_text("heldout")[: arguments.characters]
    return {
        name: asdict(measure_parity(convert(base, calibration=name).model, base, text))
        for name in watched(CALIBRATIONS, "calibrations")
    }


def tables(record: Record) -> list[Table]:
    """One row per calibration."""
    rows = [
        (
            f"`{name}`",
            f"{parity['max_abs_logit_diff']}",
            f"{parity['argmax_agreement']:.1%}",
            _text(parity["ovr_prob_sum_median"]),
            _text(parity["ovr_loss"]),
        )
        for name, parity in ((name, record.figures[name]) for name in CALIBRATIONS)
    ]
    columns = (
        "calibration",
        "largest logit difference",
        "choices that are the base's",
        "median of ΣP_k",
        "One-vs-Rest loss per token",
    )
    title = "{positions:,} positions of held-out text, {dtype}".format(**record.figures["default"])
    return [Table(title, columns, rows)]


def headlines(record: Record) -> list[tuple[str, str]]:
    """What conversion keeps, and what it adds."""
    ours, published = record.figures["default"], record.figures["published"]
    agreement = f"{ours['argmax_agreement']:.1%} (published constants: {published['argmax_agreement']:.1%})"
    return [
        ("largest logit difference to the base on held-out text", f"{ours['max_abs_logit_diff']}"),
        ("deterministic choices that are the base's", agreement),
        ("parameters added", f"{ours['added_parameters_fraction']:.2%}"),
    ]


def _text(value: float) -> str:
    return f"{value:,.0f}" if value > 100 else f"{value:.3f}"


if __name__ == "__main__":
    main()
