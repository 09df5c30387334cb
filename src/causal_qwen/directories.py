"""Where this library keeps what is expensive to make again, and whether a place can be written to.

What is asked here is asked before anything is loaded: a full disk or a name that is taken should not cost
minutes of work. It knows no model, and imports nothing heavy.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["cache_directory", "check_output_directory", "check_output_file", "check_space"]

SMALL = 2**20  # a report or a picture; less than that is a full disk


def cache_directory() -> Path:
    """$CAUSAL_QWEN_CACHE, else causal-qwen in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CAUSAL_QWEN_CACHE") or Path(home) / "causal-qwen")


def check_output_directory(target: Path, *, overwrite: bool = False) -> None:
    """Refuse a directory that could not be written: taken, below a file, read-only, or on a full disk.

    Args:
        target: Directory that will be made, with its parents; an empty one may be there already.
        overwrite: Whether what is there may be replaced.

    Raises:
        FileExistsError: If it exists and ``overwrite`` is False.
        OSError: If it cannot be made there, or the disk is too full.
    """
    if target.is_file():
        raise FileExistsError(f"{target} is a file; name a directory that does not exist yet")
    if target.is_dir() and not overwrite and any(target.iterdir()):
        raise FileExistsError(f"{target} exists; choose another place, or allow overwriting (--overwrite)")
    _check_place(target)
    check_space(target, SMALL)


def check_output_file(target: Path, *, overwrite: bool = True) -> None:
    """Refuse a file that could not be written; arguments and errors as for `check_output_directory`."""
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a directory; name a file")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists; choose another file, or allow overwriting (--overwrite)")
    _check_place(target)
    check_space(target, SMALL)


def check_space(target: Path, needed: int) -> None:
    """Refuse to write ``needed`` bytes where fewer are free.

    Raises:
        OSError: If they are.
    """
    free = shutil.disk_usage(_standing(target)).free
    if free < needed:
        raise OSError(
            f"{target}: not enough space, {_readable(free)} are free and about {_readable(needed)} "
            "are needed; make room, or choose a place on another disk"
        )


def _check_place(target: Path) -> None:
    """Refuse a place whose nearest existing parent is a file, or may not be written to."""
    parent = _standing(target.absolute().parent)
    if not parent.is_dir():
        raise NotADirectoryError(f"{target} cannot be written: {parent} is a file, not a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{target} cannot be written: no permission to write into {parent}")


def _standing(path: Path) -> Path:
    """``path``, or the nearest of its parents that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _readable(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
