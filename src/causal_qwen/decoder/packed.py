"""The decoder's weights as the engine reads them: few large matrices, in 32, 16, 8 or 4 bits.

Query, key and value share one matrix, gate and up another, so that a block is four products. Eight and four
bits are whole numbers with a scale (and a shift, where it helps) per 32 columns, norms and biases float32.
`PackedBlock.maps` gives them to ``block.run_block``; this module knows neither attention nor caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

__all__ = ["MATRICES", "PackedBlock", "PackedWeights", "Precision", "normalise", "pack", "parts", "quantise"]

Precision = Literal["float32", "bfloat16", "int8", "int4"]
BITS = {"int8": 8, "int4": 4}
# The matrices of a block, and the layers that each is made of.
SOURCES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
MATRICES = tuple(SOURCES)
BLOCK_ROWS = 8192  # of a matrix, widened at one time while it is rounded


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

    @classmethod
    def of_parts(cls, config: DecoderConfig, tensors: Mapping[str, Tensor]) -> PackedWeights:
        """From the tensors that `parts` gives.

        Raises:
            KeyError: If one is missing.
        """

        def matrix(name: str) -> Matrix:
            scale, shift = tensors.get(f"{name}.scale"), tensors.get(f"{name}.shift")
            return Matrix(tensors[f"{name}.weight"], scale, shift)

        def block(prefix: str) -> PackedBlock:
            fields: dict[str, Any] = {name: tensors.get(f"{prefix}.{name}") for name in PackedBlock._fields}
            fields |= {name: tensors[f"{prefix}.{name}"] for name in ("attention_gain", "mlp_gain")}
            return PackedBlock(**fields | {name: matrix(f"{prefix}.{name}") for name in MATRICES})

        embedding = matrix("embedding")
        return cls(
            embedding=embedding,
            blocks=tuple(block(f"blocks.{index}") for index in range(config.num_hidden_layers)),
            gain=tensors["gain"],
            shift=tensors.get("shift"),
            head=matrix("head") if "head.weight" in tensors else embedding,
        )

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
    with a minimum return to where they were, to rounding. A block of rows is widened at a time.

    Raises:
        ValueError: If the columns do not make whole groups (in 4 bits, pairs of them).
    """
    whole = GROUP * (8 // bits)
    if weight.shape[1] % whole:
        remedy = "bfloat16" if weight.shape[1] % GROUP else "int8"
        raise ValueError(
            f"int{bits} takes {whole} columns at a time, and a matrix has {weight.shape[1]}: use {remedy}"
        )
    blocks = (block.float().unflatten(-1, (-1, GROUP)) for block in weight.split(BLOCK_ROWS))  # (rows, G, 32)
    if bits == 4:
        return _joined([_by_range(block, bits)[0] for block in blocks])
    pairs = [(_by_range(block), _by_size(block)) for block in blocks]
    by_range, by_size = (list(zip(*kind, strict=True)) for kind in zip(*pairs, strict=True))
    return _joined(by_size[0] if sum(by_size[1]) <= sum(by_range[1]) else by_range[0])


def _by_range(wide: Tensor, bits: int = 8) -> tuple[Matrix, float]:
    """Each group from its least to its largest entry, (rows, G, 32), and the squared error."""
    low, high = wide.aminmax(dim=-1)
    span = (high - low).clamp(min=torch.finfo(torch.float32).tiny) / (2**bits - 1)
    levels = ((wide - low[..., None]) / span[..., None]).round_()
    if bits == 4:
        return Matrix.from_levels(levels, bits, span, low), 0.0
    shift = low + 128 * span
    levels -= 128
    error = (levels * span[..., None] + shift[..., None] - wide).square().sum()
    return Matrix.from_levels(levels, bits, span, shift), error.item()


def _by_size(wide: Tensor) -> tuple[Matrix, float]:
    """Each group between ± its largest magnitude, (rows, G, 32), in 8 bits, and the squared error."""
    scale = wide.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    levels = (wide / scale[..., None]).round_()
    error = (levels * scale[..., None] - wide).square().sum()
    return Matrix.from_levels(levels, 8, scale), error.item()


def _joined(blocks: Sequence[Matrix]) -> Matrix:
    weight, scale, shift = (
        None if parts[0] is None else torch.cat([part for part in parts if part is not None])
        for parts in zip(*blocks, strict=True)
    )
    assert weight is not None  # of a Matrix
    return Matrix(weight, scale, shift)


def pack(config: DecoderConfig, tensors: Mapping[str, Tensor], *, precision: Precision) -> PackedWeights:
    """The weights of a decoder, packed; arguments and errors as for `parts`."""
    return PackedWeights.of_parts(config, dict(parts(config, tensors, precision=precision)))


@torch.no_grad()
def parts(
    config: DecoderConfig, tensors: Mapping[str, Tensor], *, precision: Precision
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `PackedWeights` by name, one after the other, so that they need not be together.

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

    def matrix(name: str, weight: Tensor, *, vocabulary: bool = False) -> Iterator[tuple[str, Tensor]]:
        if precision in BITS:
            packed = quantise(weight.detach(), 8 if vocabulary else BITS[precision])
        else:
            packed = Matrix(weight.detach().to(getattr(torch, precision)))
        for field, part in zip(Matrix._fields, packed, strict=True):
            if part is not None:
                yield f"{name}.{field}", part

    def vectors(name: str, *sources: str) -> Iterator[tuple[str, Tensor]]:
        present = [tensors[source].detach().float() for source in sources if source in tensors]
        if present:
            yield name, torch.cat(present) if len(present) > 1 else present[0]

    yield from matrix("embedding", tensors["embed_tokens.weight"], vocabulary=True)
    if not config.tie_word_embeddings and "lm_head.weight" in tensors:
        yield from matrix("head", tensors["lm_head.weight"], vocabulary=True)
    yield from vectors("gain", "norm.weight")
    yield from vectors("shift", "norm.bias")
    for index in range(config.num_hidden_layers):
        source, block = f"layers.{index}", f"blocks.{index}"
        for norm, layer in (("attention", "input_layernorm"), ("mlp", "post_attention_layernorm")):
            yield from vectors(f"{block}.{norm}_gain", f"{source}.{layer}.weight")
            yield from vectors(f"{block}.{norm}_shift", f"{source}.{layer}.bias")
        for norm in ("query", "key"):
            yield from vectors(f"{block}.{norm}_gain", f"{source}.self_attn.{norm[0]}_norm.weight")
        for name, layers in SOURCES.items():
            weights = [tensors[f"{source}.{layer}.weight"] for layer in layers]
            yield from matrix(f"{block}.{name}", torch.cat(weights) if len(weights) > 1 else weights[0])
            yield from vectors(f"{block}.{name}_bias", *(f"{source}.{layer}.bias" for layer in layers))


def normalise(x: Tensor, gain: Tensor | None, shift: Tensor | None = None, *, eps: float) -> Tensor:
    """A LayerNorm where there is a shift, else an RMSNorm, of the last dimension; without a gain ``x``."""
    if gain is None:
        return x
    return rms_norm(x, gain, eps) if shift is None else F.layer_norm(x, x.shape[-1:], gain, shift, eps)


def _linear(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """W x + b: (..., columns) → (..., rows)."""
    y = dense_products(x, matrix)
    return y if bias is None else y + bias
