"""A file of tensors that is mapped into memory: written whole or not at all, and never used when damaged.

It is a safetensors file, so that other programs can read it, whose metadata say what it is, what its header
and its tensors add up to, and whatever facts go with them. Tensors begin at multiples of 64 bytes. This
module knows neither models nor keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["Stored", "open_stored", "write_stored"]

FORMAT = "causal-qwen packed weights, 1"
HEADER_BYTES = 2**20  # of the length, the header and the spaces that fill it
ALIGNMENT = 64
LENGTH_BYTES = 8  # of the header's length, with which a safetensors file begins
TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}
FILLER = "filler."


@dataclass(frozen=True)
class Stored:
    """What a file holds.

    Args:
        tensors: By name; views of the mapped file.
        facts: Texts by name.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, str]


def write_stored(path: Path, tensors: Iterable[tuple[str, Tensor]], facts: Mapping[str, str]) -> None:
    """Write a file beside its place, tensor by tensor, then move it there.

    Args:
        path: Its place; processes that write it at the same time do not disturb each other.
        tensors: Names and tensors; each is let go when it is written.
        facts: Texts that go with them.

    Raises:
        OSError: If it cannot be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.seek(HEADER_BYTES)
            header: dict[str, Any] = {}
            position = 0
            for title, tensor in tensors:
                values = tensor.detach().contiguous().reshape(-1)
                content = values.view(torch.uint8)
                file.write(content.numpy().data)
                end = position + content.numel()
                header[title] = _entry(NAMES[tensor.dtype], list(tensor.shape), position, end)
                position = end + -end % ALIGNMENT
                if position > end:
                    header[f"{FILLER}{end}"] = _entry("U8", [position - end], end, position)
                    file.write(bytes(position - end))
            file.flush()
            total = str(_sum(_mapped(Path(name)), position))
            header["__metadata__"] = dict(facts) | {"format": FORMAT, "sum": total}
            header["__metadata__"]["checksum"] = _checksum(header)
            text = json.dumps(header).encode()
            length = HEADER_BYTES - LENGTH_BYTES
            if len(text) > length:
                raise ValueError(f"the header has {len(text)} bytes; {length} are its most")
            file.seek(0)
            file.write(length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def open_stored(path: Path) -> Stored | None:
    """What a file holds, mapped; None if there is none, or it is damaged, cut off or of another version."""
    try:
        storage = _mapped(path)
        start = _view(storage, _entry("U8", [HEADER_BYTES], 0, HEADER_BYTES), first=0).numpy().tobytes()
        if int.from_bytes(start[:LENGTH_BYTES], "little") != HEADER_BYTES - LENGTH_BYTES:
            return None
        header = json.loads(start[LENGTH_BYTES:])
        facts: dict[str, str] = header["__metadata__"]
        if facts.pop("checksum") != _checksum(header) or facts["format"] != FORMAT:
            return None
        del header["__metadata__"]
        size = max(entry["data_offsets"][1] for entry in header.values())
        if storage.nbytes() != HEADER_BYTES + size or str(_sum(storage, size)) != facts["sum"]:
            return None
        tensors = {
            name: _view(storage, entry) for name, entry in header.items() if not name.startswith(FILLER)
        }
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return Stored(tensors, facts)


def _entry(kind: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


def _mapped(path: Path) -> torch.UntypedStorage:
    """The file, mapped; what is written to it in memory stays there."""
    storage: Any = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    return cast(torch.UntypedStorage, storage)


def _sum(storage: torch.UntypedStorage, size: int) -> int:
    """The sum of the words behind the header, modulo 2⁶⁴: as fast as memory, and it brings the file there."""
    words = torch.empty(0, dtype=torch.int64).set_(storage, HEADER_BYTES // 8, (size // 8,))  # type: ignore[call-overload]
    return int(words.sum().item())


def _view(storage: torch.UntypedStorage, entry: Mapping[str, Any], first: int = HEADER_BYTES) -> Tensor:
    """The tensor of an entry, whose offsets count from byte ``first``."""
    dtype, shape = TYPES[entry["dtype"]], torch.Size(entry["shape"])
    start, end = entry["data_offsets"]
    if end - start != shape.numel() * dtype.itemsize:
        raise ValueError(f"{shape} entries of {dtype} in {end - start} bytes")
    offset = (first + start) // dtype.itemsize
    view: Tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape)  # type: ignore[call-overload]
    return view


def _checksum(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
