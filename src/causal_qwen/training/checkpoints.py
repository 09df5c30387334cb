"""Checkpoints that are whole or absent: written aside, flushed to disk, then renamed into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from safetensors import SafetensorError
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints

from causal_qwen.training.shards import IncompleteShards

__all__ = [
    "BAD_BATCH",
    "STAGING",
    "check_written",
    "clear_debris",
    "enter_workspace",
    "flush_to_disk",
    "last_checkpoint",
    "leave_workspace",
    "process_count",
    "publish",
    "readable",
    "rotate",
]

STAGING = ".staging"
GONE = ".gone-"
BAD_BATCH = "bad-batch"
TORCH_READER = "PytorchStreamReader"  # how torch.load speaks of a file that is cut off


def flush_to_disk(directory: Path) -> None:
    """Force every file below ``directory``, and the directories themselves, to the disk."""
    for folder, _, files in os.walk(directory):
        for name in files:
            _fsync(Path(folder, name))
        _fsync(Path(folder))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_written(staged: Path, *, processes: int) -> None:
    """Every process has written to this directory, and not to one of the same name on a disk of its own.

    Raises:
        OSError: If the file of one is not here.
    """
    names = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else ["rng_state.pth"]
    for name in names:
        if not (staged / name).is_file():
            raise OSError(f"{staged} lacks {name}; the output must be in a file system that all nodes share")


def process_count(checkpoint: Path) -> int:
    """How many processes have written a checkpoint: each leaves its random state."""
    return len(list(checkpoint.glob("rng_state*.pth")))


def publish(staged: Path, target: Path) -> None:
    """Give a complete directory its name; only then can it be found."""
    flush_to_disk(staged)
    _remove(target)
    os.replace(staged, target)
    _fsync(target.parent)


def _remove(directory: Path) -> None:
    """Take the name away first: a half-deleted directory must not look like a checkpoint."""
    if directory.exists():
        gone = directory.with_name(GONE + directory.name)
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(directory, gone)
        shutil.rmtree(gone, ignore_errors=True)


def rotate(directory: Path, *, keep: int, protected: str | None = None) -> None:
    """Keep the ``keep`` latest checkpoints, and the protected one."""
    for checkpoint in sort_checkpoints(str(directory))[:-keep] if keep > 0 else []:
        if checkpoint != protected:
            _remove(Path(checkpoint))


def last_checkpoint(directory: Path) -> Path | None:
    """The checkpoint with the most steps, if there is one."""
    checkpoint = get_last_checkpoint(directory) if directory.is_dir() else None
    return Path(checkpoint) if checkpoint else None


def enter_workspace(workspace: Path, *, resume: bool, overwrite: bool) -> None:
    """Make the place for a run's checkpoints, or take over the one of an interrupted run.

    Raises:
        FileExistsError: If there is one, and neither flag allows for it.
    """
    if workspace.exists() and not resume:
        if not overwrite:
            raise FileExistsError(f"{workspace} holds an interrupted run; resume it, or allow overwriting")
        shutil.rmtree(workspace)
    (workspace / "checkpoints").mkdir(parents=True, exist_ok=True)
    clear_debris(workspace / "checkpoints")


def leave_workspace(workspace: Path) -> None:
    """After a run that did not end: keep whole checkpoints and batches that broke it, and nothing else."""
    checkpoints = workspace / "checkpoints"
    clear_debris(checkpoints)
    if last_checkpoint(checkpoints) is None and not any(checkpoints.glob(f"{BAD_BATCH}*")):
        shutil.rmtree(workspace, ignore_errors=True)


@contextmanager
def readable(checkpoint: Path | None) -> Iterator[None]:
    """A checkpoint that cannot be read is named. Only tensors and plain values are: nothing is unpickled.

    Raises:
        ValueError: If a file of it is damaged or missing, or holds anything else.
    """
    try:
        yield
    except (UnpicklingError, SafetensorError, IncompleteShards, RuntimeError) as error:
        if checkpoint is None or (isinstance(error, RuntimeError) and TORCH_READER not in str(error)):
            raise
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"{checkpoint} is damaged ({reason}); delete it, and --resume goes on from the one before"
        ) from error


def clear_debris(directory: Path) -> None:
    """Delete what an interrupted run left half-written or half-deleted."""
    for path in directory.iterdir():
        if path.name == STAGING or path.name.startswith(GONE):
            shutil.rmtree(path, ignore_errors=True)
