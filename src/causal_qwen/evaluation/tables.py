"""Tables that grow row by row, survive a stop, and appear only when they are complete.

Rows go to OUT.partial, one JSON object per line, in order and only ever appended; its first line says what
the rows are. The next run with the same settings goes on behind the last whole line. At the end the partial
file becomes OUT, a CSV, Parquet or JSONL file. This module does not know what the rows mean.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

__all__ = ["GrowingTable"]

FORMATS = (".csv", ".parquet", ".jsonl")
PARQUET_ROWS = 10_000


class GrowingTable:
    """A table that is written row by row; use it in a ``with`` block and `finish` it.

    Args:
        out: The table: .csv, .parquet or .jsonl.
        settings: What the rows depend on, ready for JSON. A partial file with other settings is refused.

    Attributes:
        done: Rows that an earlier run has written.

    Raises:
        ValueError: If the format is unknown, or the partial file there has other settings.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        if out.suffix.lower() not in FORMATS:
            raise ValueError(f"{out} ends in {out.suffix or 'nothing'!r}; choose .csv, .parquet or .jsonl")
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

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; every row has the same fields."""
        self._append(json.dumps(row, ensure_ascii=False))
        self.count += 1

    def finish(self) -> int:
        """Turn the partial file into the table, and return how many rows it has."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        temporary = self.out.with_name(f".{self.out.name}.{os.getpid()}.new")
        write = {".csv": _write_csv, ".parquet": _write_parquet, ".jsonl": _write_jsonl}
        try:
            write[self.out.suffix.lower()](self._rows(), temporary)
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

    def _rows(self) -> Iterator[dict[str, Any]]:
        with self.partial.open(encoding="utf-8") as stream:
            next(stream)
            for line in stream:
                yield json.loads(line)


def _write_csv(rows: Iterator[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        first = next(rows, None)
        if first is not None:
            writer = csv.DictWriter(stream, fieldnames=list(first))
            writer.writeheader()
            writer.writerows(itertools.chain([first], rows))


def _write_jsonl(rows: Iterator[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_parquet(rows: Iterator[dict[str, Any]], path: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install pyarrow, or write .csv or .jsonl") from None
    first = pyarrow.Table.from_pylist(list(itertools.islice(rows, PARQUET_ROWS)))
    with parquet.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        while part := list(itertools.islice(rows, PARQUET_ROWS)):
            writer.write_table(pyarrow.Table.from_pylist(part, schema=first.schema))
