"""One token per row through all blocks, in native code: the structures that native.cpp reads.

This module knows where weights and caches lie, not what is computed from them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from causal_qwen.decoder.cache import KVCache
from causal_qwen.decoder.config import DecoderConfig
from causal_qwen.decoder.model import rope_frequencies
from causal_qwen.decoder.packed import PackedBlock, PackedWeights
from causal_qwen.kernels.native import NativeMatrix, library, native_matrix, pointer
from causal_qwen.kernels.products import Matrix

__all__ = ["NativeStep"]


class _Block(ctypes.Structure):
    _fields_ = [
        ("attention_gain", ctypes.c_void_p),
        ("attention_shift", ctypes.c_void_p),
        ("mlp_gain", ctypes.c_void_p),
        ("mlp_shift", ctypes.c_void_p),
        ("qkv", NativeMatrix),
        ("output", NativeMatrix),
        ("gate_up", NativeMatrix),
        ("down", NativeMatrix),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.POINTER(_Block)),
        ("gain", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("frequencies", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("layernorm", ctypes.c_int64),
        ("eps", ctypes.c_double),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("valid", ctypes.c_void_p),
        ("keys", ctypes.POINTER(ctypes.c_void_p)),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
        ("batch", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    ]


class NativeStep:
    """The blocks of packed weights as one native call.

    Args:
        config: The decoder's.
        weights: Kept, because the structures point into them.
        found: The loaded library.
    """

    def __init__(self, config: DecoderConfig, weights: PackedWeights, found: ctypes.CDLL) -> None:
        self._config = config
        self._weights = weights
        self._call = found.decoder_step
        self._blocks = (_Block * len(weights.blocks))(*map(_block, weights.blocks))
        self._frequencies = rope_frequencies(config)  # (d/2,)
        self._decoder = _Decoder(
            self._blocks,
            pointer(weights.gain),
            pointer(weights.shift),
            pointer(self._frequencies),
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.intermediate_size,
            config.norm == "layernorm",
            config.norm_eps,
        )

    @classmethod
    def of(
        cls, config: DecoderConfig, weights: PackedWeights, tell: Callable[[str], None]
    ) -> NativeStep | None:
        """The step, or None where native code cannot be built."""
        found = library(tell)
        return None if found is None else cls(config, weights, found)

    def __call__(self, x: Tensor, cache: KVCache) -> Tensor:
        """All blocks and the final norm for one new token per row, which takes the cache's next slot.

        Args:
            x: (B, 1, H) float32, contiguous; overwritten.
            cache: Of float32, with room; written in place.

        Returns:
            ``x``.

        Raises:
            ValueError: If ``x`` or the cache is another model's, or not of float32.
        """
        config, first = self._config, cache.layers[0]
        slots = (cache.capacity, cache.batch, config.num_key_value_heads, config.head_dim)
        if len(cache.layers) != config.num_hidden_layers:
            raise ValueError(f"the cache has {len(cache.layers)} layers, not {config.num_hidden_layers}")
        for part in (first.keys, first.values):
            pointer(part, slots)
        features = pointer(x, (cache.batch, 1, config.hidden_size))
        cache.valid[:, cache.length] = True
        cache.length += 1
        layers = cache.layers
        pointers = ctypes.c_void_p * len(layers)
        step = _Step(
            features,
            pointer(cache.valid, dtype=torch.bool),
            pointers(*(layer.keys.data_ptr() for layer in layers)),
            pointers(*(layer.values.data_ptr() for layer in layers)),
            cache.batch,
            cache.length,
            cache.capacity,
            torch.get_num_threads(),
        )
        self._call(ctypes.byref(self._decoder), ctypes.byref(step))
        return x


def _block(block: PackedBlock) -> _Block:
    def matrix(part: Matrix, bias: Tensor | None) -> NativeMatrix:
        return native_matrix(*part, bias)

    return _Block(
        pointer(block.attention_gain),
        pointer(block.attention_shift),
        pointer(block.mlp_gain),
        pointer(block.mlp_shift),
        matrix(block.qkv, block.qkv_bias),
        matrix(block.output, block.output_bias),
        matrix(block.gate_up, block.gate_up_bias),
        matrix(block.down, block.down_bias),
    )
