"""Rows → examples: files, tables and data sets, read one row at a time.

A row is a mapping with "text", or "prompt" and "completion", or "messages"; or any mapping, with a template
that makes a sentence of it. A row that cannot be used is named by file and line. This module knows neither
tokens nor models.
"""

from __future__ import annotations

import csv
import difflib
import glob
import importlib.resources
import json
import logging
import math
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["BadRow", "BadRows", "Example", "Template", "read_examples", "read_rows"]

logger = logging.getLogger(__name__)

PACKAGE = "package:"
MOST_WARNINGS = 3
TEXT_SUFFIXES = (".txt", ".md", ".rst")
OnBadRow = Literal["error", "skip"]
Source = str | Path | Iterable[Mapping[str, Any]] | Sequence[str | Path]


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


@dataclass(frozen=True)
class Example:
    """What one row says.

    Args:
        prompt: Text that is given; empty where all is to be learned.
        completion: Text that is to be learned.
        where: File and line.
        messages: A chat instead of the two texts.
    """

    prompt: str
    completion: str
    where: str
    messages: tuple[Mapping[str, str], ...] | None = None


class Template:
    """A sentence with fields, as in "A {carat} carat diamond costs {price} dollars."

    Args:
        text: In the syntax of str.format; "{Year:.4}" takes four characters.
        target: The field with which the completion begins; None learns the whole sentence.

    Raises:
        ValueError: If the text has no field, or not the target.
    """

    def __init__(self, text: str, target: str | None = None) -> None:
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"the template {text!r} cannot be read: {error}") from None
        self.fields = [name for _, name, _, _ in parts if name is not None]
        if not self.fields or not all(self.fields):
            raise ValueError(f"the template {text!r} needs fields by name, such as {{price}}")
        if target is not None and target not in self.fields:
            raise ValueError(f"the template has no field {target!r}; its fields are {', '.join(self.fields)}")
        self.parts, self.target = parts, target

    def render(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """The texts before and from the target on; without a target the first is empty.

        Raises:
            ValueError: If a field is missing, empty, NaN or infinite, or its format does not fit.
        """
        texts, learned = ["", ""], self.target is None
        for literal, name, spec, conversion in self.parts:
            texts[learned] += literal
            if name is None:
                continue
            learned = learned or name == self.target
            value = _field(row, name)
            if conversion:
                value = string.Formatter().convert_field(value, conversion)
            try:
                texts[learned] += format(value, spec or "")
            except (ValueError, TypeError):
                raise ValueError(f"{name} is {value!r}, which {{{name}:{spec}}} cannot write") from None
        return texts[0], texts[1]


def _field(row: Mapping[str, Any], name: str) -> Any:
    """A field of a row that can be written."""
    if name not in row:
        near = difflib.get_close_matches(name, [str(key) for key in row], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(map(str, row))}"
        raise ValueError(f"no field {name!r}{hint}")
    value = row[name]
    if value is None or value == "":
        raise ValueError(f"{name} is empty")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    if isinstance(value, str) and value.strip().lower() in ("nan", "inf", "-inf", "infinity"):
        raise ValueError(f"{name} is {value}")
    return value


def read_examples(source: Source, *, template: Template | None, bad_rows: BadRows) -> Iterator[Example]:
    """The examples of a source, one at a time; what cannot be used goes to ``bad_rows``.

    Args:
        source: What `read_rows` reads.
        template: Makes a sentence of each row; None expects "text", "prompt" and "completion", or "messages".
        bad_rows: Decides and counts.
    """
    for where, row in read_rows(source, bad_rows=bad_rows):
        try:
            example = _example(where, row, template)
        except ValueError as error:
            bad_rows.add(where, str(error))
            continue
        yield example


def _example(where: str, row: Mapping[str, Any], template: Template | None) -> Example:
    if template is not None:
        return Example(*template.render(row), where)
    if "messages" in row:
        return Example("", "", where, _messages(row["messages"]))
    if "prompt" in row and "completion" in row:
        return Example(_text(row, "prompt", empty=True), _text(row, "completion"), where)
    if "text" in row:
        return Example("", _text(row, "text"), where)
    raise ValueError(
        f"fields {', '.join(map(str, row)) or 'none'}: neither text, nor prompt and completion, nor messages"
        "; give a template for a table"
    )


def _text(row: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.40}, not a text")
    if not value.strip() and not empty:
        raise ValueError(f"{name} is empty")
    return value


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"messages is {value!r:.40}, not a list of messages")
    for message in value:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(f"a message is {message!r:.40}; each needs role and content")
    if not any(message["role"] == "assistant" for message in value):
        raise ValueError("no message of the assistant: there is nothing to learn")
    return tuple(value)


def read_rows(source: Source, *, bad_rows: BadRows) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) of files (JSONL, JSON, CSV, TSV, Parquet, plain text), `datasets` objects or mappings.

    Args:
        source: A path, with wildcards or not; several paths; "package:NAME/PATH" for a file inside an
            installed package; or an iterable of mappings. A plain text is one row, {"text": ...}.
        bad_rows: Told of lines that are no rows.

    Raises:
        ValueError: If a path does not exist or its kind is not known.
    """
    if isinstance(source, str | Path):
        for path in _paths(str(source)):
            yield from _read_file(path, bad_rows)
        return
    item: Any
    for index, item in enumerate(source):
        if isinstance(item, str | Path):
            yield from read_rows(item, bad_rows=bad_rows)
        elif isinstance(item, Mapping):
            yield f"row {index}", item
        else:
            bad_rows.add(f"row {index}", f"{type(item).__name__}, not a mapping of fields")


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


def _read_file(path: Path, bad_rows: BadRows) -> Iterator[tuple[str, Mapping[str, Any]]]:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        yield from _read_jsonl(path, bad_rows)
    elif suffix in (".csv", ".tsv"):
        yield from _read_csv(path, bad_rows, "\t" if suffix == ".tsv" else ",")
    elif suffix == ".parquet":
        yield from _read_parquet(path)
    elif suffix == ".json":
        yield from _read_json(path, bad_rows)
    elif suffix in TEXT_SUFFIXES:
        yield str(path), {"text": path.read_text(encoding="utf-8")}
    else:
        raise ValueError(
            f"{path}: {suffix or 'no suffix'}; known are .jsonl, .json, .csv, .tsv, .parquet, "
            f"{', '.join(TEXT_SUFFIXES)}"
        )


def _read_jsonl(path: Path, bad_rows: BadRows) -> Iterator[tuple[str, Mapping[str, Any]]]:
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
            if isinstance(row, dict):
                yield where, row
            else:
                bad_rows.add(where, f"{type(row).__name__}, not an object with fields")


def _read_json(path: Path, bad_rows: BadRows) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: broken JSON ({error.msg})") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: one {type(rows).__name__}; a .json file holds a list of objects")
    for index, row in enumerate(rows):
        if isinstance(row, dict):
            yield f"{path}: row {index}", row
        else:
            bad_rows.add(f"{path}: row {index}", f"{type(row).__name__}, not an object with fields")


def _read_csv(path: Path, bad_rows: BadRows, delimiter: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
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


def _read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from pyarrow import parquet

    index = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path}: row {index}", row
                index += 1
