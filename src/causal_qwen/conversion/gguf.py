"""GGUF files: their metadata as a configuration, their tensors dequantised a few rows at a time.

The header is read here and not by the gguf package, whose reader makes objects of all tokens and merges: half
a minute for Qwen's vocabulary. A tensor is never whole in memory, nor is the model. This module does not know
where a dequantised model is kept.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from causal_qwen.conversion.weights import PART_ELEMENTS, TensorParts

__all__ = ["GgufFile"]

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    config.model_type: config for config in (Qwen2Config, Qwen3Config, LlamaConfig)
}
# Names of llama.cpp below the architecture's: names of transformers.
FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
# Formats of metadata; 8 is a string, 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# Angles that follow from the configuration.
IGNORED = {"rope_freqs.weight"}


class GgufTensor(NamedTuple):
    """Where a tensor is in its file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file


class GgufFile:
    """A GGUF file whose header has been read.

    Args:
        path: The file.

    Raises:
        ValueError: If it is no GGUF file, is truncated, or its architecture is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as stream:
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.metadata, self.tensors = _header(self._bytes)
        except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"the header of the GGUF file is damaged or truncated ({error})") from error
        self.architecture = str(self.metadata.get("general.architecture"))

    @property
    def dtype(self) -> torch.dtype:
        """What the file is written in: its half type if it has one, float32 if it is quantised."""
        kinds = {tensor.kind for tensor in self.tensors.values()}
        if not kinds <= set(FLOATS):
            return torch.float32
        # The vectors of a file in half precision are float32.
        halves = [dtype for kind, dtype in FLOATS.items() if kind in kinds and dtype.itemsize == 2]
        return halves[-1] if halves else torch.float32

    def config(self) -> PreTrainedConfig:
        """The configuration that the metadata and the shapes of the tensors describe."""
        if self.architecture not in CONFIGS:
            raise ValueError(f"GGUF files of architecture {self.architecture!r} are not read")
        try:
            fields = {ours: self.metadata[f"{self.architecture}.{theirs}"] for theirs, ours in FIELDS.items()}
            rows = self.tensors["token_embd.weight"].shape[0]
            keys = self.tensors["blk.0.attn_k.weight"].shape[0]
        except KeyError as error:
            raise ValueError(f"the GGUF file has no {error.args[0]}") from None
        for theirs, ours in SPECIAL_TOKENS.items():
            fields[ours] = self.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        theta = self.metadata.get(f"{self.architecture}.rope.freq_base", 10000.0)
        head_dim = keys // fields["num_key_value_heads"]
        if self.architecture != "qwen2" or head_dim != fields["hidden_size"] // fields["num_attention_heads"]:
            fields["head_dim"] = head_dim
        return CONFIGS[self.architecture](
            **fields,
            vocab_size=rows,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            tie_word_embeddings="output.weight" not in self.tensors,
            dtype=self.dtype,
        )

    def weights(self) -> dict[str, TensorParts]:
        """The tensors by the names of transformers, each dequantised as it is asked for.

        Raises:
            ValueError: If the file holds a tensor that its architecture has no place for.
        """
        config = self.config()
        architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        names = get_tensor_name_map(architecture, config.num_hidden_layers)
        theirs = {}
        for ours in _names(config):
            module, _, part = ours.rpartition(".")
            theirs[f"{names.get_name(module)}.{part}"] = ours
        strangers = set(self.tensors) - set(theirs) - IGNORED
        if strangers:
            raise ValueError(
                f"the GGUF file holds tensors that {self.architecture} has no place for, "
                f"such as {min(strangers)}"
            )
        return {
            theirs[name]: TensorParts(self.dtype, tensor.shape, partial(self._parts, name, config))
            for name, tensor in self.tensors.items()
            if name in theirs
        }

    def _parts(self, name: str, config: PreTrainedConfig) -> Iterable[Tensor]:
        if self.architecture == "llama" and ".attn_q." in name:
            return [_uninterleaved(torch.cat(list(self._rows(name))), config.num_attention_heads)]
        if self.architecture == "llama" and ".attn_k." in name:
            return [_uninterleaved(torch.cat(list(self._rows(name))), config.num_key_value_heads)]
        return self._rows(name)

    def _rows(self, name: str) -> Iterator[Tensor]:
        """Dequantised rows, a few at a time."""
        kind, shape, offset = self.tensors[name]
        width = shape[-1]
        row_bytes = _row_bytes(kind, width)
        count = torch.Size(shape).numel() // width
        step = max(1, PART_ELEMENTS // width)
        for start in range(0, count, step):
            rows = min(step, count - start)
            raw = np.frombuffer(self._bytes, np.uint8, rows * row_bytes, offset + start * row_bytes)
            if kind in FLOATS:
                values = torch.from_numpy(raw.copy()).view(FLOATS[kind])
            else:
                values = torch.from_numpy(dequantize(raw.reshape(rows, row_bytes), kind))
            yield values.reshape(-1, *shape[1:]).to(self.dtype)


def _names(config: PreTrainedConfig) -> list[str]:
    """Of the parameters of the architecture, from a model that has no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return list(AutoModelForCausalLM.from_config(config).state_dict())


def _uninterleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each head of Llama's queries and keys; transformers does not."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _row_bytes(kind: GGMLQuantizationType, width: int) -> int:
    elements, size = GGML_QUANT_SIZES[kind]
    return width // elements * size


def _header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata, with arrays of strings as their lengths, and the table of tensors."""
    if data[:4] != b"GGUF":
        raise ValueError("not a GGUF file: it does not begin with GGUF")
    version, tensor_count, field_count = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not read; versions 2 and 3 are")
    position = 24
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        name, position = _string(data, position)
        (kind,) = struct.unpack_from("<I", data, position)
        metadata[name], position = _value(data, position + 4, kind)
    table = []
    for _ in range(tensor_count):
        name, position = _string(data, position)
        (dimensions,) = struct.unpack_from("<I", data, position)
        shape = struct.unpack_from(f"<{dimensions}Q", data, position + 4)
        type_number, offset = struct.unpack_from("<IQ", data, position + 4 + 8 * dimensions)
        position += 16 + 8 * dimensions
        # The fastest dimension comes first in GGUF, last in torch.
        table.append((name, GGMLQuantizationType(type_number), tuple(reversed(shape)), offset))
    alignment = metadata.get("general.alignment") or 32
    start = -(-position // alignment) * alignment
    tensors = {name: GgufTensor(kind, shape, start + offset) for name, kind, shape, offset in table}
    for name, (kind, shape, offset) in tensors.items():
        elements = torch.Size(shape).numel()
        if offset + _row_bytes(kind, elements) > len(data):
            raise ValueError(f"the GGUF file is truncated: {name} lies beyond its end; fetch it again")
    return metadata, tensors


def _value(data: mmap.mmap, position: int, kind: int) -> tuple[Any, int]:
    """A value of metadata, and where it ends."""
    if kind == STRING:
        return _string(data, position)
    if kind != ARRAY:
        form = f"<{SCALARS[kind]}"
        return struct.unpack_from(form, data, position)[0], position + struct.calcsize(form)
    element, count = struct.unpack_from("<IQ", data, position)
    position += 12
    if element != STRING:
        form = f"<{count}{SCALARS[element]}"
        return list(struct.unpack_from(form, data, position)), position + struct.calcsize(form)
    length = struct.Struct("<Q")
    for _ in range(count):
        position += 8 + length.unpack_from(data, position)[0]
    return count, position


def _string(data: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, position)
    start = position + 8
    if start + length > len(data):
        raise IndexError(f"a text of {length} bytes")
    return data[start : start + length].decode("utf-8"), start + length
