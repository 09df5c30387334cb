"""The equations of a decoder: rotary positions, norm, and a block of attention and SwiGLU.

They are stated once, over maps of any form: ``model.py`` gives them modules, ``packed.py`` packed matrices.
Only native code (``cpp/blocks.h``) states them again, for one token per row. This module knows
neither weights nor their names.

Shapes: B rows, T new tokens, S visible slots (past and new), H hidden size, N query heads, K key and value
heads, d head width, F SwiGLU width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from causal_qwen.decoder.cache import LayerCache
from causal_qwen.decoder.config import DecoderConfig

__all__ = ["BlockMaps", "rms_norm", "rope_frequencies", "rotate", "rotation", "run_block"]


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
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(slow, frequencies, share.clamp(0.0, 1.0))


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


# Norm -------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, computed in float32."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


# A block: its equations, whatever form the weights have -----------------------------------------------------

Map = Callable[[Tensor], Tensor]


class BlockMaps(NamedTuple):
    """The learned maps of a block: the modules of a `CausalLM`, or an engine's packed matrices.

    Args:
        attention_norm: (B, T, H), before the attention.
        qkv: (B, T, H) → queries (B, T, N·d), keys and values (B, T, K·d).
        query_norm: (B, N, T, d), of each head by itself; the identity where a model has none.
        key_norm: (B, K, T, d), likewise.
        output: (B, T, N·d) → (B, T, H).
        mlp_norm: (B, T, H), before the SwiGLU.
        gate_up: (B, T, H) → (B, T, F) twice.
        down: (B, T, F) → (B, T, H).
    """

    attention_norm: Map
    qkv: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    query_norm: Map
    key_norm: Map
    output: Map
    mlp_norm: Map
    gate_up: Callable[[Tensor], tuple[Tensor, Tensor]]
    down: Map


def run_block(
    maps: BlockMaps,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    cache: LayerCache | None,
    slots: Tensor,
) -> Tensor:
    """x + attention(norm(x)), then x + swiglu(norm(x)).

    Attention is softmax(q·kᵀ/√d)·v, N query heads sharing K key and value heads; the SwiGLU is
    W_down(silu(W_gate x) ⊙ W_up x).

    Args:
        maps: The block's weights.
        x: (B, T, H), the residual stream.
        cos: (B, 1, T, d/2), as of `rotation`.
        sin: (B, 1, T, d/2).
        mask: (B or 1, 1, T, S), True where a token may look, or numbers that are added to its scores.
        cache: Where keys and values are kept, written in place; None: the tokens see each other only, S = T.
        slots: (T,) slots of the cache that these tokens take.
    """
    width = 2 * cos.shape[-1]  # d
    query, key, value = (  # (B, N, T, d), (B, K, T, d), (B, K, T, d)
        part.unflatten(-1, (-1, width)).transpose(1, 2) for part in maps.qkv(maps.attention_norm(x))
    )
    query = rotate(maps.query_norm(query), cos, sin)
    key = rotate(maps.key_norm(key), cos, sin)
    if cache is not None:
        cache.write(key, value, slots)
        key, value = cache.read(mask.shape[-1])  # (B, K, S, d)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)  # (B, N, T, d)
    x = x + maps.output(mixed.transpose(1, 2).flatten(2))
    gate, up = maps.gate_up(maps.mlp_norm(x))  # (B, T, F) each
    return x + maps.down(F.silu(gate) * up)
