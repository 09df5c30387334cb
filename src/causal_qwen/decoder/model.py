"""A decoder-only transformer, from token ids to the scores of the next token.

Read ``block.py`` first, which has the equations of a layer, and ``placement.py``; here are the weights of a
layer, and the model that stacks layers. Parameter names are those of transformers' Qwen2, Qwen3 and Llama
without the prefix ``model.``, which is all that loading their weights takes. This module does not know files.

Shapes: B rows, T new tokens, S visible slots (past and new), H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from causal_qwen.decoder.block import BlockMaps, rms_norm, rope_frequencies, rotation, run_block
from causal_qwen.decoder.cache import KVCache, LayerCache
from causal_qwen.decoder.config import DecoderConfig
from causal_qwen.decoder.generation import Generation, generate
from causal_qwen.decoder.placement import placement

__all__ = ["CausalLM", "DecoderOutput"]


# The weights of a block, by the names of a checkpoint -------------------------------------------------------


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``."""
        return rms_norm(x, self.weight, self.eps)


def make_norm(config: DecoderConfig) -> nn.Module:
    """The norm that ``config`` names."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps)


class Attention(nn.Module):
    """The maps of the attention."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``x`` (B, T, H)."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class SwiGLU(nn.Module):
    """The maps of the SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def gate_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """W_gate x and W_up x of ``x`` (B, T, H)."""
        return self.gate_proj(x), self.up_proj(x)


class Block(nn.Module):
    """`run_block` with its weights."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = SwiGLU(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: LayerCache | None, slots: Tensor
    ) -> Tensor:
        """One layer of the residual stream ``x`` (B, T, H); arguments as in `run_block`."""
        attention, mlp = self.self_attn, self.mlp
        maps = BlockMaps(
            attention_norm=self.input_layernorm,
            qkv=attention.qkv,
            query_norm=attention.q_norm,
            key_norm=attention.k_norm,
            output=attention.o_proj,
            mlp_norm=self.post_attention_layernorm,
            gate_up=mlp.gate_up,
            down=mlp.down_proj,
        )
        return run_block(maps, x, cos, sin, mask, cache, slots)


# The model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What a forward pass gives.

    Args:
        logits: (B, T, V), or (B, 1, V) with ``last_only``.
        hidden_states: What the head reads: (B, T, H) or (B, 1, H), after the final norm.
        past_key_values: The cache, now holding these tokens too; None without one.
    """

    logits: Tensor
    hidden_states: Tensor
    past_key_values: KVCache | None


class CausalLM(nn.Module):
    """Token ids in, logits of the next token out: ``head(hidden(input_ids))``.

    Args:
        config: Sizes and kinds. Weights start fresh; ``weights.load_directory`` loads them.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = make_norm(config)
        self.lm_head: nn.Linear | None = None  # tied: the head is the embedding
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.frequencies = rope_frequencies(config)  # (d/2,); no buffer: .to(bfloat16) must leave it alone
        self.initialise()

    def initialise(self) -> None:
        """Weights from N(0, σ²); those that add to the residual stream start 1/√(2·layers) smaller."""
        spread = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=spread / math.sqrt(2 * self.config.num_hidden_layers))
            elif name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=spread)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool = False,
        *,
        last_only: bool = False,
    ) -> DecoderOutput:
        """Logits of the token that follows each position.

        Args:
            input_ids: (B, T) new tokens.
            attention_mask: (B, past + T), 1 at tokens and 0 at padding. Positions count the ones, so padding
                on the left leaves a row's logits as they are without it. None: the new tokens are all real.
            past_key_values: The cache of the tokens before; it is written in place.
            use_cache: Start a cache with room for the whole context where there is none.
            last_only: Score only the last position, which is all that generation needs.

        Raises:
            ValueError: If the prompt is empty, the shapes disagree, or the context or the cache is too short.
        """
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache(input_ids.shape[0])
        hidden = self.hidden(input_ids, attention_mask, past_key_values)  # (B, T, H)
        if last_only:
            hidden = hidden[:, -1:]  # (B, 1, H)
        return DecoderOutput(self.head(hidden), hidden, past_key_values)

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: KVCache | None = None
    ) -> Tensor:
        """Features z of each new token after the final norm, (B, T, H); arguments as in :meth:`forward`."""
        place = placement(self.config, input_ids, attention_mask, past_key_values)
        hidden = self.blocks(
            self.embed_tokens(input_ids),
            positions=place.positions,
            mask=place.mask,
            cache=past_key_values,
            slots=place.slots,
        )
        if past_key_values is not None:
            past_key_values.accept(place.valid)
        return hidden

    def blocks(
        self, embeddings: Tensor, *, positions: Tensor, mask: Tensor, cache: KVCache | None, slots: Tensor
    ) -> Tensor:
        """All blocks and the final norm. No branch depends on a tensor's value: it compiles as one graph.

        Args:
            embeddings: (B, T, H).
            positions: (B, T), of the rotary angles.
            mask: (B or 1, 1, T, S), True where a token may look. S is how many slots of the cache are read.
            cache: The caches of all blocks, or None.
            slots: (T,) slots of the cache that these tokens take.

        Returns:
            (B, T, H).
        """
        x = embeddings
        cos, sin = rotation(positions, self.frequencies, x.dtype)  # (B, 1, T, d/2) each
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask, None if cache is None else cache.layers[index], slots)
        normed: Tensor = self.norm(x)
        return normed

    def head(self, hidden: Tensor) -> Tensor:
        """logits = W z: (..., H) → (..., V), W the embedding when tied."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, weight)

    def new_cache(self, batch: int, capacity: int | None = None) -> KVCache:
        """An empty cache of this model's dtype and device; ``capacity`` is the whole context when None."""
        weight = self.embed_tokens.weight
        capacity = self.config.max_position_embeddings if capacity is None else capacity
        return KVCache(self.config, batch=batch, capacity=capacity, dtype=weight.dtype, device=weight.device)

    def generate(self, input_ids: Tensor, max_new_tokens: int = 128, **options: Any) -> Generation:
        """Continue each row of ``input_ids`` (B, T); options and result as in ``generation.generate``."""
        return generate(self, input_ids, max_new_tokens, **options)
