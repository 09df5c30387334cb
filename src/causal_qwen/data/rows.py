"""Files and tables → rows, read one at a time.

A row is a mapping of fields. A row that cannot be used is named by file and line. This module knows neither
what the fields mean nor tokens.
"""

from __future__ import annotations

import csv
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

from causal_qwen.data.files import Files, find_files, kind_of, open_text

__all__ = ["BadRow", "BadRows", "Row", "Source", "read_columns", "read_rows"]

logger = logging.getLogger(__name__)

MOST_WARNINGS = 3
MOST_REASONS = 3
LONGEST_REASON = 300  # characters: a row may be longer than anybody reads
TABLE_KINDS = (".csv", ".tsv")
TEXT_KINDS = (".txt", ".md", ".rst")
DELIMITERS = ";\t|"  # of a header without a comma
LONGEST_CELL = 1 << 24  # characters; a longer one is a quotation mark that is never closed
OnBadRow = Literal["error", "skip"]
Row = Mapping[str, Any]
Source = str | Path | Files | Iterable[Row] | Sequence[str | Path]


class BadRow(ValueError):
    """A row that cannot be used; the message says where it is and what is wrong."""


@dataclass
class BadRows:
    """What happens to rows that cannot be used, and how many there were.

    Args:
        action: "error" stops at the first; "skip" counts them, and names the first few in the log.
        silent: Whether none are named, for a first look.
    """

    action: OnBadRow = "error"
    silent: bool = False
    count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, where: str, reason: str) -> None:
        """Refuse or count one row.

        Raises:
            BadRow: If rows may not be skipped.
        """
        reason = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}…"
        if self.action == "error":
            raise BadRow(f"{where}: {reason}; mend the row, or skip such rows (on_bad_row: skip)")
        self.count += 1
        self.reasons[reason] += 1
        level = logging.WARNING if self.count <= MOST_WARNINGS and not self.silent else logging.DEBUG
        logger.log(level, "skipped %s: %s", where, reason)

    def __str__(self) -> str:
        """How many rows were skipped, and the commonest reasons."""
        reasons = [f"{reason} ({count})" for reason, count in self.reasons.most_common(MOST_REASONS)]
        rest = ", …" if len(self.reasons) > MOST_REASONS else ""
        rows = "1 row" if self.count == 1 else f"{self.count} rows"
        return f"{rows} skipped" + (f": {', '.join(reasons)}{rest}" if reasons else "")


def read_rows(source: Source, *, bad_rows: BadRows | None = None) -> Iterator[tuple[str, Row]]:
    """(where, row) of files (JSONL, JSON, CSV, TSV, Parquet, plain text; also .gz) or of mappings.

    Args:
        source: A path, with wildcards or not; several paths; "package:NAME/PATH" for a file inside an
            installed package; `Files`, which say how they are written; or an iterable of mappings, such as a
            `datasets` object. A plain text is one row, {"text": ...}.
        bad_rows: Told of lines that are no rows; the first one stops by default.

    Raises:
        ValueError: If a path does not exist, its kind is not known, or the file cannot be read as what its
            name says.
    """
    bad_rows = bad_rows or BadRows()
    for where, row in _read(source, bad_rows):
        if isinstance(row, Mapping):
            yield where, row
        else:
            bad_rows.add(where, f"{type(row).__name__}, not an object with fields")


def read_columns(source: Source) -> list[str]:
    """The columns of tables that name them before any row (CSV, TSV, Parquet); of anything else none."""
    files = source if isinstance(source, Files) else None
    if isinstance(source, str | Path):
        files = Files(source)
    if files is None:
        return []
    columns: list[str] = []
    for path in _paths(files):
        if kind_of(path) in TABLE_KINDS:
            with open_text(path, files.encoding, newline="") as stream:
                columns += _CsvReader(path, stream, files.delimiter).header()
        elif path.suffix.lower() == ".parquet":
            with _open_parquet(path) as file:
                columns += file.schema_arrow.names
    return list(dict.fromkeys(columns))


def _paths(files: Files) -> Iterator[Path]:
    paths = [files.paths] if isinstance(files.paths, str | Path) else files.paths
    for path in paths:
        yield from find_files(str(path))


def _read(source: Any, bad_rows: BadRows) -> Iterator[tuple[str, Any]]:
    if isinstance(source, str | Path):
        source = Files(source)
    if isinstance(source, Files):
        for path in _paths(source):
            yield from _read_file(path, source, bad_rows)
        return
    for index, item in enumerate(source):
        if isinstance(item, str | Path):
            yield from _read(item, bad_rows)
        else:
            yield f"row {index}", item


def _read_file(path: Path, files: Files, bad_rows: BadRows) -> Iterator[tuple[str, Any]]:
    kind = kind_of(path)
    if path.suffix.lower() == ".parquet":
        yield from _read_parquet(path)
        return
    if kind not in (".jsonl", ".ndjson", ".json", *TABLE_KINDS, *TEXT_KINDS):
        raise ValueError(
            f"{path}: {kind or 'no suffix'}; known are .jsonl, .json, .csv, .tsv, .parquet, "
            f"{', '.join(TEXT_KINDS)}, and each but Parquet with .gz behind it"
        )
    with open_text(path, files.encoding, newline="" if kind in TABLE_KINDS else None) as stream:
        if kind in TABLE_KINDS:
            yield from _CsvReader(path, stream, files.delimiter).rows(bad_rows)
        elif kind == ".json":
            yield from _read_json(path, stream)
        elif kind in TEXT_KINDS:
            yield str(path), {"text": stream.read()}
        else:
            yield from _read_jsonl(path, stream, bad_rows)


def _read_jsonl(path: Path, stream: TextIOWrapper, bad_rows: BadRows) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                row = _parse_json(line)
            except ValueError as error:
                bad_rows.add(where, str(error))
                continue
            yield where, row


def _read_json(path: Path, stream: TextIOWrapper) -> Iterator[tuple[str, Any]]:
    text = stream.read()
    try:
        rows = _parse_json(text)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; a .json file holds a list, one object per line is .jsonl"
        ) from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: one {type(rows).__name__}; a .json file holds a list of objects")
    for index, row in enumerate(rows):
        yield f"{path}: row {index}", row


def _parse_json(text: str) -> Any:
    """A JSON value; whatever is wrong with it is a ValueError that says so."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column" if error.lineno > 1 else "column"
        raise ValueError(f"broken JSON ({error.msg} at {place} {error.colno})") from None
    except RecursionError:
        raise ValueError("broken JSON (nested too deeply)") from None
    except ValueError:  # a number of more digits than Python reads
        raise ValueError("broken JSON (a number of thousands of digits)") from None


class _CsvReader:
    """Rows of one CSV file, each with the line at which it begins.

    Args:
        path: For messages.
        stream: Opened with newline="".
        delimiter: None for what the suffix and the header say.
    """

    def __init__(self, path: Path, stream: TextIOWrapper, delimiter: str | None) -> None:
        self.path = path
        lines = iter(stream)
        first = next(lines, "")
        if delimiter is None:
            delimiter = "\t" if kind_of(path) == ".tsv" else _delimiter_of(first)
        # strict: a stray quotation mark is an error, not a cell that swallows the rows that follow.
        self.reader = csv.reader(_joined(first, lines), delimiter=delimiter, strict=True)

    def header(self) -> list[str]:
        """The names of the columns.

        Raises:
            ValueError: If there are none, or two are the same.
        """
        try:
            cells = self._next()
            while cells == []:
                cells = self._next()
        except csv.Error as error:
            raise ValueError(f"{self.path}:1: broken CSV ({_csv_reason(error)})") from None
        if cells is None:
            raise ValueError(f"{self.path} is empty; a table begins with the names of its columns")
        # pandas leaves the column of its index without a name, spreadsheets those at the right edge.
        names = [name or f"column {place}" for place, name in enumerate(cells, start=1)]
        _check_names(self.path, names)
        return names

    def rows(self, bad_rows: BadRows) -> Iterator[tuple[str, Row]]:
        """The rows below the header; ragged and broken ones go to ``bad_rows``."""
        names = self.header()
        while True:
            where = f"{self.path}:{self.reader.line_num + 1}"
            try:
                cells = self._next()
            except csv.Error as error:
                bad_rows.add(where, f"broken CSV ({_csv_reason(error)})")
                continue
            if cells is None:
                return
            if len(cells) == len(names):
                yield where, dict(zip(names, cells, strict=True))
            elif cells:
                relation = "more" if len(cells) > len(names) else "fewer"
                bad_rows.add(
                    where, f"{len(cells)} cells, {relation} cells than the header has ({len(names)})"
                )

    def _next(self) -> list[str] | None:
        """The cells of the next row, none of a blank line; None at the end.

        csv's limit on the length of a cell is one for the whole process, so it is raised only while a row is
        read.
        """
        limit = csv.field_size_limit(LONGEST_CELL)
        try:
            return next(self.reader, None)
        finally:
            csv.field_size_limit(limit)


def _check_names(path: Path, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{path}: {count} columns are called {name!r}; rename all but one")


def _joined(first: str, lines: Iterator[str]) -> Iterator[str]:
    if first:
        yield first
    yield from lines


def _delimiter_of(header: str) -> str:
    """A comma, or the one other delimiter of a header that has no comma."""
    others = [mark for mark in DELIMITERS if mark in header]
    return others[0] if "," not in header and len(others) == 1 else ","


def _csv_reason(error: csv.Error) -> str:
    if "unexpected end of data" in str(error):
        return "a quotation mark is opened and never closed"
    if "field larger" in str(error):
        return f"a cell of more than {LONGEST_CELL:,} characters; is a quotation mark missing?"
    return str(error)


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """A ParquetFile; what pyarrow says of a broken one becomes one line."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: Parquet needs pyarrow; pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"{path}: broken Parquet ({reason})") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    index = 0
    with _open_parquet(path) as file:
        _check_names(path, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path}: row {index}", row
                index += 1
