"""What weight files say of themselves: names, shapes and types of tensors, and no tensor.

A damaged file is found here, in milliseconds, before anything is loaded: safetensors checks its header
against the length of the file, and so does the reader of GGUF below. Knows files and no model.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

__all__ = [
    "ConversionError",
    "GGUFHeader",
    "TensorHeader",
    "read_gguf_header",
    "read_json_object",
    "safetensors_headers",
]

# GGUF's value types: how struct reads them; strings and arrays are read by hand.
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9
ALIGNMENT = 32
HEAD_SHOWN, TAIL_SHOWN = 400, 150  # characters of a long message


class ConversionError(ValueError):
    """A checkpoint that cannot be used; the message says what is wrong and what would be right.

    Libraries quote damaged files at any length: of a long message the beginning is kept, and the remedy.
    """

    def __init__(self, message: str) -> None:
        cut = f"{message[:HEAD_SHOWN]} … {message[-TAIL_SHOWN:]}"
        super().__init__(message if len(message) <= len(cut) else cut)


@dataclass(frozen=True)
class TensorHeader:
    """A tensor that was not loaded.

    Args:
        shape: As torch has it.
        dtype: As its file names it: "F32", "BF16", "Q4_1".
        start: Where its bytes begin in a GGUF file; safetensors finds them by name.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int = 0

    @property
    def numel(self) -> int:
        """Entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GGUFHeader:
    """A GGUF file without its tensors.

    Args:
        metadata: Scalars and strings by key; of an array, how many entries it has.
        tensors: By name.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorHeader]

    @property
    def architecture(self) -> str:
        """Such as "qwen2" or "llama"."""
        return str(self.metadata["general.architecture"])

    def size(self, name: str) -> Any:
        """An entry of the architecture's own, such as "embedding_length"; None if it is missing."""
        return self.metadata.get(f"{self.architecture}.{name}")


def read_json_object(file: Path, source: str) -> dict[str, Any]:
    """The JSON object in ``file``.

    Raises:
        ConversionError: If it is missing, no JSON, or another value than an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConversionError(f"{source}: no {file.name} there; is it a model checkpoint?") from None
    except UnicodeDecodeError as error:
        raise ConversionError(
            f"{source}: {file.name} is damaged, not UTF-8 ({error}); fetch it again"
        ) from error
    except (ValueError, RecursionError) as error:  # of syntax, of numbers of thousands of digits, of depth
        raise ConversionError(
            f"{source}: {file.name} is damaged, not JSON ({error}); fetch it again"
        ) from error
    if not isinstance(value, dict):
        raise ConversionError(
            f"{source}: {file.name} holds a JSON {type(value).__name__}, not an object; fetch it again"
        )
    return value


def safetensors_headers(files: Sequence[Path], source: str) -> dict[str, TensorHeader]:
    """Every tensor of these files.

    Raises:
        ConversionError: If a file is damaged or truncated; it is named.
    """
    headers: dict[str, TensorHeader] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    entry = tensors.get_slice(name)
                    headers[name] = TensorHeader(tuple(entry.get_shape()), str(entry.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise ConversionError(
                f"{source}: {file.name} is damaged or truncated ({error}); fetch it again"
            ) from error
    return headers


def read_gguf_header(file: Path, source: str) -> GGUFHeader:
    """Metadata and tensors of a GGUF file; that the file is long enough for them is checked.

    The ``gguf`` package reads the same in seconds, since it keeps every word of the vocabulary.

    Raises:
        ConversionError: If it is no GGUF file, damaged or truncated.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ConversionError(f"{source}: not a GGUF file, whatever its name says; fetch it again")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header, end = _GGUFReader(data).read()
            except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
                raise ConversionError(
                    f"{source}: the header of this GGUF file is damaged or truncated ({error}); "
                    "fetch it again"
                ) from error
    if end > size:
        raise ConversionError(
            f"{source}: truncated, {size:,} bytes of at least {end:,} are there; fetch it again"
        )
    if "general.architecture" not in header.metadata:
        raise ConversionError(f"{source}: this GGUF file names no architecture; fetch another one")
    return header


class _GGUFReader:
    """Walks through the bytes of a GGUF file once."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.offset = data, 4

    def read(self) -> tuple[GGUFHeader, int]:
        """The header, and where the last tensor ends."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        version = self.scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        tensor_count, entry_count = self.scalar("<Q"), self.scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self.string()
            metadata[key] = self.value(self.scalar("<I"))
        table = []
        for _ in range(tensor_count):
            name = self.string()
            sizes = [self.scalar("<Q") for _ in range(self.scalar("<I"))]
            table.append((name, tuple(reversed(sizes)), self.scalar("<I"), self.scalar("<Q")))
        alignment = max(int(metadata.get("general.alignment", ALIGNMENT)), 1)
        data = -(-self.offset // alignment) * alignment
        tensors: dict[str, TensorHeader] = {}
        end = data
        for name, shape, number, start in table:
            kind = GGMLQuantizationType(number)
            tensors[name] = TensorHeader(shape, kind.name, data + start)
            entries, bytes_ = GGML_QUANT_SIZES[kind]
            end = max(end, data + start + tensors[name].numel // entries * bytes_)
        return GGUFHeader(metadata, tensors), end

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        self.skip(length)
        return self.data[self.offset - length : self.offset].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A value, or of an array its length."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in SCALARS:
            self.skip(count * struct.calcsize(SCALARS[kind]))
        elif kind == STRING:
            for _ in range(count):
                self.skip(self.scalar("<Q"))
        else:
            raise ValueError(f"an array of type {kind}")
        return count

    def skip(self, length: int) -> None:
        if length > len(self.data) - self.offset:
            raise ValueError("an entry goes beyond the end of the file")
        self.offset += length
