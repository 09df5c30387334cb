"""Inputs as files, in a directory of this process that ends with it."""

import functools
import tempfile
from pathlib import Path

__all__ = ["directory", "written"]


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fuzz-")


def directory(name: str) -> Path:
    """A directory of this name, the same one at each call."""
    place = Path(_temporary().name) / name
    place.mkdir(parents=True, exist_ok=True)
    return place


def written(data: bytes, suffix: str) -> Path:
    """A file with this content, which stays until the next one of this suffix."""
    file = directory("inputs") / f"input{suffix}"
    file.write_bytes(data)
    return file
