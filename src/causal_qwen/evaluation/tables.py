"""Tables that grow row by row, survive a stop, and appear only when they are complete.

Rows go to OUT.partial, one JSON object per line, in order and only ever appended; its first line says what
the rows are. The next run with the same settings goes on behind the last whole line. At the end the partial
file becomes OUT, a CSV, Parquet or JSONL file. This module does not know what the rows mean.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

__all__ = ["FORMATS", "GrowingTable", "format_of", "plain", "print_rows"]

FORMATS = ("csv", "parquet", "jsonl")
PARQUET_ROWS = 10_000
Columns = Mapping[str, type]


class GrowingTable:
    """A table that is written row by row; use it in a ``with`` block and `finish` it.

    Args:
        out: The table: .csv, .parquet or .jsonl.
        settings: What the rows depend on, ready for JSON. A partial file with other settings is refused.
        columns: Names and types of columns that come first, and that a table without rows has too.
        format: One of `FORMATS`, whatever the file is called; by its suffix by default.

    Attributes:
        done: Rows that an earlier run has written.

    Raises:
        ValueError: If the format is unknown, or the partial file there has other settings.
    """

    def __init__(
        self,
        out: Path,
        settings: Mapping[str, Any],
        *,
        columns: Columns | None = None,
        format: str | None = None,
    ) -> None:
        self.format = format or format_of(out)
        self.columns = dict(columns or {})
        self.out, self.partial = out, out.with_name(f"{out.name}.partial")
        header = json.dumps({"settings": dict(settings)}, ensure_ascii=False)
        self.count = self.done = self._resume(header)
        self.stream: IO[str] = self.partial.open("a", encoding="utf-8")
        if self.partial.stat().st_size == 0:
            self._append(header)

    def __enter__(self) -> GrowingTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close()
        if kind is not None and self.count == 0:  # nothing to go on from
            self.partial.unlink(missing_ok=True)

    def kept(self) -> str:
        """What is there for the next run, if this one ends here."""
        if self.count == 0:
            return "nothing is kept"
        return f"{self.partial} keeps {self.count} rows; the same command goes on behind them"

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self._append(json.dumps(plain(row), ensure_ascii=False))
        self.count += 1

    def finish(self) -> int:
        """Turn the partial file into the table, and return how many rows it has."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        temporary = self.out.with_name(f".{self.out.name}.{os.getpid()}.new")
        columns = self.columns | {
            name: str for row in self.rows() for name in row if name not in self.columns
        }
        try:
            WRITERS[self.format](self.rows(), temporary, columns)
            os.replace(temporary, self.out)
        finally:
            temporary.unlink(missing_ok=True)
        self.stream.close()
        self.partial.unlink()
        return self.count

    def _append(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()

    def _resume(self, header: str) -> int:
        """Rows already there. A line without its end was cut by the stop, and is removed."""
        if not self.partial.exists():
            return 0
        whole, lines, same = 0, 0, True
        with self.partial.open("rb+") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                if lines == 0:
                    same = line.decode("utf-8").rstrip("\n") == header
                whole, lines = whole + len(line), lines + 1
            if not same and lines > 1:
                raise ValueError(
                    f"{self.partial} was begun with other settings; delete it to begin again, "
                    "or write to another file"
                )
            stream.truncate(whole if same else 0)
        return max(lines - 1, 0)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows that were written, before `finish`."""
        with self.partial.open(encoding="utf-8") as stream:
            next(stream)
            for line in stream:
                yield json.loads(line)


def format_of(out: Path) -> str:
    """One of `FORMATS`, by the suffix of a file.

    Raises:
        ValueError: If the suffix is another one.
    """
    name = out.suffix.lower().removeprefix(".")
    if name not in FORMATS:
        raise ValueError(f"{out} ends in {out.suffix or 'nothing'!r}; choose .csv, .parquet or .jsonl")
    return name


def plain(value: Any) -> Any:
    """A value as JSON has it: no NaN and no infinity, dates and whatever else as texts."""
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)


def print_rows(
    rows: Iterable[Mapping[str, Any]], stream: IO[str], *, format: str, columns: Iterable[str]
) -> int:
    """Write rows to an open stream as they come, as CSV or JSONL, and return how many there were.

    Args:
        rows: Mappings.
        stream: Standard output, for one.
        format: "csv" or "jsonl".
        columns: Of a CSV table; those that the first row has besides are added.

    Raises:
        ValueError: If a later row has a field that a CSV table has no column for.
    """
    count = 0
    iterator = iter(rows)
    first = next(iterator, None)
    names = list(dict.fromkeys([*columns, *(first or {})]))
    writer = csv.writer(stream, lineterminator="\n")
    if format == "csv":
        writer.writerow(names)
    for count, row in enumerate(itertools.chain([] if first is None else [first], iterator), start=1):
        if format == "jsonl":
            stream.write(json.dumps(plain(row), ensure_ascii=False) + "\n")
        else:
            extra = [name for name in row if name not in names]
            if extra:
                raise ValueError(
                    f"row {count - 1} has the field {extra[0]!r}, the first has not: --format jsonl"
                )
            writer.writerow(_cells(plain(row), names))
        stream.flush()
    return count


def _cells(row: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    """A row as CSV has it: what is nested is JSON."""
    cells = (row.get(name) for name in names)
    return [json.dumps(cell, ensure_ascii=False) if isinstance(cell, dict | list) else cell for cell in cells]


def _write_csv(rows: Iterator[dict[str, Any]], path: Path, columns: Columns) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(_cells(row, columns) for row in rows)


def _write_jsonl(rows: Iterator[dict[str, Any]], path: Path, columns: Columns) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_parquet(rows: Iterator[dict[str, Any]], path: Path, columns: Columns) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install pyarrow, or write .csv or .jsonl") from None
    types = {
        str: pyarrow.string(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        bool: pyarrow.bool_(),
    }
    declared = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])

    def part() -> Any:
        batch = list(itertools.islice(rows, PARQUET_ROWS))
        whole = [{name: row.get(name) for name in columns} for row in batch]
        return pyarrow.Table.from_pylist(whole) if whole else declared.empty_table()

    try:
        table = part()
        with parquet.ParquetWriter(path, table.schema) as writer:
            while True:
                writer.write_table(table)
                table = part()
                if len(table) == 0:
                    return
                table = table.cast(writer.schema)
    except pyarrow.ArrowException as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"a column holds values of several kinds ({reason}); write .csv or .jsonl") from None


WRITERS: dict[str, Callable[[Iterator[dict[str, Any]], Path, Columns], None]] = {
    "csv": _write_csv,
    "parquet": _write_parquet,
    "jsonl": _write_jsonl,
}
