"""The decoder at the speed of memory: prefill, and a step in native code that reads every weight once.

An `Engine` has the three methods that generation needs of a `CausalLM` (``new_cache``, ``hidden``, ``head``),
so ``generation.generate`` runs on either. A prefill is ``block.run_block`` over packed matrices; so is a step
where native code cannot be built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from causal_qwen.decoder.block import rope_frequencies, rotation, run_block
from causal_qwen.decoder.cache import KVCache
from causal_qwen.decoder.config import DecoderConfig
from causal_qwen.decoder.generation import Generation, generate
from causal_qwen.decoder.model import CausalLM
from causal_qwen.decoder.packed import PackedWeights, Precision, normalise, pack
from causal_qwen.decoder.placement import check_fit, placement
from causal_qwen.decoder.step import NativeStep
from causal_qwen.decoder.weights import PretrainedModel, tensors_of
from causal_qwen.kernels.library import library
from causal_qwen.kernels.native import LARGEST_NATIVE
from causal_qwen.kernels.products import Linear

__all__ = ["Engine"]


class Engine:
    """logits = head(hidden(tokens)), from packed weights.

    Args:
        config: The decoder's.
        weights: As `pack` makes them.
        native: Whether steps run in native code, where it can be built.
        tell: Called with one line when native code is about to be built; the log when None.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: PackedWeights,
        *,
        native: bool = True,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.frequencies = rope_frequencies(config)  # (d/2,)
        native_code = library(tell) if native else None
        self.step = None if native_code is None else NativeStep(config, weights, native_code)
        # Without native code weights of fewer bits would be widened at every step: widen them once.
        self.weights = weights if self.step is not None else weights.widened()
        self._maps = [block.maps(config) for block in self.weights.blocks]
        self._head = Linear(self.weights.head)

    @classmethod
    def from_model(
        cls,
        model: CausalLM | PretrainedModel,
        *,
        precision: Precision | None = None,
        native: bool = True,
        tell: Callable[[str], None] | None = None,
    ) -> Engine:
        """The engine of a decoder, or of a Qwen2, Qwen3, Llama or CausalQwen model of transformers.

        Args:
            model: In memory, on the CPU; float32 weights are shared where the engine needs no other form.
                Later changes of its weights may go unnoticed.
            precision: Of the weights: "float32", "bfloat16", "int8" or "int4". Vectors that multiply integers
                are taken to 16 bits by groups; everything else is float32. None: "bfloat16" for a bfloat16
                model, else "float32".
            native: As for the class.
            tell: As for the class.

        Raises:
            ValueError: If the model is not on the CPU, or its config asks for something that the decoder does
                not do.
        """
        if isinstance(model, CausalLM):
            config, tensors = model.config, dict(model.state_dict())
        else:
            config, tensors = tensors_of(model)
        devices = sorted({str(tensor.device) for tensor in tensors.values() if not tensor.is_cpu})
        if devices:
            raise ValueError(
                f"the model is on {', '.join(devices)}; the engine runs on the CPU: move it there"
            )
        if precision is None:
            embedding = tensors["embed_tokens.weight"]
            precision = "bfloat16" if embedding.dtype == torch.bfloat16 else "float32"
        return cls(config, pack(config, tensors, precision=precision), native=native, tell=tell)

    def new_cache(self, batch: int, capacity: int | None = None) -> KVCache:
        """An empty cache; ``capacity`` is the whole context when None."""
        capacity = self.config.max_position_embeddings if capacity is None else capacity
        with torch.inference_mode(False):  # it is written outside of inference mode, too
            return KVCache(self.config, batch=batch, capacity=capacity)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Rows of the embedding, (B, T) → (B, T, H), float32."""
        rows = self.weights.embedding.rows(input_ids.flatten()).dense()
        return rows.view(*input_ids.shape, self.config.hidden_size)

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
        batch, new = input_ids.shape
        cache = self.new_cache(batch, new) if past_key_values is None else past_key_values
        x = self.embed(input_ids) if embeddings is None else embeddings.float()
        if self.step is not None and batch == 1 and _unpadded(attention_mask, cache):
            check_fit(self.config, input_ids, attention_mask, cache)
            pieces = x[0].split(LARGEST_NATIVE)
            return torch.cat([self.extend(piece, [cache], [len(piece)]) for piece in pieces])[None]
        few = new == 1 and batch <= LARGEST_NATIVE
        if self.step is not None and few and attention_mask is None:
            check_fit(self.config, input_ids, attention_mask, cache)
            return self.step(x.clone(memory_format=torch.contiguous_format), cache)
        place = placement(self.config, input_ids, attention_mask, cache)
        cos, sin = rotation(place.positions, self.frequencies, torch.float32)
        # Added to the scores: a mask of booleans would be converted to this in every block.
        mask = torch.zeros(place.mask.shape).masked_fill_(~place.mask, -torch.inf)  # (B, 1, T, S)
        for maps, layer_cache in zip(self._maps, cache.layers, strict=True):
            x = run_block(maps, x, cos, sin, mask, layer_cache, place.slots)
        cache.accept(place.valid)
        return normalise(x, self.weights.gain, self.weights.shift, eps=self.config.norm_eps)

    def reads_some(self, count: int) -> bool:
        """Whether `some` can read this many rows without the others: in native code, where they are few."""
        return self.step is not None and 0 < count <= LARGEST_NATIVE

    @torch.no_grad()
    def some(self, embeddings: Tensor, cache: KVCache, rows: Sequence[int]) -> Tensor:
        """Features z of one more token in some rows of a batch; the others have ended, once and for all.

        Args:
            embeddings: (n, 1, H).
            cache: Of the whole batch; written in place.
            rows: Which of its rows these are.

        Returns:
            (n, 1, H), after the final norm.

        Raises:
            ValueError: If the rows are too many, or the cache is full.
        """
        if self.step is None or not self.reads_some(len(rows)):
            raise ValueError(f"{len(rows)} rows cannot be read without the others: ask reads_some() first")
        if cache.length == cache.capacity:
            raise ValueError(f"the cache is full, with {cache.capacity} slots: start with a larger one")
        return self.step(embeddings.float().clone(memory_format=torch.contiguous_format), cache, rows)

    @torch.no_grad()
    def extend(self, embeddings: Tensor, caches: Sequence[KVCache], counts: Sequence[int]) -> Tensor:
        """Features z of the next tokens of several texts, of which one may be longer than another.

        In native code those of a token depend on its own text alone, bit for bit: they are the same alone and
        in company, and however a prompt is cut into pieces.

        Args:
            embeddings: (N, H), text after text.
            caches: One of a single row for each text, without padding; written in place.
            counts: How many of the N tokens belong to each.

        Returns:
            (N, H), after the final norm.
        """
        if self.step is not None:
            return self.step.extend(
                embeddings.float().clone(memory_format=torch.contiguous_format), caches, counts
            )
        features = []
        for cache, piece in zip(caches, embeddings.split(list(counts)), strict=True):
            ids = torch.zeros(1, len(piece), dtype=torch.long)  # embeddings stand in their place
            features.append(self.hidden(ids, None, cache, embeddings=piece[None])[0])
        return torch.cat(features)

    def head(self, hidden: Tensor) -> Tensor:
        """logits = W z: (..., H) → (..., V), float32."""
        flat = self._head(hidden.reshape(-1, hidden.shape[-1]))
        return flat.view(*hidden.shape[:-1], -1)

    def generate(self, input_ids: Tensor, max_new_tokens: int = 128, **options: Any) -> Generation:
        """Continue each row of ``input_ids`` (B, T); options and result as in ``generation.generate``."""
        return generate(self, input_ids, max_new_tokens, **options)


def _unpadded(attention_mask: Tensor | None, cache: KVCache) -> bool:
    """Whether every token, cached and new, is a real one."""
    if attention_mask is not None:
        return bool(attention_mask.all())
    return bool(cache.valid[:, : cache.length].all())
