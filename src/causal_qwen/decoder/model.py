"""A decoder-only transformer, from token ids to the scores of the next token.

Read it from top to bottom: rotary positions, norm, attention, SwiGLU, block, and the model that stacks them.
Parameter names are those of transformers' Qwen2 and Llama without the prefix ``model.``, which is all that
loading their weights takes. This module knows neither files nor sampling.

Shapes: B rows, T new tokens, S visible slots (past and new), H hidden size, N query heads, K key and value
heads, d head width, F SwiGLU width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from causal_qwen.decoder.cache import KVCache, LayerCache
from causal_qwen.decoder.config import DecoderConfig

if TYPE_CHECKING:
    from causal_qwen.decoder.generation import Generation

__all__ = ["CausalLM", "DecoderOutput", "check_fit", "placement", "rope_frequencies", "rotate", "rotation"]


# Positions: each pair of head dimensions turns at its own speed ---------------------------------------------


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """Radians per position of each pair, θ^(−2i/d), stretched by ``config.rope_scaling``: (d/2,), float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    # llama3: how often a pair turns within the original context decides how much of its speed it keeps.
    turns = scaling.original_context * frequencies / (2 * math.pi)  # (d/2,)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(slow, frequencies, kept.clamp(0.0, 1.0))


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the angle of every pair at every position.

    Args:
        positions: (B, T).
        frequencies: (d/2,), float32: an angle in half precision would be wrong by whole turns.
        dtype: Of the result.
    """
    angles = positions[:, None, :, None].float() * frequencies.to(positions.device)  # (B, 1, T, d/2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i+d/2}) of ``heads`` (B, heads, T, d) by their angles."""
    first, second = heads.chunk(2, dim=-1)  # (B, heads, T, d/2) each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# Where new tokens stand, and what they see -----------------------------------------------------------------


class Placement(NamedTuple):
    """Where new tokens stand.

    Args:
        valid: (B, S), False at padding.
        positions: (B, T), of the rotary angles: they count the real tokens.
        slots: (T,) of the cache.
        mask: (B, 1, T, S), True where a token may look.
    """

    valid: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor


def placement(
    config: DecoderConfig, input_ids: Tensor, attention_mask: Tensor | None, cache: KVCache | None
) -> Placement:
    """The places of new tokens (B, T) behind those in the cache; arguments as in :meth:`CausalLM.forward`.

    Raises:
        ValueError: As :meth:`CausalLM.forward`.
    """
    total = check_fit(config, input_ids, attention_mask, cache)
    past = 0 if cache is None else cache.length
    valid = input_ids.new_ones(input_ids.shape[0], total, dtype=torch.bool)  # (B, S)
    if attention_mask is not None:
        valid = attention_mask.bool()
    elif cache is not None:
        valid[:, :past] = cache.valid[:, :past]
    positions = (valid.cumsum(-1) - 1).clamp(min=0)[:, past:]  # (B, T)
    keys = torch.arange(total, device=input_ids.device)  # (S,)
    slots = keys[past:]  # (T,)
    # A padded token sees itself, so that no row of the softmax is empty; nobody else sees it.
    mask = (keys <= slots[:, None]) & valid[:, None, None, :] | (keys == slots[:, None])  # (B, 1, T, S)
    return Placement(valid, positions, slots, mask)


def check_fit(
    config: DecoderConfig, input_ids: Tensor, attention_mask: Tensor | None, cache: KVCache | None
) -> int:
    """The slots in use after these tokens, S; or an error that says what does not fit."""
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be (batch, tokens)")
    batch, new = input_ids.shape
    if batch == 0 or new == 0:
        raise ValueError(
            f"the prompt is empty (input_ids has shape {tuple(input_ids.shape)}): "
            "give at least one token per row, such as the beginning-of-text token"
        )
    total = new if cache is None else cache.length + new
    context = config.max_position_embeddings
    if total > context:
        raise ValueError(f"{total} tokens do not fit the context of {context} positions: shorten the text")
    if cache is not None and cache.batch != batch:
        raise ValueError(f"input_ids has {batch} rows, the cache {cache.batch}: they must agree")
    if cache is not None and total > cache.capacity:
        raise ValueError(
            f"{total} tokens do not fit the cache of {cache.capacity} slots: "
            "start with new_cache(batch, capacity)"
        )
    if attention_mask is not None and attention_mask.shape != (batch, total):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it must cover the cached and the "
            f"new tokens: ({batch}, {total})"
        )
    return total


# The parts of a block ---------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def make_norm(config: DecoderConfig) -> nn.Module:
    """The norm that ``config`` names."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps)


class Attention(nn.Module):
    """Grouped-query attention: N query heads share K key and value heads, softmax(q·kᵀ/√d)·v."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.o_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: LayerCache | None, slots: Tensor
    ) -> Tensor:
        """Mix the positions that each token may see; arguments as in :meth:`CausalLM.blocks`."""
        query = rotate(self._heads(self.q_proj(x)), cos, sin)  # (B, N, T, d)
        key = rotate(self._heads(self.k_proj(x)), cos, sin)  # (B, K, T, d)
        value = self._heads(self.v_proj(x))  # (B, K, T, d)
        if cache is not None:
            cache.write(key, value, slots)
            key, value = cache.read(mask.shape[-1])  # (B, K, S, d)
        # (B, N, T, d)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))  # (B, T, H)
        return output

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, heads · d) → (B, heads, T, d)."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) ⊙ W_up x)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of ``x`` (B, T, H) on its own."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # (B, T, F) inside
        return output


class Block(nn.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = SwiGLU(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: LayerCache | None, slots: Tensor
    ) -> Tensor:
        """One layer of the residual stream ``x`` (B, T, H); arguments as in :meth:`CausalLM.blocks`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, slots)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


# The model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What a forward pass gives.

    Args:
        logits: (B, T, V), or (B, 1, V) when only the last position was asked for.
        hidden_states: What the head saw: (B, T, H) or (B, 1, H), after the final norm.
        past_key_values: The cache, now holding these tokens too; None without one.
    """

    logits: Tensor
    hidden_states: Tensor
    past_key_values: KVCache | None


class CausalLM(nn.Module):
    """Token ids in, logits of the next token out: ``head(hidden(input_ids))``.

    Args:
        config: Sizes and kinds. Weights start fresh; :meth:`from_pretrained` loads them.
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

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, dtype: torch.dtype = torch.float32) -> CausalLM:
        """A decoder with the weights of a directory; see ``weights.load_directory``."""
        from causal_qwen.decoder.weights import load_directory

        return load_directory(directory, dtype=dtype)

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
            use_cache: Start a cache with room for the whole context when none is given.
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
            cache: Where keys and values are kept; None: the tokens see each other only, S = T.
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
        """An empty cache of this model's dtype and device; ``capacity`` is the whole context unless given."""
        weight = self.embed_tokens.weight
        capacity = self.config.max_position_embeddings if capacity is None else capacity
        return KVCache(self.config, batch=batch, capacity=capacity, dtype=weight.dtype, device=weight.device)

    def generate(self, input_ids: Tensor, max_new_tokens: int = 128, **options: Any) -> Generation:
        """Continue each row of ``input_ids`` (B, T); options and result as in ``generation.generate``."""
        from causal_qwen.decoder.generation import generate

        return generate(self, input_ids, max_new_tokens, **options)
