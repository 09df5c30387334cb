"""Files and tables → rows, read one at a time.

A row is a mapping of fields. A row that cannot be used is named by file and line. This module knows neither
what the fields mean nor tokens.
"""

from __future__ import annotations

import csv
import glob
import importlib.resources
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["BadRow", "BadRows", "Source", "read_rows"]

logger = logging.getLogger(__name__)

PACKAGE = "package:"
MOST_WARNINGS = 3
TEXT_SUFFIXES = (".txt", ".md", ".rst")
OnBadRow = Literal["error", "skip"]
Row = Mapping[str, Any]
Source = str | Path | Iterable[Row] | Sequence[str | Path]


class BadRow(ValueError):
    """A row that cannot be used; the message says where it is and what is wrong."""


@dataclass
class BadRows:
    """What happens to rows that cannot be used, and how many there were.

    Args:
        action: "error" stops at the first; "skip" counts them.
    """

    action: OnBadRow = "error"
    count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, where: str, reason: str) -> None:
        """Refuse or count one row.

        Raises:
            BadRow: If rows may not be skipped.
        """
        if self.action == "error":
            raise BadRow(f"{where}: {reason}; mend the row, or skip such rows (on_bad_row: skip)")
        self.count += 1
        self.reasons[reason] += 1
        level = logging.WARNING if self.count <= MOST_WARNINGS else logging.DEBUG
        logger.log(level, "skipped %s: %s", where, reason)


def read_rows(source: Source, *, bad_rows: BadRows | None = None) -> Iterator[tuple[str, Row]]:
    """(where, row) of files (JSONL, JSON, CSV, TSV, Parquet, plain text) or of mappings.

    Args:
        source: A path, with wildcards or not; several paths; "package:NAME/PATH" for a file inside an
            installed package; or an iterable of mappings, such as a `datasets` object. A plain text is one
            row, {"text": ...}.
        bad_rows: Told of lines that are no rows; the first one stops by default.

    Raises:
        ValueError: If a path does not exist or its kind is not known.
    """
    bad_rows = bad_rows or BadRows()
    for where, row in _read(source, bad_rows):
        if isinstance(row, Mapping):
            yield where, row
        else:
            bad_rows.add(where, f"{type(row).__name__}, not an object with fields")


def _read(source: Any, bad_rows: BadRows) -> Iterator[tuple[str, Any]]:
    if isinstance(source, str | Path):
        for path in _paths(str(source)):
            yield from _read_file(path, bad_rows)
        return
    for index, item in enumerate(source):
        if isinstance(item, str | Path):
            yield from _read(item, bad_rows)
        else:
            yield f"row {index}", item


def _paths(source: str) -> list[Path]:
    text = source
    if source.startswith(PACKAGE):
        package, _, inside = source.removeprefix(PACKAGE).partition("/")
        try:
            text = str(importlib.resources.files(package) / inside)
        except ModuleNotFoundError:
            raise ValueError(f"{source}: the package {package} is not installed") from None
    paths = [Path(path) for path in sorted(glob.glob(text))] if glob.has_magic(text) else [Path(text)]
    if not paths or not all(path.is_file() for path in paths):
        raise ValueError(f"{source}: no such file")
    return paths


def _read_file(path: Path, bad_rows: BadRows) -> Iterator[tuple[str, Any]]:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        yield from _read_jsonl(path, bad_rows)
    elif suffix in (".csv", ".tsv"):
        yield from _read_csv(path, bad_rows, "\t" if suffix == ".tsv" else ",")
    elif suffix == ".parquet":
        yield from _read_parquet(path)
    elif suffix == ".json":
        yield from _read_json(path)
    elif suffix in TEXT_SUFFIXES:
        yield str(path), {"text": path.read_text(encoding="utf-8")}
    else:
        raise ValueError(
            f"{path}: {suffix or 'no suffix'}; known are .jsonl, .json, .csv, .tsv, .parquet, "
            f"{', '.join(TEXT_SUFFIXES)}"
        )


def _read_jsonl(path: Path, bad_rows: BadRows) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                bad_rows.add(where, f"broken JSON ({error.msg} at column {error.colno})")
                continue
            yield where, row


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: broken JSON ({error.msg})") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: one {type(rows).__name__}; a .json file holds a list of objects")
    for index, row in enumerate(rows):
        yield f"{path}: row {index}", row


def _read_csv(path: Path, bad_rows: BadRows, delimiter: str) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, delimiter=delimiter)
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row:
                bad_rows.add(where, "more cells than the header has")
            elif None in row.values():
                bad_rows.add(where, "fewer cells than the header has")
            else:
                yield where, row


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: Parquet needs pyarrow; pip install pyarrow") from None
    index = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path}: row {index}", row
                index += 1
