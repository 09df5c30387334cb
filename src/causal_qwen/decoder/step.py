"""New tokens of some texts through all blocks, in native code.

This module knows where weights and caches lie, not what is computed from them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from causal_qwen.decoder.block import rope_frequencies
from causal_qwen.decoder.cache import KVCache
from causal_qwen.decoder.config import DecoderConfig
from causal_qwen.decoder.packed import PackedBlock, PackedWeights
from causal_qwen.kernels.interface import CBlock, CDecoder, CStep, CText
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

    def __call__(self, x: Tensor, cache: KVCache, rows: Sequence[int] | None = None) -> Tensor:
        """All blocks and the final norm for one new token per row, which takes the cache's next slot.

        Args:
            x: (n, 1, H) float32, contiguous; overwritten.
            cache: Of float32, with room; written in place.
            rows: The n rows of the cache that get a token; None is all of them.

        Returns:
            ``x``.

        Raises:
            ValueError: If ``x`` or the cache is another model's, or not of float32.
        """
        self._check(cache)
        slot, batch, width = cache.length, cache.batch, self._slot_width
        rows = range(batch) if rows is None else rows
        features = pointer(x, (len(rows), 1, self._config.hidden_size))
        valid = pointer(cache.valid, dtype=torch.bool) or 0
        cache.valid[list(rows), slot] = True
        cache.length += 1
        texts = [
            CText(*cache.addresses, valid + row * cache.capacity, row * width, batch * width) for row in rows
        ]
        return self._run(x, features, texts, list(range(len(rows))), [slot] * len(rows))

    def extend(self, x: Tensor, caches: Sequence[KVCache], counts: Sequence[int]) -> Tensor:
        """The same for any number of new tokens of several texts without padding, each with its own cache.

        What comes out for a token depends on its text alone, bit for bit: neither on the other texts nor on
        how many tokens come at a time.

        Args:
            x: (Σ counts, H) float32, contiguous; overwritten.
            caches: Of one row each, with room; written in place.
            counts: How many of the tokens, in their order, belong to each.

        Returns:
            ``x``.

        Raises:
            ValueError: As for a call.
        """
        for cache, count in zip(caches, counts, strict=True):
            self._check(cache)
            if cache.batch != 1 or cache.length + count > cache.capacity:
                raise ValueError(
                    f"{count} tokens behind {cache.length} in a cache of {cache.batch} rows and "
                    f"{cache.capacity} slots; each text has a cache of one row, with room for it"
                )
        features = pointer(x, (sum(counts), self._config.hidden_size))
        texts, owners, slots = list[CText](), list[int](), list[int]()
        for index, (cache, count) in enumerate(zip(caches, counts, strict=True)):
            texts.append(CText(*cache.addresses, None, 0, self._slot_width))
            owners += [index] * count
            slots += range(cache.length, cache.length + count)
            cache.valid[:, cache.length : cache.length + count] = True
            cache.length += count
        return self._run(x, features, texts, owners, slots)

    @property
    def _slot_width(self) -> int:
        """Numbers of one text in one slot."""
        return self._config.num_key_value_heads * self._config.head_dim

    def _check(self, cache: KVCache) -> None:
        config, first = self._config, cache.layers[0]
        slots = (cache.capacity, cache.batch, config.num_key_value_heads, config.head_dim)
        if len(cache.layers) != config.num_hidden_layers:
            raise ValueError(f"the cache has {len(cache.layers)} layers, not {config.num_hidden_layers}")
        for part in (first.keys, first.values):
            pointer(part, slots)

    def _run(
        self, x: Tensor, features: int | None, texts: list[CText], owners: list[int], slots: list[int]
    ) -> Tensor:
        places = ctypes.c_int64 * len(slots)
        step = CStep(
            features,
            (CText * len(texts))(*texts),
            places(*owners),
            places(*slots),
            len(slots),
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
