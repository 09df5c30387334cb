"""Does every input end in a result or in a clear error?

Runs the targets of tests/fuzzing on seeded inputs, in processes of their own: hypothesis strategies, and
mutations of real files; native code under AddressSanitizer. An input that crashes, hangs, raises an error of
some library or changes a text is written to tests/corpus, where it is a test from then on.

    make fuzz
    python benchmarks/fuzz.py --targets rows native --inputs 5000 --seed 7
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import Option, Record, Table, run_benchmark, watched

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

ALL = "all"
OPTIONS = {
    "inputs": Option("inputs of all targets together", 120_000, smoke=60, quick=2000),
    "seed": Option("of everything that is drawn", 0, smoke=0),
    "targets": Option("only those whose names begin so", (ALL,), smoke=(ALL,)),
    "jobs": Option("processes; 0 runs in this one, without sanitisers", os.cpu_count() or 1, smoke=0),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Fuzz, and print a table or one JSON object; the exit code says whether anything failed."""
    failed: list[Path] = []
    measure = functools.partial(figures, failed=failed)
    run_benchmark(__file__, __doc__, OPTIONS, measure, tables, quick="2,000 inputs", argv=argv)
    if failed:
        names = ", ".join(os.path.relpath(file) for file in failed)
        raise SystemExit(f"{len(failed)} failing inputs are kept: {names}")


def figures(arguments: argparse.Namespace, *, failed: list[Path]) -> dict[str, Any]:
    """Counts per target."""
    from fuzzing.judging import Counts
    from fuzzing.running import batches, keep, run
    from fuzzing.targets import TARGETS

    chosen = [
        target for target in TARGETS if arguments.targets == (ALL,) or _named(target.name, arguments.targets)
    ]
    if not chosen:
        raise SystemExit(
            f"no target begins with {', '.join(arguments.targets)}; there are: {_names(TARGETS)}"
        )
    parts = batches(chosen, inputs=arguments.inputs, seed=arguments.seed)
    print(f"{sum(part.count for part in parts):,} inputs, seed {arguments.seed}", file=sys.stderr, flush=True)
    counts = {target.name: Counts() for target in chosen}
    for _, (part, outcome) in zip(watched(parts, "batches"), run(parts, jobs=arguments.jobs), strict=True):
        counts[part.target.name] += outcome
    for target in chosen:
        for file, said in keep(target, arguments.seed, counts[target.name].failures):
            print(f"{target.name}: {said}", file=sys.stderr)
            failed.append(file)
    whole = functools.reduce(Counts.__iadd__, counts.values(), Counts())
    return {"targets": {name: own.figures() for name, own in counts.items()}, "all": whole.figures()}


def _named(name: str, beginnings: Sequence[str]) -> bool:
    return name.startswith(tuple(beginnings))


def _names(targets: Sequence[Any]) -> str:
    return ", ".join(repr(target.name) for target in targets)


def tables(record: Record) -> list[Table]:
    """One row per target."""
    rows = [
        (
            name,
            *(f"{counts[key]:,}" for key in ("inputs", "results", "errors", "failures")),
            f"{counts['seconds']:.0f}",
        )
        for name, counts in {**record.figures["targets"], "all": record.figures["all"]}.items()
    ]
    columns = ("target", "inputs", "results", "clear errors", "failures", "seconds")
    return [Table("Inputs, and what they came to", columns, rows)]


if __name__ == "__main__":
    main()
