"""The decoder's weights as the engine reads them: few large matrices, in 32, 16, 8 or 4 bits.

Query, key and value share one matrix, gate and up another, so that a block is four products. Eight and four
bits are whole numbers with a scale (and a shift, where it helps) per 32 columns, norms and biases float32.
`PackedBlock.maps` gives them to ``block.run_block``; this module knows neither attention nor caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from causal_qwen.decoder.block import BlockMaps, rms_norm
from causal_qwen.decoder.config import DecoderConfig
from causal_qwen.kernels.native import GROUP
from causal_qwen.kernels.products import Matrix, dense_products

__all__ = ["PackedBlock", "PackedWeights", "Precision", "normalise", "pack", "quantise"]

Precision = Literal["float32", "bfloat16", "int8", "int4"]
BITS = {"int8": 8, "int4": 4}
MATRICES = ("qkv", "output", "gate_up", "down")  # of a block


class PackedBlock(NamedTuple):
    """One block. Biases, the shift of a LayerNorm and the heads' norms are None where there are none."""

    attention_gain: Tensor  # (H,)
    attention_shift: Tensor | None
    qkv: Matrix  # ((N + 2K)·d, H)
    qkv_bias: Tensor | None
    query_gain: Tensor | None  # (d,)
    key_gain: Tensor | None  # (d,)
    output: Matrix  # (H, N·d)
    output_bias: Tensor | None
    mlp_gain: Tensor  # (H,)
    mlp_shift: Tensor | None
    gate_up: Matrix  # (2F, H)
    gate_up_bias: Tensor | None
    down: Matrix  # (H, F)
    down_bias: Tensor | None

    def widened(self) -> PackedBlock:
        """The same values in float32."""
        wide: dict[str, Any] = {name: Matrix(getattr(self, name).dense()) for name in MATRICES}
        return self._replace(**wide)

    def maps(self, config: DecoderConfig) -> BlockMaps:
        """What `run_block` asks for."""
        norm = partial(normalise, eps=config.norm_eps)
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim

        def qkv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            query, key, value = _linear(x, self.qkv, self.qkv_bias).split([queries, keys, keys], -1)
            return query, key, value

        def gate_up(x: Tensor) -> tuple[Tensor, Tensor]:
            gate, up = _linear(x, self.gate_up, self.gate_up_bias).chunk(2, -1)
            return gate, up

        return BlockMaps(
            attention_norm=partial(norm, gain=self.attention_gain, shift=self.attention_shift),
            qkv=qkv,
            query_norm=partial(norm, gain=self.query_gain),
            key_norm=partial(norm, gain=self.key_gain),
            output=partial(_linear, matrix=self.output, bias=self.output_bias),
            mlp_norm=partial(norm, gain=self.mlp_gain, shift=self.mlp_shift),
            gate_up=gate_up,
            down=partial(_linear, matrix=self.down, bias=self.down_bias),
        )


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
        matrices = [self.head, *(getattr(block, name) for block in self.blocks for name in MATRICES)]
        return sum(part.nbytes for matrix in matrices for part in matrix if part is not None)

    def widened(self) -> PackedWeights:
        """The same values in float32; what is float32 already is shared."""
        embedding = Matrix(self.embedding.dense())
        head = embedding if self.head is self.embedding else Matrix(self.head.dense())
        blocks = tuple(block.widened() for block in self.blocks)
        return replace(self, embedding=embedding, blocks=blocks, head=head)


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
            vector(f"{prefix}.self_attn.q_norm.weight"),
            vector(f"{prefix}.self_attn.k_norm.weight"),
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


def normalise(x: Tensor, gain: Tensor | None, shift: Tensor | None = None, *, eps: float) -> Tensor:
    """A LayerNorm where there is a shift, else an RMSNorm, of the last dimension; without a gain ``x``."""
    if gain is None:
        return x
    return rms_norm(x, gain, eps) if shift is None else F.layer_norm(x, x.shape[-1:], gain, shift, eps)


def _linear(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """W x + b: (..., columns) → (..., rows)."""
    y = dense_products(x, matrix)
    return y if bias is None else y + bias
