"""The decoder at the speed of memory: prefill, and a compiled step that reads every weight once.

An `Engine` has the three methods that generation needs of a `CausalLM` (``new_cache``, ``hidden``, ``head``),
so ``generation.generate`` runs on either. A step is compiled once per batch size: the number of visible slots
is a dimension of the graph, not a constant. Where no compiler works, the same equations run uncompiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from causal_qwen.decoder.cache import KVCache
from causal_qwen.decoder.config import DecoderConfig
from causal_qwen.decoder.generation import Generation, generate
from causal_qwen.decoder.model import CausalLM, placement, rope_frequencies, rotation
from causal_qwen.decoder.packed import PackedBlock, PackedWeights, Precision, blocks, normalise, pack
from causal_qwen.decoder.weights import PretrainedModel, tensors_of
from causal_qwen.kernels.compiled import CompiledKernel, compilation_enabled
from causal_qwen.kernels.products import (
    LARGEST_PASS,
    SMALLEST_COMPILED,
    dense_products,
    products,
    row_products,
)

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

# Blocks that one call of compiled code runs: few calls per step, yet a graph that is traced in a second.
LARGEST_GROUP = 6
# What all rows of a product read, such as a norm, is stored once instead of computed for every row.
OPTIONS = {"realize_reads_threshold": 1}


class Engine:
    """logits = head(hidden(tokens)), from packed weights.

    Args:
        config: The decoder's.
        weights: As `pack` makes them.
        compiled: Whether steps are compiled; None compiles where the weights are large enough to be worth it.
        tell: Called with one line when a step is about to be compiled; the log when None.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: PackedWeights,
        *,
        compiled: bool | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.weights = weights if compilation_enabled() else weights.widened()
        self.frequencies = rope_frequencies(config)  # (d/2,)
        large = sum(block.gate_up.size for block in weights.blocks) >= SMALLEST_COMPILED
        self.compiled = (large if compiled is None else compiled) and compilation_enabled()
        self.tell = logger.info if tell is None else tell
        self._batches: set[int] = set()  # that have been compiled
        count = config.num_hidden_layers
        self._group = max(size for size in range(1, LARGEST_GROUP + 1) if count % size == 0)
        self._narrow = CompiledKernel(self._row_blocks, self._dense_blocks, dynamic=False, options=OPTIONS)
        self._wide = CompiledKernel(self._dense_blocks, self._dense_blocks, dynamic=False, options=OPTIONS)

    @classmethod
    def from_model(
        cls, model: CausalLM | PretrainedModel, *, precision: Precision = "float32", **options: Any
    ) -> Engine:
        """The engine of a decoder, or of a Qwen2, Llama or CausalQwen model of transformers.

        Args:
            model: In memory, on the CPU; float32 weights are shared where the engine needs no other form.
            precision: "float32", "bfloat16" or "int8" (weights only; arithmetic is float32 in all of them).
            **options: As for the class.

        Raises:
            ValueError: If the model's config asks for something that the decoder does not do.
        """
        if isinstance(model, CausalLM):
            config, tensors = model.config, dict(model.state_dict())
        else:
            config, tensors = tensors_of(model)
        return cls(config, pack(config, tensors, precision=precision), **options)

    def new_cache(self, batch: int, capacity: int | None = None) -> KVCache:
        """An empty cache; ``capacity`` is the whole context unless given."""
        capacity = self.config.max_position_embeddings if capacity is None else capacity
        with torch.inference_mode(False):  # it is written outside of inference mode, too
            return KVCache(self.config, batch=batch, capacity=capacity)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Rows of the embedding, (B, T) → (B, T, H), float32."""
        rows = self.weights.embedding.rows(input_ids.flatten()).dense()
        return rows.view(*input_ids.shape, -1)

    @torch.no_grad()
    def hidden(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KVCache | None = None,
        *,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Features z of each new token after the final norm, (B, T, H).

        Args:
            input_ids: (B, T).
            attention_mask: (B, past + T), as for `CausalLM`.
            past_key_values: From :meth:`new_cache`; written in place. None: a cache for this call only.
            embeddings: (B, T, H) in the place of ``embed(input_ids)``, such as with numbers read in.
        """
        # Tensors of inference mode would compile a variant of their own.
        with torch.inference_mode(False):
            batch, new = input_ids.shape
            cache = self.new_cache(batch, new) if past_key_values is None else past_key_values
            place = placement(self.config, input_ids, attention_mask, cache)
            x = self.embed(input_ids) if embeddings is None else embeddings.float().clone()
            cos, sin = rotation(place.positions, self.frequencies, torch.float32)
            mask = torch.zeros(place.mask.shape).masked_fill_(~place.mask, -torch.inf)
            x = self._run(x, cos, sin, mask, place.slots.clone(), cache)
            cache.accept(place.valid)
            return normalise(x, self.weights.gain, self.weights.shift, self.config)

    def head(self, hidden: Tensor) -> Tensor:
        """logits = W z: (..., H) → (..., V), float32."""
        flat = products(hidden.reshape(-1, hidden.shape[-1]), self.weights.head)
        return flat.view(*hidden.shape[:-1], -1)

    def generate(self, input_ids: Tensor, max_new_tokens: int = 128, **options: Any) -> Generation:
        """Continue each row of ``input_ids`` (B, T); options and result as in ``generation.generate``."""
        return generate(self, input_ids, max_new_tokens, **options)

    def _run(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, slots: Tensor, cache: KVCache
    ) -> Tensor:
        """All blocks, a group at a time."""
        batch, new = x.shape[:2]
        total = mask.shape[-1]
        run: Callable[..., Tensor] = self._dense_blocks
        first_time = False
        if self.compiled and new == 1 and total > 1:
            run = self._narrow if batch <= LARGEST_PASS else self._wide
            first_time = batch not in self._batches
            if first_time:
                self._batches.add(batch)
                self.tell(f"compiling a step of batch {batch} (once; kept for later processes) …")
                torch._dynamo.mark_dynamic(mask, 3)
        for first in range(0, self.config.num_hidden_layers, self._group):
            group = slice(first, first + self._group)
            keys = [layer.keys[:total] for layer in cache.layers[group]]
            values = [layer.values[:total] for layer in cache.layers[group]]
            if first_time:
                for tensor in (*keys, *values):
                    torch._dynamo.mark_dynamic(tensor, 0)
            x = run(x, cos, sin, mask, slots, keys, values, list(self.weights.blocks[group]))
        if self.compiled and (self._narrow.failed or self._wide.failed):
            self._give_up_compiling()
        return x

    def _give_up_compiling(self) -> None:
        """Without a compiler weights of fewer bits would be widened at every step: widen them once."""
        self.compiled = False
        self.weights = self.weights.widened()

    def _row_blocks(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        slots: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        layers: list[PackedBlock],
    ) -> Tensor:
        return blocks(
            x, cos, sin, mask, slots, keys, values, layers, config=self.config, product=row_products
        )

    def _dense_blocks(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        slots: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        layers: list[PackedBlock],
    ) -> Tensor:
        return blocks(
            x, cos, sin, mask, slots, keys, values, layers, config=self.config, product=dense_products
        )
