"""Weights of Qwen2, Qwen3, Llama and CausalQwen checkpoints, without transformers.

Their tensors are called ``model.<name>`` and ``lm_head.weight``; the decoder's own names are the same without
the prefix. A CausalQwen checkpoint holds its heads beside them; the plain decoder leaves those alone, so it
runs the backbone and the head: what the converted base said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from causal_qwen.decoder.config import DecoderConfig
from causal_qwen.decoder.model import CausalLM

__all__ = ["CheckpointTensors", "PretrainedModel", "from_hf", "load_directory", "tensors_of"]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_CAUSAL_HEADS = ("abduction.", "action.", "numeric_embedding.")
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_COMPUTED = "rotary_emb.inv_freq"  # old Llama checkpoints store it; it follows from the config


class PretrainedModel(Protocol):
    """What :func:`from_hf` needs of a transformers model."""

    @property
    def config(self) -> object:
        """Its config."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        ...


def load_directory(directory: str | Path, *, dtype: torch.dtype = torch.float32) -> CausalLM:
    """A decoder with the weights in ``directory``.

    Args:
        directory: Holds config.json and model.safetensors, or model.safetensors.index.json and its shards.
        dtype: Of the loaded weights.

    Raises:
        FileNotFoundError: If the directory does not hold such a checkpoint.
        ValueError: If the config or a tensor does not fit the decoder.
    """
    directory = Path(directory)
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json: give what save_pretrained wrote")
    config = DecoderConfig.from_hf_config(_json(config_path))
    files = _tensor_files(directory)
    return _build(config, files, lambda name: _read(files[name], name), source=str(directory), dtype=dtype)


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of a directory's backbone and head by the decoder's names, each read when it is asked for.

    Args:
        directory: As for :func:`load_directory`.
        dtype: What each is given as.

    Raises:
        FileNotFoundError: If the directory does not hold such a checkpoint.
        ValueError: If a file is damaged.
    """

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._files, self._dtype = _tensor_files(directory), dtype
        self._names = {
            name.removeprefix("model."): name
            for name in self._files
            if not _is_causal(name) and not name.endswith(_COMPUTED)
        }

    def __getitem__(self, name: str) -> Tensor:
        return self.whole(self._names[name]).to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def others(self, beginnings: tuple[str, ...]) -> list[str]:
        """Names in the files that begin so."""
        return sorted(name for name in self._files if name.startswith(beginnings))

    def whole(self, name: str) -> Tensor:
        """A tensor by its name in the files, as it is there."""
        return _read(self._files[name], name)


def from_hf(model: PretrainedModel, *, dtype: torch.dtype | None = None) -> CausalLM:
    """A decoder with copies of the weights of a Qwen2, Qwen3, Llama or CausalQwen model of transformers.

    Args:
        model: The model, in memory.
        dtype: Of the copies; the model's own when None.

    Raises:
        ValueError: If its config or a tensor does not fit the decoder.
    """
    config = DecoderConfig.from_hf_config(model.config)
    tensors = model.state_dict()
    return _build(config, tensors, tensors.__getitem__, source=type(model).__name__, dtype=dtype)


def tensors_of(model: PretrainedModel) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """The config and the tensors of a model of transformers, not copied, by the decoder's names.

    Heads of a CausalQwen model are left out; its vocabulary matrix may read causes instead of features.
    """
    config = DecoderConfig.from_hf_config(model.config)
    state = model.state_dict()
    tensors = {name.removeprefix("model."): tensor for name, tensor in state.items() if not _is_causal(name)}
    head, embedding = state.get(_HEAD), state[_EMBEDDING]
    if head is not None and config.tie_word_embeddings and head.data_ptr() != embedding.data_ptr():
        config = replace(config, tie_word_embeddings=False)
    return config, tensors


def _build(
    config: DecoderConfig,
    names: Iterable[str],
    read: Callable[[str], Tensor],
    *,
    source: str,
    dtype: torch.dtype | None,
) -> CausalLM:
    """The decoder of ``config`` with the tensors that ``read`` gives."""
    names = set(names)
    present = {name for name in names if not _is_causal(name) and not name.endswith(_COMPUTED)}
    if config.tie_word_embeddings and {_HEAD, _EMBEDDING} <= present:
        if torch.equal(read(_HEAD), read(_EMBEDDING)):
            present.remove(_HEAD)
        else:  # the config says tied, the weights say otherwise: GGUF conversions of Qwen2.5 do
            config = replace(config, tie_word_embeddings=False)
    layers = {int(found[1]) for name in present if (found := _LAYER.match(name))}
    if config.num_hidden_layers > len(layers):  # before they are made: a damaged config may say millions
        raise ValueError(
            f"{source} has {len(layers)} layers, the config says {config.num_hidden_layers} "
            "(num_hidden_layers). Its config and its weights must be of one model"
        )
    with torch.device("meta"):
        model = CausalLM(config)
    shapes = {_checkpoint_name(name): tensor.shape for name, tensor in model.state_dict().items()}
    _refuse(source, "lacks", sorted(shapes.keys() - present))
    _refuse(source, "has tensors that this decoder has no place for:", sorted(present - shapes.keys()))
    tensors: dict[str, Tensor] = {}
    for name in model.state_dict():
        tensor = read(_checkpoint_name(name))
        expected = shapes[_checkpoint_name(name)]
        reads_causes = tensor.ndim == 2 and tensor.shape[1] != config.hidden_size
        if name == _HEAD and reads_causes and any(map(_is_causal, names)):
            raise ValueError(
                f"{source}: the head reads {tensor.shape[1]} causes (causal_size) instead of the hidden size "
                f"{config.hidden_size}: the plain decoder has no abduction, use the causal model"
            )
        if tensor.shape != expected:
            raise ValueError(
                f"{source}: {_checkpoint_name(name)} has shape {tuple(tensor.shape)}, the config says "
                f"{tuple(expected)}. Its config and its weights must be of one model"
            )
        if not tensor.is_floating_point():
            raise ValueError(
                f"{source}: {_checkpoint_name(name)} is {tensor.dtype}: "
                "give the checkpoint before quantisation"
            )
        tensors[name] = tensor.detach().to(dtype or tensor.dtype, copy=True)
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def _is_causal(name: str) -> bool:
    return name.startswith(_CAUSAL_HEADS)


def _checkpoint_name(name: str) -> str:
    """``lm_head.weight`` stays, everything else lives under ``model.``."""
    return name if name == _HEAD else f"model.{name}"


def _refuse(source: str, complaint: str, names: list[str]) -> None:
    if names:
        shown = f"{', '.join(names[:4]):.300}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise ValueError(f"{source} {complaint} {shown}. Its config and its weights must be of one model")


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        with _opened(single) as file:
            return dict.fromkeys(file.keys(), single)
    if not index.is_file():
        raise FileNotFoundError(
            f"{directory} has neither model.safetensors nor model.safetensors.index.json: "
            "write the weights there with save_pretrained"
        )
    shards = _json(index)
    shards = shards.get("weight_map") if isinstance(shards, dict) else None
    if not isinstance(shards, dict) or not all(map(_is_file_name, shards.values())):
        raise ValueError(f"{index}: weight_map must name the file of each tensor: fetch the index again")
    missing = sorted({shard for shard in shards.values() if not (directory / shard).is_file()})
    if missing:
        raise FileNotFoundError(
            f"{directory} lacks the shards {', '.join(missing):.200}: download them again"
        )
    return {name: directory / shard for name, shard in shards.items()}


def _is_file_name(shard: object) -> bool:
    """Of a file in the same directory."""
    return isinstance(shard, str) and re.fullmatch(r"[\w.-]{1,200}", shard) is not None


def _read(path: Path, name: str) -> Tensor:
    with _opened(path) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; one that is damaged is named."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path}: the weight file is damaged or truncated ({error!s:.200}): fetch it again"
        ) from error


def _json(path: Path) -> Any:
    """What a JSON file says.

    Raises:
        ValueError: If it is damaged; it is named.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # of UTF-8, of JSON, of its depth
        raise ValueError(f"{path}: not a JSON file ({error!s:.200}): fetch it again") from error
