"""Writes published figures into the pages: ``make results``. Runs no benchmark.

A page has regions, and what stands between their marks is replaced:

    <!-- figures: decode -->     every table of benchmarks/results/decode.json, with its command
    <!-- headlines: a b.quick -->  one table of the headlines of several files
    <!-- end -->

A file's tables and headlines are those of the script that wrote it (`tables`, `headlines`): a page shows what
the script prints. ".quick" names the file of a quick run.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure import Record, Table

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    ROOT / page
    for page in (
        "README.md",
        "docs/results.md",
        "docs/howto/decoder.md",
        "docs/howto/simulate.md",
        "docs/theory/initialisation.md",
    )
)
REGION = re.compile(r"<!-- (figures|headlines): ([\w. ]+) -->\n(.*?)<!-- end -->", re.DOTALL)


def main() -> int:
    """Render every page; regions whose file is missing stay as they are, and are named."""
    missing = set()
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after, errors = rendered(before)
        missing |= set(errors)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")
    for error in sorted(missing):
        print(error, file=sys.stderr)
    return 1 if missing else 0


def rendered(text: str) -> tuple[str, list[str]]:
    """A page with its regions filled from the files, and why some could not be."""
    errors = []

    def fill(region: re.Match[str]) -> str:
        kind, names = region[1], region[2].split()
        try:
            content = shown(kind, [Record.load(name) for name in names])
        except FileNotFoundError as error:
            errors.append(str(error))
            return region[0]
        return f"<!-- {kind}: {' '.join(names)} -->\n\n{content}\n\n<!-- end -->"

    return REGION.sub(fill, text), errors


def shown(kind: str, records: Sequence[Record]) -> str:
    """Markdown of one region."""
    if kind == "headlines":
        return markdown(Table("", ("what", "figure", "command"), list(headline_rows(records))))
    return "\n\n".join(
        part
        for record in records
        for part in (measured_by(record), *map(markdown, script_of(record).tables(record)))
    )


def headline_rows(records: Sequence[Record]) -> Iterator[tuple[str, str, str]]:
    """What, figure and command; a command is said once."""
    for record in records:
        command = f"`{record.command}`"
        for what, figure in script_of(record).headlines(record):
            yield what, figure, command
            command = "the same"


def measured_by(record: Record) -> str:
    """The command, and the machine that its figures come from."""
    machine = "{cores} cores ({vectors}), {memory_gb} GB, torch {torch}, transformers {transformers}"
    return f"`{record.command}`, on {machine.format(**record.machine)}:"


def markdown(table: Table) -> str:
    """A table below its title."""
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([*([f"{table.title}:", ""] if table.title else []), *lines])


def script_of(record: Record) -> Any:
    """The benchmark that wrote the record, as a module."""
    return importlib.import_module(record.name.partition(".")[0])


if __name__ == "__main__":
    sys.exit(main())
