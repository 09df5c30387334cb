"""GGUF files: their configuration, their tokenizer, and their tensors, dequantised a few rows at a time.

Neither the model nor a large tensor is ever whole in memory. This module does not know where a dequantised
model is kept, nor whether the file is whole (`checkpoints`).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from causal_qwen.conversion.checkpoints import ARCHITECTURES, Checkpoint, guarded
from causal_qwen.conversion.headers import ConversionError, read_gguf_header
from causal_qwen.conversion.vocabulary import settings_of
from causal_qwen.conversion.weights import DTYPES, PART_ELEMENTS, TensorParts

__all__ = ["gguf_config", "gguf_tokenizer", "gguf_weights"]

HALVES = ("BF16", "F16")
# Angles that follow from the configuration.
IGNORED = {"rope_freqs.weight"}


def gguf_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The configuration that the metadata and the tensors of a GGUF file describe.

    Its dtype is what the file is written in: its half type if it has one, and float32 if it is quantised.
    """
    fields = dict(checkpoint.config)
    architecture: Any = ARCHITECTURES[fields.pop("model_type")]
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    if architecture.config_class.model_type == "qwen2" and _is_usual_width(fields):
        del fields["head_dim"]
    kinds = {tensor.dtype for tensor in checkpoint.tensors.values()}
    # The vectors of a file in half precision are float32.
    half = next((kind for kind in HALVES if kind in kinds and kinds <= set(DTYPES)), "F32")
    config = architecture.config_class(**fields, rope_parameters=rope, dtype=DTYPES[half])
    config.architectures = [architecture.__name__]
    return cast(PreTrainedConfig, config)


def gguf_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The tokenizer that the metadata of a GGUF file describes.

    Not through AutoTokenizer, which reads the file several times: half a minute for Qwen's vocabulary.
    """
    path = checkpoint.path
    tokenizer: Any = guarded(
        checkpoint.source,
        lambda: PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name),
    )
    count = read_gguf_header(path, checkpoint.source).metadata["tokenizer.ggml.tokens"]
    if len(tokenizer) > count:
        tokenizer = _without_strangers(tokenizer, count)
    return cast(PreTrainedTokenizerBase, tokenizer)


def _without_strangers(tokenizer: PreTrainedTokenizerBase, count: int) -> PreTrainedTokenizerBase:
    """Without the tokens beyond the file's own: transformers gives <|endoftext|> to a vocabulary that lacks
    it, and there is no row for it.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < count]
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(state, ensure_ascii=False))
    settings = settings_of(tokenizer) | {"padding_side": tokenizer.padding_side}
    own = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    own.chat_template = tokenizer.chat_template
    return own


def gguf_weights(checkpoint: Checkpoint, config: PreTrainedConfig) -> dict[str, TensorParts]:
    """The tensors by the names of transformers, each dequantised as it is asked for.

    Args:
        checkpoint: A GGUF file.
        config: Of `gguf_config`.

    Raises:
        ConversionError: If the file holds a tensor that its architecture has no place for.
    """
    with torch.device("meta"):
        names = list(ARCHITECTURES[config.model_type](config).state_dict())
    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    name_map = get_tensor_name_map(architecture, config.num_hidden_layers)
    places = {}
    for name in names:
        module, _, part = name.rpartition(".")
        places[f"{name_map.get_name(module)}.{part}"] = name
    strangers = set(checkpoint.tensors) - set(places) - IGNORED
    if strangers:
        raise ConversionError(
            f"{checkpoint.source}: {config.model_type} has no place for {len(strangers)} tensors of this "
            f"GGUF file, such as {min(strangers)}"
        )
    with checkpoint.path.open("rb") as stream:
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return {
        places[name]: TensorParts(config.dtype, header.shape, partial(_parts, data, checkpoint, name, config))
        for name, header in checkpoint.tensors.items()
        if name in places
    }


def _parts(data: mmap.mmap, checkpoint: Checkpoint, name: str, config: PreTrainedConfig) -> Iterable[Tensor]:
    rows = _rows(data, checkpoint, name, config.dtype)
    if config.model_type == "llama" and ".attn_q." in name:
        return [_halves_apart(torch.cat(list(rows)), config.num_attention_heads)]
    if config.model_type == "llama" and ".attn_k." in name:
        return [_halves_apart(torch.cat(list(rows)), config.num_key_value_heads)]
    return rows


def _rows(data: mmap.mmap, checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """Dequantised rows, a few at a time."""
    header = checkpoint.tensors[name]
    kind, width = GGMLQuantizationType[header.dtype], header.shape[-1]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = width // block * block_bytes
    count, step = header.numel // width, max(1, PART_ELEMENTS // width)
    for first in range(0, count, step):
        rows = min(step, count - first)
        raw = np.frombuffer(data, np.uint8, rows * row_bytes, header.start + first * row_bytes)
        if header.dtype in DTYPES:
            values = torch.from_numpy(raw.copy()).view(DTYPES[header.dtype])
        else:
            values = torch.from_numpy(dequantize(raw.reshape(rows, row_bytes), kind))
        yield values.reshape(-1, *header.shape[1:]).to(dtype)


def _halves_apart(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the halves of each head of Llama's queries and keys; transformers does not."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _is_usual_width(fields: dict[str, Any]) -> bool:
    """Whether heads share the hidden size evenly, which Qwen2 need not be told."""
    return bool(fields["head_dim"] * fields["num_attention_heads"] == fields["hidden_size"])
