"""Weights in safetensors files, one tensor at a time: never more in memory than what stays there.

It does not know which files a checkpoint has, nor what the tensors are for.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from causal_qwen.progress import Watch

__all__ = ["TensorParts", "parts_of", "read_weights", "weights_dtype", "write_weights"]

# What safetensors calls the dtypes of weights.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PART_ELEMENTS = 2**23  # elements that are read or written at a time


class TensorParts(NamedTuple):
    """A tensor that is written part by part, and may be made part by part.

    Args:
        dtype: Of all parts.
        shape: Of the whole.
        parts: Its rows in order, a few at a time.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def parts_of(tensor: Tensor) -> TensorParts:
    """A tensor that exists, in parts of a few rows."""
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    return TensorParts(tensor.dtype, tuple(tensor.shape), lambda: rows.split(_part_rows(rows)))


def weights_dtype(files: Sequence[Path]) -> torch.dtype | None:
    """The dtype of the first tensor by name, as the headers say."""
    entries = _entries(files)
    return entries[min(entries)].dtype if entries else None


def read_weights(files: Sequence[Path], *, dtype: torch.dtype, watch: Watch) -> dict[str, Tensor]:
    """Every tensor of these files in ``dtype``, each in memory of its own.

    Args:
        files: Floats in safetensors.
        dtype: Of all tensors.
        watch: Told the elements.

    Raises:
        OSError: If a file is missing.
        SafetensorError: If a file is damaged.
    """
    entries = _entries(files)
    tensors: dict[str, Tensor] = {}
    with watch("reading", sum(torch.Size(entry.shape).numel() for entry in entries.values())) as advance:
        for name, entry in entries.items():
            tensors[name] = _empty(entry.shape, dtype)
            start = 0
            for part in parts_of(tensors[name]).parts():
                # Opened for each part, so that the pages of the file are given back with it.
                with safe_open(entry.file, framework="pt") as opened:
                    stored = opened.get_slice(name)
                    part.copy_(stored[start : start + len(part)] if entry.shape else stored[...])
                start += len(part)
                advance(part.numel())
    return tensors


def write_weights(file: Path, tensors: Mapping[str, TensorParts], *, watch: Watch, phase: str) -> None:
    """Write a safetensors file part by part.

    Args:
        file: To write.
        tensors: By name.
        watch: Told the bytes.
        phase: What the watch is told that this is.
    """
    # Wide dtypes first, so that every tensor is aligned, as safetensors itself does.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream, watch(phase, end) as advance:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            written = 0
            for part in tensors[name].parts():
                raw = part.detach().cpu().contiguous().view(torch.uint8).numpy()
                stream.write(raw.data)
                written += raw.nbytes
                advance(raw.nbytes)
            if written != tensors[name].nbytes:
                raise ValueError(f"{name}: {written} bytes came, {tensors[name].nbytes} were announced")


def _part_rows(rows: Tensor) -> int:
    return max(1, PART_ELEMENTS * len(rows) // max(rows.numel(), 1))


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose memory goes back to the system with it; what malloc gives it may keep for itself."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(dtype).view(shape)


class _Entry(NamedTuple):
    """Where a tensor is, and what its header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def _entries(files: Sequence[Path]) -> dict[str, _Entry]:
    entries = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                header = tensors.get_slice(name)
                entries[name] = _Entry(file, tuple(header.get_shape()), DTYPES[header.get_dtype()])
    return entries
