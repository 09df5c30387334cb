"""One token per row through all blocks, in native code.

This module knows where weights and caches lie, not what is computed from them.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from causal_qwen.decoder.block import rope_frequencies
from causal_qwen.decoder.cache import KVCache
from causal_qwen.decoder.config import DecoderConfig
from causal_qwen.decoder.packed import PackedBlock, PackedWeights
from causal_qwen.kernels.interface import CBlock, CDecoder, CStep
from causal_qwen.kernels.native import native_matrix, pointer

__all__ = ["NativeStep"]


class NativeStep:
    """The blocks of packed weights as one native call.

    Args:
        config: The decoder's.
        weights: Kept, because the structures point into them.
        native: The loaded library.
    """

    def __init__(self, config: DecoderConfig, weights: PackedWeights, native: ctypes.CDLL) -> None:
        self._config = config
        self._weights = weights
        self._call = native.decoder_step
        self._blocks = (CBlock * len(weights.blocks))(*map(_block, weights.blocks))
        self._frequencies = rope_frequencies(config)  # (d/2,)
        self._decoder = CDecoder(
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
            config.norm_eps,
        )

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
        step = CStep(
            features,
            pointer(cache.valid, dtype=torch.bool),
            pointers(*(layer.keys.data_ptr() for layer in layers)),
            pointers(*(layer.values.data_ptr() for layer in layers)),
            cache.batch,
            cache.length,
            cache.capacity,
            torch.get_num_threads(),
        )
        self._call(self._decoder, step)
        return x


def _block(block: PackedBlock) -> CBlock:
    return CBlock(
        pointer(block.attention_gain),
        pointer(block.attention_shift),
        pointer(block.query_gain),
        pointer(block.key_gain),
        pointer(block.mlp_gain),
        pointer(block.mlp_shift),
        native_matrix(*block.qkv, block.qkv_bias),
        native_matrix(*block.output, block.output_bias),
        native_matrix(*block.gate_up, block.gate_up_bias),
        native_matrix(*block.down, block.down_bias),
    )
