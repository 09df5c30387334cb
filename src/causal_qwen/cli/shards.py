"""--processes N: a file divided among N processes, each with an engine of its own, and put together in order.

Process I takes every N-th row, beginning with the I-th, and writes a part beside the output; a part that was
cut is continued, one that is whole is kept, and when all are, their lines are dealt out again in turn. This
module does not know what a row is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from causal_qwen.cli.console import note
from causal_qwen.cli.interruption import on_interruption

__all__ = ["Shard", "divided", "gathered"]

Row = TypeVar("Row")


class Shard(NamedTuple):
    """The rows of one process: every ``every``-th, from the ``first`` on."""

    first: int = 0
    every: int = 1

    @classmethod
    def read(cls, text: str) -> Shard:
        """From "I/N".

        Raises:
            ValueError: If it is not a part of a whole.
        """
        first, slash, every = text.partition("/")
        if not (slash and first.isdecimal() and every.isdecimal() and int(first) < int(every)):
            raise ValueError(f"--shard {text:.40}: write I/N, with I from 0 to N - 1")
        return cls(int(first), int(every))

    def of(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Its rows."""
        return itertools.islice(rows, self.first, None, self.every)

    def row(self, place: int) -> int:
        """The index, among all rows, of its ``place``-th."""
        return self.first + self.every * place


def divided(output: Path, processes: int, *extra: str, seed: int | None = None) -> Iterator[dict[str, Any]]:
    """Run this command line in several processes, and yield the lines of all parts in their order.

    Args:
        output: What the whole is written to; parts lie beside it.
        processes: How many.
        *extra: Words for each of them behind those of this command line.
        seed: Of a run that samples; one that was cut goes on with its own.

    Raises:
        ValueError: If parts of another run lie there, or a process fails.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    plan = output.with_name(f"{output.name}.parts")
    name = f"{output.name}.part-{{}}-of-{processes}.jsonl"
    parts = [output.with_name(name.format(index)) for index in range(processes)]
    arguments = [word for word in sys.argv[1:] if word != "--json"]
    facts: dict[str, Any] = {"arguments": arguments, "seed": seed}
    if plan.is_file():
        earlier = json.loads(plan.read_text(encoding="utf-8"))
        if earlier["arguments"] != arguments:
            raise ValueError(f"{plan} is of another run; remove it and the parts beside it to begin anew")
        facts = earlier
    plan.write_text(json.dumps(facts), encoding="utf-8")
    on_interruption(lambda: f"parts beside {output} are kept; the same command goes on")
    _run([*arguments, *extra], facts["seed"], parts)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(part.open(encoding="utf-8")) for part in parts]
        for stream in itertools.cycle(streams):
            line = stream.readline()
            if not line:
                break
            yield json.loads(line)
    for file in (*parts, plan):
        file.unlink()


def gathered(output: Path, processes: int, *, seed: int | None = None) -> Iterator[dict[str, Any]]:
    """As `divided`, and the output has the lines as JSONL when the last one is there."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            for line in divided(output, processes, seed=seed):
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
                yield line
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)


def _run(arguments: list[str], seed: int | None, parts: list[Path]) -> None:
    missing = [index for index, part in enumerate(parts) if not part.is_file()]
    note(f"{len(missing)} of {len(parts)} processes")
    run = "from causal_qwen_command import main; main()"
    running = {}
    threads = max((os.cpu_count() or 1) // len(parts), 1)
    try:
        for index in missing:
            own = ["--processes", "1", "--shard", f"{index}/{len(parts)}", "--output", str(parts[index])]
            own += [] if seed is None else ["--seed", str(seed)]
            running[index] = subprocess.Popen(
                [sys.executable, "-c", run, *arguments, *own],
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            )
        failed = [index for index, process in running.items() if process.wait() != 0]
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
                process.wait()
    if failed:
        raise ValueError(f"process {failed[0]} of {len(parts)} failed, see above; the same command goes on")
