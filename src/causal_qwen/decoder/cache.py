"""Keys and values that were computed once: the memory that makes a step O(n) instead of O(n²).

Every layer owns two preallocated tensors and is written in place at a tensor of slots, so that a compiled
step sees the same shapes and the same storage at every length. This module knows neither attention nor
positions.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from causal_qwen.decoder.config import DecoderConfig

__all__ = ["KVCache", "LayerCache", "kv_cache_bytes"]


def kv_cache_bytes(
    config: DecoderConfig, batch: int, seq_len: int, dtype: torch.dtype = torch.float16
) -> int:
    """2 · layers · batch · kv_heads · seq_len · head_dim · bytes per element.

    Raises:
        ValueError: If ``batch`` or ``seq_len`` is below 1.
    """
    for name, value in (("batch", batch), ("seq_len", seq_len)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return per_token * batch * seq_len


class LayerCache:
    """Keys and values of one layer, slot by slot: the first slots of any cache lie in memory alike.

    Args:
        keys: (capacity, B, kv_heads, head_dim), rotated.
        values: (capacity, B, kv_heads, head_dim).
    """

    __slots__ = ("keys", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store new keys and values, (B, kv_heads, T, head_dim), at ``slots`` (T,), in place."""
        self.keys.index_copy_(0, slots, keys.permute(2, 0, 1, 3))
        self.values.index_copy_(0, slots, values.permute(2, 0, 1, 3))

    def read(self, length: int) -> tuple[Tensor, Tensor]:
        """The first ``length`` slots, (B, kv_heads, length, head_dim), as views."""
        return self.keys[:length].permute(1, 2, 0, 3), self.values[:length].permute(1, 2, 0, 3)


class KVCache:
    """The caches of all layers, how far they are filled, and which slots hold real tokens.

    Slots from ``length`` on hold arbitrary memory and are never read. Whoever attends to the full capacity (a
    step with static shapes) calls :meth:`reset` first: a masked slot has weight 0, but 0 · NaN is NaN.

    Args:
        config: The decoder's.
        batch: B.
        capacity: Slots per row. A row's padding takes slots too.
        dtype: Of keys and values; the model's.
        device: Of keys and values; the model's.

    Raises:
        ValueError: If ``batch`` or ``capacity`` is below 1.
    """

    __slots__ = ("_addresses", "layers", "length", "valid")

    def __init__(
        self,
        config: DecoderConfig,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("batch", batch), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"cache {name} is {value}; it must be at least 1")
        shape = (capacity, batch, config.num_key_value_heads, config.head_dim)
        self.layers = [
            LayerCache(*(torch.empty(shape, dtype=dtype, device=device) for _ in ("keys", "values")))
            for _ in range(config.num_hidden_layers)
        ]
        self.length = 0
        self.valid = torch.zeros(batch, capacity, dtype=torch.bool, device=device)  # False at padding
        self._addresses: tuple[Any, Any] | None = None

    @property
    def addresses(self) -> tuple[Any, Any]:
        """Where keys and values of each layer lie, as arrays for native code."""
        if self._addresses is None:
            pointers = ctypes.c_void_p * len(self.layers)
            self._addresses = (
                pointers(*(layer.keys.data_ptr() for layer in self.layers)),
                pointers(*(layer.values.data_ptr() for layer in self.layers)),
            )
        return self._addresses

    @property
    def batch(self) -> int:
        """Rows."""
        return self.valid.shape[0]

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.valid.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values; equals :func:`kv_cache_bytes`."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def repeat(self, other: KVCache, length: int | None = None) -> None:
        """Take what a cache of one row holds (its first ``length`` slots) for every row of this empty one."""
        length = other.length if length is None else length
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            ours.keys[:length] = theirs.keys[:length]
            ours.values[:length] = theirs.values[:length]
        self.accept(other.valid[:, :length].expand(self.batch, -1))

    def accept(self, valid: Tensor) -> None:
        """Take the slots up to S as filled; ``valid`` (B, S) is False at padding."""
        self.length = valid.shape[1]
        self.valid[:, : self.length] = valid

    def reset(self) -> None:
        """Forget everything and set every slot to 0."""
        for layer in self.layers:
            layer.keys.zero_()
            layer.values.zero_()
        self.valid.zero_()
        self.length = 0
