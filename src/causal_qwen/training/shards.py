"""Shards: what each process holds of a model and of its optimizer, and writes; any number read them back.

The files are safetensors, whose headers say where in its tensor each shard belongs. So nothing is unpickled,
and a process reads only what it needs, however the tensors were cut when they were written.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from transformers import TrainingArguments

from causal_qwen.training.recipe import TrainingRecipe

__all__ = ["IncompleteShards", "is_sharded", "load_model", "load_optimizer", "save_model", "save_optimizer"]

MODEL, OPTIMIZER = "model", "optimizer"  # directories of a checkpoint
ADAPTER = ("lora_", ".modules_to_save.")  # in the names of what an adapter trains
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # tensors by the names of their parameters


class IncompleteShards(ValueError):
    """A file of a sharded checkpoint is missing."""


def is_sharded(recipe: TrainingRecipe, arguments: TrainingArguments) -> bool:
    """Whether parameters are cut: a process alone holds them whole, and yet writes its checkpoints as shards,
    so that it may be joined by others.
    """
    return recipe.fsdp and arguments.world_size > 1


def save_model(module: nn.Module, checkpoint: Path) -> None:
    """Write the weights, of an adapted model the adapter's alone; every process calls this."""
    _write(_weights(module), checkpoint / MODEL)


def load_model(module: nn.Module, checkpoint: Path) -> None:
    """Read the weights into ``module``, as it is cut now.

    Raises:
        IncompleteShards: If a file is missing.
    """
    state = _weights(module)
    _read(state, checkpoint / MODEL)
    set_model_state_dict(module, state, options=StateDictOptions(strict=False))


def save_optimizer(module: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Write moments and steps of every parameter; every process calls this.

    Rates and decays are not written: they follow from the recipe and the schedule.
    """
    state = get_optimizer_state_dict(module, optimizer, options=FLAT)
    _write(_tensors(state), checkpoint / OPTIMIZER)


def load_optimizer(module: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Read moments and steps into ``optimizer``, which may be new.

    Raises:
        IncompleteShards: If a file is missing.
    """
    state: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=FLAT)
    tensors = _tensors(state)
    _read(tensors, checkpoint / OPTIMIZER)
    set_optimizer_state_dict(module, optimizer, {**state, **tensors}, options=FLAT)


def _weights(module: nn.Module) -> dict[str, Any]:
    """Each tensor once: of tied ones, the first name; of an adapted model, what is not the base's."""
    names = [name for name, _ in itertools.chain(module.named_parameters(), module.named_buffers())]
    adapter = [name for name in names if any(part in name for part in ADAPTER)]
    state: dict[str, Any] = get_model_state_dict(module)
    return {name: state[name] for name in adapter or names if name in state}  # not all buffers are


def _tensors(state: Any) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _write(state: dict[str, Any], directory: Path) -> None:
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    with _plain_errors():
        save(state, storage_writer=writer)


def _read(state: dict[str, Any], directory: Path) -> None:
    if not directory.is_dir():
        raise IncompleteShards(f"{directory} is missing")
    reader = HuggingFaceStorageReader(str(directory))
    with _plain_errors():
        _check_complete(reader, state, directory)
        load(state, storage_reader=reader)


def _check_complete(reader: HuggingFaceStorageReader, state: dict[str, Any], directory: Path) -> None:
    """Every tensor is there to its last entry: what no file holds would silently stay as it is."""
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    for name, tensor in state.items():
        if name not in stored:
            raise IncompleteShards(f"{directory} lacks {name}")
        entries = sum(math.prod(chunk.sizes) for chunk in stored[name].chunks)
        if stored[name].size != tensor.shape or entries != tensor.numel():
            raise IncompleteShards(
                f"{directory} holds {entries} of the {tensor.numel()} entries of {name}; a file is missing"
            )


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """The first process's own error, instead of one that holds all of theirs; no word about being alone."""
    with contextlib.ExitStack() as stack:
        if not torch.distributed.is_initialized():
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            raise reason from error
