"""The decoder's weights as the engine reads them: few large matrices, in 32, 16, 8 or 4 bits.

Query, key and value share one matrix, gate and up another, so that a block is four products. Eight and four
bits are whole numbers with a scale (and a shift, where it helps) per 32 columns, norms and biases float32.
`blocks` states the layers of ``model.py`` over these matrices; this module knows neither caches' sizes nor
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from causal_qwen.decoder.config import DecoderConfig
from causal_qwen.decoder.model import rotate
from causal_qwen.kernels.native import GROUP
from causal_qwen.kernels.products import Matrix, dense_products

__all__ = ["PackedBlock", "PackedWeights", "Precision", "blocks", "normalise", "pack", "quantise"]

Precision = Literal["float32", "bfloat16", "int8", "int4"]
BITS = {"int8": 8, "int4": 4}


class PackedBlock(NamedTuple):
    """One block. Biases and the shift of a LayerNorm are None where there are none."""

    attention_gain: Tensor  # (H,)
    attention_shift: Tensor | None
    qkv: Matrix  # ((N + 2K)·d, H)
    qkv_bias: Tensor | None
    output: Matrix  # (H, N·d)
    output_bias: Tensor | None
    mlp_gain: Tensor  # (H,)
    mlp_shift: Tensor | None
    gate_up: Matrix  # (2F, H)
    gate_up_bias: Tensor | None
    down: Matrix  # (H, F)
    down_bias: Tensor | None


@dataclass(frozen=True)
class PackedWeights:
    """All weights of a decoder.

    Args:
        embedding: (V, H).
        blocks: One per layer.
        gain: (H,) of the final norm.
        shift: (H,) of a final LayerNorm, else None.
        head: (V, H); the embedding itself where they are tied.
    """

    embedding: Matrix
    blocks: tuple[PackedBlock, ...]
    gain: Tensor
    shift: Tensor | None
    head: Matrix

    @property
    def step_bytes(self) -> int:
        """Bytes that one step has to read: every matrix once, the embedding only as the head."""
        matrices = [self.head]
        for block in self.blocks:
            matrices += [block.qkv, block.output, block.gate_up, block.down]
        return sum(part.nbytes for matrix in matrices for part in matrix if part is not None)

    def widened(self) -> PackedWeights:
        """The same values in float32; what is float32 already is shared."""

        def wide(matrix: Matrix) -> Matrix:
            return Matrix(matrix.dense())

        embedding = wide(self.embedding)
        return PackedWeights(
            embedding=embedding,
            blocks=tuple(
                block._replace(
                    qkv=wide(block.qkv),
                    output=wide(block.output),
                    gate_up=wide(block.gate_up),
                    down=wide(block.down),
                )
                for block in self.blocks
            ),
            gain=self.gain,
            shift=self.shift,
            head=embedding if self.head is self.embedding else wide(self.head),
        )


def quantise(weight: Tensor, bits: int = 8) -> Matrix:
    """The whole numbers of 8 or 4 bits nearest to ``weight`` (rows, columns), by groups of 32 columns.

    A group is scale · q + shift with q over the group's range; in 8 bits also scale · q with |q| ≤ 127, and
    the matrix takes the one with the smaller error. So weights that came from symmetric 8 bits or from 4 bits
    with a minimum return to where they were, to rounding.

    Raises:
        ValueError: If the columns do not make whole groups (in 4 bits, pairs of them).
    """
    whole = GROUP * (8 // bits)
    if weight.shape[1] % whole:
        remedy = "bfloat16" if weight.shape[1] % GROUP else "int8"
        raise ValueError(
            f"int{bits} takes {whole} columns at a time, and a matrix has {weight.shape[1]}: use {remedy}"
        )
    wide = weight.float().unflatten(-1, (-1, GROUP))  # (rows, G, 32)
    tiny = torch.finfo(torch.float32).tiny
    low, high = wide.aminmax(dim=-1)
    span = (high - low).clamp(min=tiny) / (2**bits - 1)
    levels = ((wide - low[..., None]) / span[..., None]).round_()
    if bits == 4:
        return Matrix.from_levels(levels, bits, span, low)
    shift = low + 128 * span
    levels -= 128
    scale = wide.abs().amax(-1).clamp(min=tiny) / 127
    plain = (wide / scale[..., None]).round_()
    error = (plain * scale[..., None] - wide).square().sum()
    if error <= (levels * span[..., None] + shift[..., None] - wide).square().sum():
        return Matrix.from_levels(plain, bits, scale)
    return Matrix.from_levels(levels, bits, span, shift)


@torch.no_grad()
def pack(config: DecoderConfig, tensors: Mapping[str, Tensor], *, precision: Precision) -> PackedWeights:
    """The weights of a decoder, packed.

    Args:
        config: The decoder's.
        tensors: By the names of ``model.CausalLM``.
        precision: Of the matrices. "int4" is of the blocks' only: rounded to 4 bits the embedded base's
            vocabulary matrix changes one token in six, in 8 bits none.

    Raises:
        ValueError: If the precision is unknown.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; choose one of {', '.join(get_args(Precision))}")

    def matrix(weight: Tensor, *, vocabulary: bool = False) -> Matrix:
        if precision in BITS:
            return quantise(weight.detach(), 8 if vocabulary else BITS[precision])
        return Matrix(weight.detach().to(getattr(torch, precision)), None)

    def vector(name: str) -> Tensor | None:
        return tensors[name].detach().float() if name in tensors else None

    def fused(prefix: str, names: tuple[str, ...]) -> tuple[Matrix, Tensor | None]:
        weights = [tensors[f"{prefix}.{name}.weight"] for name in names]
        biases = [vector(f"{prefix}.{name}.bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        return matrix(torch.cat(weights)), torch.cat(present) if present else None

    def block(prefix: str) -> PackedBlock:
        attention, mlp = f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"
        return PackedBlock(
            tensors[f"{attention}.weight"].detach().float(),
            vector(f"{attention}.bias"),
            *fused(f"{prefix}.self_attn", ("q_proj", "k_proj", "v_proj")),
            *fused(f"{prefix}.self_attn", ("o_proj",)),
            tensors[f"{mlp}.weight"].detach().float(),
            vector(f"{mlp}.bias"),
            *fused(f"{prefix}.mlp", ("gate_proj", "up_proj")),
            *fused(f"{prefix}.mlp", ("down_proj",)),
        )

    embedding = matrix(tensors["embed_tokens.weight"], vocabulary=True)
    tied = config.tie_word_embeddings or "lm_head.weight" not in tensors
    return PackedWeights(
        embedding=embedding,
        blocks=tuple(block(f"layers.{index}") for index in range(config.num_hidden_layers)),
        gain=tensors["norm.weight"].detach().float(),
        shift=vector("norm.bias"),
        head=embedding if tied else matrix(tensors["lm_head.weight"], vocabulary=True),
    )


def normalise(x: Tensor, gain: Tensor, shift: Tensor | None, config: DecoderConfig) -> Tensor:
    """The norm of ``config`` over the last dimension."""
    if config.norm == "layernorm":
        return F.layer_norm(x, x.shape[-1:], gain, shift, config.norm_eps)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_eps) * gain


def blocks(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    slots: Tensor,
    visible: Sequence[tuple[Tensor, Tensor]],
    layers: Sequence[PackedBlock],
    *,
    config: DecoderConfig,
) -> Tensor:
    """All blocks, by matrix products. Keys and values are written in place.

    Args:
        x: (B, T, H).
        cos: (B, 1, T, d/2).
        sin: (B, 1, T, d/2).
        mask: (B, 1, T, S), 0 where a token may look, −inf elsewhere.
        slots: (T,) slots of the cache that these tokens take.
        visible: Per block, the slots that are read: keys and values, (S, B, K, d) each.
        layers: The blocks' weights.
        config: The decoder's.
    """
    for layer, caches in zip(layers, visible, strict=True):
        normed = normalise(x, layer.attention_gain, layer.attention_shift, config)
        mixed = _attention(normed, cos, sin, mask, slots, caches, layer, config)
        x = x + _apply(mixed, layer.output, layer.output_bias)
        normed = normalise(x, layer.mlp_gain, layer.mlp_shift, config)
        gate, up = _apply(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)  # (B, T, F) each
        x = x + _apply(F.silu(gate) * up, layer.down, layer.down_bias)
    return x


def _apply(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """W x + b: (B, T, columns) → (B, T, rows)."""
    y = dense_products(x.flatten(0, 1), matrix).view(*x.shape[:2], -1)
    return y if bias is None else y + bias


def _attention(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    slots: Tensor,
    caches: tuple[Tensor, Tensor],
    layer: PackedBlock,
    config: DecoderConfig,
) -> Tensor:
    """softmax(q·kᵀ/√d + mask)·v, heads side by side: (B, T, N·d)."""
    batch, new = x.shape[:2]
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    qkv = _apply(x, layer.qkv, layer.qkv_bias).view(batch, new, heads + 2 * groups, width)
    qkv = qkv.transpose(1, 2)  # (B, N + 2K, T, d)
    query = rotate(qkv[:, :heads], cos, sin)  # (B, N, T, d)
    key = rotate(qkv[:, heads : heads + groups], cos, sin)  # (B, K, T, d)
    for cache, fresh in zip(caches, (key, qkv[:, heads + groups :]), strict=True):
        cache.index_copy_(0, slots, fresh.permute(2, 0, 1, 3))
    past_keys, past_values = (cache.permute(1, 2, 0, 3) for cache in caches)  # (B, K, S, d)
    mixed: Tensor = F.scaled_dot_product_attention(
        query, past_keys, past_values, attn_mask=mask, enable_gqa=True
    )
    return mixed.transpose(1, 2).flatten(2)
