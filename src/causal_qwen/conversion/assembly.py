"""Tensors become a model of transformers: the very tensors, and none that is missing.

It does not know where they come from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from causal_qwen.conversion.checkpoints import CAUSAL, guarded
from causal_qwen.conversion.headers import ConversionError

__all__ = ["EMBEDDING", "HEAD", "Weights", "assemble", "load_weights", "quiet_transformers", "weights_of"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Weights:
    """The tensors of a base by name, and the class and the configuration that they fit.

    Args:
        family: A class of `FAMILIES`.
        config: Its configuration; its dtype is the tensors'.
        tensors: By the family's names; a head that is tied to the embedding is left out.
        generation_config: How the base generates.
    """

    family: Any
    config: PreTrainedConfig
    tensors: dict[str, Tensor]
    generation_config: GenerationConfig | None

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(tensor.numel() for tensor in self.tensors.values())


def weights_of(model: PreTrainedModel) -> Weights:
    """The tensors of a model that is loaded; those of the vocabulary are copies, the others are shared."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors[HEAD]
    tensors |= {name: tensors[name].clone() for name in (EMBEDDING, HEAD) if name in tensors}
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype
    return Weights(type(model), config, tensors, model.generation_config)


def assemble(
    source: str,
    architecture: Any,
    config: PreTrainedConfig,
    tensors: dict[str, Tensor],
    *,
    new: tuple[str, ...] = (),
) -> Any:
    """A model of these very tensors; one that is missing is an error, never a random initialisation.

    Args:
        source: What errors call it.
        architecture: A class of transformers.
        config: Its configuration; its dtype is the tensors'.
        tensors: By name; the model shares their memory.
        new: Beginnings of the names that a checkpoint need not have.

    Raises:
        ConversionError: If a tensor is missing or misshapen.
    """
    with quiet_transformers():
        model, info = guarded(
            source,
            lambda: architecture.from_pretrained(
                None, config=config, state_dict=tensors, dtype=config.dtype, output_loading_info=True
            ),
        )
    _check_complete(source, info, new=new)
    model.name_or_path = model.config.name_or_path = ""  # of no file; "None" would be looked for by peft
    return model


def _check_complete(source: str, info: dict[str, Any], *, new: tuple[str, ...] = ()) -> None:
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(new))
    misfits = missing or sorted(map(str, info["mismatched_keys"]))
    if misfits:
        raise ConversionError(
            f"{source}: incomplete checkpoint, {len(misfits)} tensors are "
            f"{'missing' if missing else 'misshapen'}, such as {misfits[0]}"
        )


def load_weights(source: str, directory: Path, config: PreTrainedConfig, dtype: torch.dtype | str) -> Any:
    """A converted model, its files mapped into memory; a tensor that is missing is an error, never random.

    Args:
        source: What errors call it.
        directory: Where it is.
        config: Of an architecture of `CAUSAL`.
        dtype: Of the weights; "auto" keeps theirs.

    Raises:
        ConversionError: If a tensor is damaged, missing or misshapen.
    """
    architecture: Any = CAUSAL[config.model_type]
    with quiet_transformers():
        model, info = guarded(
            source,
            lambda: architecture.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=True,
            ),
        )
    _check_complete(source, info)
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' bars and its report on missing keys: errors are raised, progress is watched."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
