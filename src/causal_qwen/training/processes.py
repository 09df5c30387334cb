"""Processes that train together: when one has ended, the others say so and end too."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch import distributed

from causal_qwen.training.checkpoints import last_checkpoint

__all__ = ["check_launch", "lost_processes", "patient_barrier"]

GLOO = re.compile(r"^\[.*gloo.*?\] (.*?)(?: This is typically .*)?$", re.DOTALL)  # how its errors are told
PATIENCE = timedelta(days=7)
# Set by accelerate launch where its configuration says so.
FOREIGN = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}


def check_launch() -> None:
    """Refuse a launch that shards the model by itself.

    Raises:
        ValueError: If it does.
    """
    for variable, name in FOREIGN.items():
        if os.environ.get(variable, "false").lower() in ("true", "1"):
            raise ValueError(
                f"{variable} is set: accelerate would shard the model with {name}; answer no to it in "
                "`accelerate config`, and write fsdp: true into the recipe"
            )


@contextmanager
def lost_processes(workspace: Path) -> Iterator[None]:
    """A process that does not answer is an error that says what is kept and how to go on.

    Raises:
        ConnectionError: Instead of an error of the backend.
    """
    try:
        yield
    except RuntimeError as error:
        gloo = GLOO.match(str(error))
        if gloo is None and not isinstance(error, distributed.DistError):
            raise
        reason = gloo[1].rstrip(".") if gloo else str(error).split("\n")[0]
        checkpoint = last_checkpoint(workspace / "checkpoints")
        kept = "there was no checkpoint yet (save_steps)" if checkpoint is None else f"{checkpoint} is kept"
        raise ConnectionError(
            f"another process of this run has ended or cannot be reached ({reason}); {kept}. Look for what "
            "the other one said, and start all of them again, with --resume"
        ) from error


def patient_barrier() -> Callable[[], None]:
    """A barrier at which processes wait, as long as it takes, for one that works alone; all make and call it.

    Those of training give up after half an hour, when something must have happened.
    """
    if not distributed.is_initialized():
        return lambda: None
    return partial(distributed.barrier, group=distributed.new_group(backend="gloo", timeout=PATIENCE))
