"""Directories and files that are either whole or absent."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from causal_qwen.directories import check_output_directory

__all__ = ["atomic_directory", "disk_errors", "write_file"]

# How torch.save speaks when a write fails.
TORCH_WRITER = ("PytorchStreamWriter", "inline_container.cc", "iostream error")
OS_ERROR = re.compile(r"os error (\d+)")


@contextmanager
def atomic_directory(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory beside ``target`` that takes its place when the block ends well, and vanishes
    otherwise.

    Raises:
        FileExistsError: If ``target`` exists, is not an empty directory, and ``overwrite`` is False.
        OSError: If it cannot be written there, or the disk is full.
    """
    check_output_directory(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        temporary.chmod(0o755)
        with disk_errors(target):
            yield temporary
        _replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """A write that fails is an OSError that names a file, whoever writes: safetensors and torch raise errors
    of their own, and a stream does not say whose it is.

    Raises:
        OSError: Naming ``target``; with the number of the system's error where it is known.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error
    except (SafetensorError, RuntimeError) as error:
        number = OS_ERROR.search(str(error))
        if number:
            code = int(number.group(1))
            raise OSError(code, os.strerror(code), str(target)) from error
        if any(word in str(error) for word in TORCH_WRITER):
            raise OSError(f"{target} cannot be written; is the disk full?") from error
        raise


def _replace(new: Path, target: Path) -> None:
    """Move ``new`` to ``target``; what was there steps aside first, and comes back or is deleted last."""
    if not target.exists():
        os.replace(new, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    try:
        os.replace(target, old / target.name)
        os.replace(new, target)
    except BaseException:
        if not target.exists():
            os.replace(old / target.name, target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def write_file(file: Path, text: str) -> None:
    """Write a text beside its place, then move it there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
