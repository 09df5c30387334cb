"""Files: where they are, and how their bytes become text.

A file inside an installed package is found without importing the package, and never outside of it. This
module knows no rows.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import importlib.util
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from pathlib import Path, PurePosixPath
from typing import cast

__all__ = ["Files", "find_files", "kind_of", "open_text"]

PACKAGE = "package:"
GZIP = ".gz"
# The longer marks first: that of UTF-32 begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
WIDE = ("utf-16", "utf-32")  # their lines do not end in one byte
NAME_ENCODING = "name the file's encoding (--encoding latin-1, or encoding: latin-1 in a recipe)"
HEAD = 4096  # bytes that are looked at to tell a text from binary data


@dataclass(frozen=True)
class Files:
    """Files, and how they are written where that is not to be guessed.

    Args:
        paths: One path or several, with wildcards or not; "package:NAME/PATH" is a file inside an installed
            package.
        delimiter: Between the cells of a CSV file. By default a tab in .tsv, else a comma; where the header
            has no comma, the one of ; tab | that it has.
        encoding: Of texts, such as latin-1; UTF-8 by default. A byte order mark stands above it.

    Raises:
        ValueError: If the delimiter is not one character, or the encoding is not known.
    """

    paths: str | Path | Sequence[str | Path]
    delimiter: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ValueError(f"delimiter is {self.delimiter!r}; it is one character, such as ; or a tab")
        if self.encoding is not None:
            try:
                "".encode(self.encoding)
            except (LookupError, UnicodeError, ValueError):
                raise ValueError(
                    f"encoding {self.encoding!r} is not known; such as utf-8, latin-1, cp1252 or gb18030"
                ) from None


def find_files(source: str) -> list[Path]:
    """The files that a path means, in the order of their names.

    Raises:
        ValueError: If there is none, or one is not a file or lies outside of its package.
    """
    if source.startswith(PACKAGE):
        paths = _inside_package(source)
    elif glob.has_magic(source) and not Path(source).exists():
        paths = [Path(path) for path in sorted(glob.glob(source))]
    else:
        paths = [Path(source)]
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{path} is a directory; name its files, such as '{path}/*.csv'")
    if not paths or not all(path.is_file() for path in paths):
        raise ValueError(f"{source}: no such file")
    return paths


def _inside_package(source: str) -> list[Path]:
    """Files inside a package, which is not imported: its code has no say in where they are."""
    package, _, inside = source.removeprefix(PACKAGE).partition("/")
    if not package.isidentifier():
        raise ValueError(f"{source}: {package!r} is no package; write package:NAME/PATH")
    pattern = PurePosixPath(inside)
    if not inside or pattern.is_absolute() or ".." in pattern.parts:
        raise ValueError(f"{source}: a path inside the package {package} is wanted, without '..'")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was not imported from anywhere, such as __main__
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{source}: the package {package} is not installed")
    paths: list[Path] = []
    for location in spec.submodule_search_locations:
        root = Path(location).resolve()
        for path in sorted(glob.glob(f"{glob.escape(str(root))}/{inside}")):
            if not Path(path).resolve().is_relative_to(root):
                raise ValueError(f"{source}: {path} leads out of the package {package}")
            paths.append(Path(path))
    return paths


def kind_of(path: Path) -> str:
    """The suffix that says what is in a file, without that of compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [GZIP]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


@contextmanager
def open_text(
    path: Path, encoding: str | None, *, newline: str | None = None, remedy: str = NAME_ENCODING
) -> Iterator[TextIOWrapper]:
    """A file as text: decompressed by its suffix, without its byte order mark.

    Args:
        path: Of the file.
        encoding: UTF-8 if None; a byte order mark stands above it.
        newline: As for `open`.
        remedy: What to do about a file in another encoding.

    Raises:
        ValueError: While it is read, if it is no text in this encoding (byte and line are named), or its
            compression is damaged.
    """
    name = encoding or "utf-8"
    try:
        with _open_bytes(path) as raw:
            head = raw.peek(HEAD)[:HEAD]
            name = next((marked for mark, marked in MARKS.items() if head.startswith(mark)), name)
            if b"\0" in head and not codecs.lookup(name).name.startswith(WIDE):
                raise ValueError(f"{path}: binary data (a zero byte at offset {head.index(0)}), not a text")
            with TextIOWrapper(raw, encoding=name, newline=newline) as stream:
                yield stream
    except UnicodeDecodeError as error:
        raise ValueError(_undecodable(path, name, remedy, error)) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: damaged gzip data ({error})") from None


def _open_bytes(path: Path) -> BufferedReader:
    if path.suffix.lower() != GZIP:
        return path.open("rb")
    return cast(BufferedReader, gzip.open(path, "rb"))


def _undecodable(path: Path, encoding: str, remedy: str, error: UnicodeDecodeError) -> str:
    """Which byte of which line is not in the encoding, and what to do."""
    name = encoding.removesuffix("-sig")
    if not codecs.lookup(name).name.startswith(WIDE):
        offset = 0
        with _open_bytes(path) as raw:
            for number, line in enumerate(raw, start=1):
                try:
                    line.decode(name)
                except UnicodeDecodeError as place:
                    byte = f"byte 0x{line[place.start]:02x} at offset {offset + place.start}"
                    return f"{path}:{number}: {byte} is not {name}; {remedy}"
                offset += len(line)
    return f"{path}: not {name} ({error.reason}); {remedy}"
