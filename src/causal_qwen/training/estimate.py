"""estimate_memory(): what a device holds while a recipe is trained, by part and by moment, before it is.

A run is at its highest at one of a few moments, and at each the tensors that are alive can be counted:

    loading        the whole model, and its embedding once more while <NUM> gets a row
    forward        all activations, and what the loss over the vocabulary makes on its way
    backward       the same activations, and what the loss makes on its way back
    recomputing    with checkpointing: one layer, and gradients of those above it or inputs of those below
    last gradient  all gradients; of a W that is the embedding two, and their sum
    solving        a copy of the backbone, to see what rounding does to it
    gathering      of a model that processes share: its state and a new model, on the first of them

Weights, gradients and the optimizer's moments are those of a model without memory, prepared as `trainable`
does it; activations are what autograd keeps for the backward pass of a layer of transformers'. On a CPU
freed blocks count as well, where malloc keeps them. Nothing is loaded or run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from causal_qwen.causal_lm import CausalLM
from causal_qwen.kernels.ovr import ALIGNMENT, choose_blocks
from causal_qwen.training.features import HeadsOnly
from causal_qwen.training.following import number_head
from causal_qwen.training.methods import LORA_TARGETS, with_adapter
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.trainer import hold_constants

__all__ = ["PARTS", "Batch", "MemoryEstimate", "estimate_memory", "prepare"]

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "vocabulary loss",
    "kept by malloc",
    "framework",
)
FLOAT32 = 4  # bytes
GATHERED_LAYERS = 2  # of a sharded model: the one that computes, and the next one, fetched meanwhile
# glibc gives blocks of this size and more back to the system when they are freed; smaller ones it keeps for
# the next (M_MMAP_THRESHOLD in mallopt(3), which grows to this by itself).
MAPPED_BLOCK = 32 << 20


class Batch(NamedTuple):
    """The largest batch of a run, on one device.

    Args:
        rows: B.
        length: T, tokens of its longest row.
        learned: N, positions that have a label.
        padded: Whether rows differ in length or hold several sequences: attention then has a mask.
        numbers: Whether some labels are numbers.
    """

    rows: int
    length: int
    learned: int
    padded: bool = False
    numbers: bool = True

    @property
    def tokens(self) -> int:
        """B·T."""
        return self.rows * self.length


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device.

    Args:
        moments: By moment, then by part of `PARTS`.
    """

    moments: dict[str, dict[str, int]]

    @property
    def peak(self) -> str:
        """The moment at which most is held."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def parts(self) -> dict[str, int]:
        """By part, at the peak."""
        return self.moments[self.peak]

    @property
    def total(self) -> int:
        """At the peak."""
        return sum(self.parts.values())


def prepare(model: CausalLM, recipe: TrainingRecipe) -> nn.Module:
    """What the recipe trains of ``model``, in place: adapters added, constants held; no data are needed."""
    module: nn.Module = model
    if recipe.method == "heads":
        module = HeadsOnly(model)
    elif recipe.method == "lora":
        module = with_adapter(model, recipe)
    hold_constants(module, model.config, recipe.hold, following=recipe.method != "heads")
    return module


def estimate_memory(
    model: CausalLM,
    module: nn.Module,
    recipe: TrainingRecipe,
    batch: Batch,
    *,
    processes: int = 1,
    device: str = "cpu",
    framework: int = 0,
) -> MemoryEstimate:
    """Bytes by moment and part, on each of ``processes`` devices.

    Args:
        model: A skeleton, on the device "meta".
        module: What `prepare` has made of it.
        recipe: How it is trained.
        batch: The largest one.
        processes: How many train together.
        device: "cpu", or the type of an accelerator.
        framework: What the process holds without a model.
    """
    weights = _Weights.of(model, module, recipe, processes)
    compute = _Compute.of(model, recipe)
    takes_steps = recipe.method != "heads" or batch.learned > 0
    held = {"framework": framework, "parameters": weights.held}
    held["optimizer"] = 2 * _total(weights.learned) if takes_steps else 0
    freed: dict[str, dict[str, Blocks]] = {}  # by moment and part: what is made for it and then freed
    if takes_steps:
        loss = _LossBlocks.of(model, recipe, batch, compute, device=device)
        kept = _Activations.of(model, recipe, batch, compute)
        # Gradients of copies of a model wait in buckets; those of the step's earlier batches are there.
        buckets = weights.learned if processes > 1 and not weights.sharded else Blocks()
        earlier = buckets + (weights.learned if recipe.accumulation > 1 else Blocks())
        forth = kept.layers + kept.heads + kept.casts
        back = kept.layers + kept.heads + (Blocks() if recipe.gradient_checkpointing else kept.casts)
        freed["forward"] = {"gradients": earlier, "activations": forth, "vocabulary loss": loss.forward}
        freed["backward"] = {"gradients": earlier, "activations": back, "vocabulary loss": loss.backward}
        if recipe.gradient_checkpointing and recipe.method != "heads":
            # Inputs of layers go as gradients come, both evenly: one end or the other has the most.
            at_top = {"gradients": earlier + loss.gradient, "activations": kept.layers + kept.one_layer}
            at_bottom = {"gradients": buckets + weights.learned, "activations": kept.one_layer}
            freed["recomputing"] = max(at_top, at_bottom, key=lambda parts: sum(map(_total, parts.values())))
        freed["last gradient"] = {"gradients": buckets + weights.learned + weights.more_gradients}
    if not weights.sharded and recipe.precision_proof and batch.numbers and compute.residual == FLOAT32:
        freed["solving"] = {"parameters": weights.backbone}

    highest = max((_kept_by_malloc(parts) for parts in freed.values()), default=0) if device == "cpu" else 0
    # On the host a model is whole before it is cut or moved, and so is a device's before it is cut.
    loaded = weights.whole + (weights.embedding if device == "cpu" else 0)
    moments = {"loading": {"parameters": loaded, "framework": framework}}
    for moment, parts in freed.items():
        moments[moment] = dict.fromkeys(PARTS, 0) | held
        for part, blocks in parts.items():
            moments[moment][part] += _total(blocks)
        moments[moment]["kept by malloc"] = max(highest - _kept_by_malloc(parts), 0)
    if weights.sharded and device == "cpu":  # elsewhere it is the memory of the host
        moments["gathering"] = held | {"parameters": weights.shares + 2 * weights.whole}
    return MemoryEstimate({name: dict.fromkeys(PARTS, 0) | parts for name, parts in moments.items()})


# Bytes of a tensor: how many there are.
Blocks = Counter[int]


def _blocks(sizes: Iterable[int]) -> Blocks:
    return Counter(sizes)


def _times(blocks: Blocks, count: int) -> Blocks:
    return Counter({size: number * count for size, number in blocks.items()})


def _total(blocks: Blocks) -> int:
    return sum(size * count for size, count in blocks.items())


def _kept_by_malloc(parts: dict[str, Blocks]) -> int:
    """Of the blocks of a moment, those that stay with the process when they are freed."""
    small = (size * n for blocks in parts.values() for size, n in blocks.items() if size < MAPPED_BLOCK)
    return sum(small)


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


class _Weights(NamedTuple):
    """Parameters on one device."""

    whole: int  # bytes of all, as they are loaded
    shares: int  # of what this device keeps, which is all unless it is cut
    held: int  # the same, and what is gathered in a step
    embedding: int
    learned: Blocks  # of those that learn: their gradients, and each of two moments
    more_gradients: Blocks  # at the last one: of a W that is the embedding, and of what is not yet shared out
    backbone: Blocks
    sharded: bool

    @classmethod
    def of(cls, model: CausalLM, module: nn.Module, recipe: TrainingRecipe, processes: int) -> _Weights:
        backbone: Any = model.model
        everything = {*model.parameters(), *module.parameters()}
        learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
        embedding = model.get_input_embeddings().weight
        # The product's and the look-up's gradient are added to a third tensor.
        tied = embedding.requires_grad and model.lm_head.weight is embedding
        more = [embedding.nbytes] * (2 if tied else 0)
        sharded = recipe.fsdp and processes > 1
        gathered = 0
        uncut = everything
        if sharded:
            layers = [list(layer.parameters()) for layer in backbone.layers]
            root = everything.difference(*layers)
            gathered = _bytes(root) + GATHERED_LAYERS * max(map(_bytes, layers))
            more += [parameter.nbytes for parameter in root if parameter.requires_grad]
            uncut = {parameter for parameter in everything if parameter.ndim == 0} | set(number_head(model))
        shares = {p: p.nbytes if p in uncut else _share(p, processes) for p in everything}
        return cls(
            whole=_bytes(everything),
            shares=sum(shares.values()),
            held=sum(shares.values()) + gathered,
            embedding=embedding.nbytes,
            learned=_blocks(shares[parameter] for parameter in learned),
            more_gradients=_blocks(more),
            backbone=_blocks(parameter.nbytes for parameter in backbone.parameters()),
            sharded=sharded,
        )


def _share(parameter: nn.Parameter, processes: int) -> int:
    """Bytes of the rows that the first process holds, as fully_shard cuts them."""
    rows = parameter.shape[0]
    return parameter.nbytes // rows * math.ceil(rows / processes)


class _Compute(NamedTuple):
    """Bytes of an element."""

    matrices: int  # of what matrix products read and make
    residual: int  # of the stream that layers add to
    autocast: bool

    @classmethod
    def of(cls, model: CausalLM, recipe: TrainingRecipe) -> _Compute:
        residual = model.get_input_embeddings().weight.element_size()
        autocast = recipe.bf16 and residual == FLOAT32
        return cls(2 if autocast else residual, residual, autocast)


class _Activations(NamedTuple):
    """What autograd keeps, but for the loss."""

    layers: Blocks  # all of them, or with checkpointing their inputs
    one_layer: Blocks  # and what its backward pass makes on its way
    heads: Blocks
    casts: Blocks  # matrices that autocast has made bfloat16

    @classmethod
    def of(cls, model: CausalLM, recipe: TrainingRecipe, batch: Batch, compute: _Compute) -> _Activations:
        config: Any = model.config
        backbone: Any = model.model
        heads = _head_activations(config, batch, compute)
        if recipe.method == "heads":
            return cls(Blocks(), Blocks(), heads, Blocks())
        learns = [any(p.requires_grad for p in layer.parameters()) for layer in backbone.layers]
        # Below the first layer that learns nothing is kept.
        if model.get_input_embeddings().weight.requires_grad:
            depth = len(learns)
        else:
            depth = len(learns) - learns.index(True) if any(learns) else 0
        one = _layer_activations(config, recipe, batch, compute)
        inputs = _blocks([batch.tokens * config.hidden_size * compute.residual])
        passing = batch.tokens * config.intermediate_size * compute.matrices
        matrices = (p for layer in backbone.layers for p in layer.parameters() if p.ndim == 2)
        return cls(
            layers=_times(inputs if recipe.gradient_checkpointing else one, depth),
            one_layer=one + _blocks([passing] * 3),
            heads=heads,
            casts=_blocks(2 * p.numel() for p in matrices) if compute.autocast else Blocks(),
        )


def _layer_activations(config: Any, recipe: TrainingRecipe, batch: Batch, compute: _Compute) -> Blocks:
    """What autograd keeps of one layer."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * head, config.num_key_value_heads * head
    c, r = compute.matrices, compute.residual
    lora = recipe.method == "lora"
    per_token: list[int] = []  # bytes of each tensor
    for readers in (3, 2):  # of the two norms: query, key and value; gate and up
        per_token += [hidden * FLOAT32, FLOAT32]  # what is normalised, and by how much
        # Normalised, for the gradient of the norm's weight; and weighted. Autocast gives every product that
        # reads it a copy of its own.
        per_token += [] if lora else [hidden * r]
        per_token += [hidden * c] * readers if compute.autocast else [hidden * r]
    if config.model_type.endswith("qwen3"):  # queries and keys have norms of their own
        for width in (queries, keys):
            per_token += [width * FLOAT32] + ([] if lora else [width * c])
    eager = config._attn_implementation == "eager"
    repeated = queries if batch.padded or eager else keys
    per_token += [queries * c, repeated * c, repeated * c, queries * c]  # Q, K, V, and what is read out
    if eager:
        per_token += [heads * batch.length * FLOAT32] + ([heads * batch.length * c] if c == 2 else [])
    else:
        per_token += [heads * FLOAT32] + ([batch.length * c] if batch.padded else [])
    per_token += [config.intermediate_size * c] * 4  # gate, its activation, up, their product
    if lora:
        per_token += [recipe.lora_rank * c] * len(LORA_TARGETS)
        per_token += [queries * c] if compute.autocast else []
    return _blocks(batch.tokens * width for width in per_token)


def _head_activations(config: Any, batch: Batch, compute: _Compute) -> Blocks:
    """The last norm, z, and U with its scale before and after its activation and its noise, float32."""
    features = [config.hidden_size * FLOAT32] * 2 + [config.hidden_size * compute.residual]
    features += [] if compute.residual == FLOAT32 else [config.hidden_size * compute.residual]
    laws = [config.causal_size * FLOAT32] * 4
    return _blocks(batch.tokens * width for width in features + laws)


class _LossBlocks(NamedTuple):
    """Of One-vs-Rest, and of cross-entropy where it has a weight: the most at once."""

    forward: Blocks
    backward: Blocks
    gradient: Blocks  # of W, which remains

    @classmethod
    def of(
        cls, model: CausalLM, recipe: TrainingRecipe, batch: Batch, compute: _Compute, *, device: str
    ) -> _LossBlocks:
        config: Any = model.config
        W = model.lm_head.weight
        N, V, D = batch.learned, config.vocab_size, config.causal_size
        dense = _blocks([W.nbytes] if W.requires_grad else [])
        forth, back, kept = _one_vs_rest(recipe, N, V, D, W, device=device)
        if not recipe.softmax_loss_weight:
            return cls(kept + forth, kept + back, dense)
        scores = _blocks([N * V * FLOAT32])
        cast = _blocks([V * D * 2] if compute.autocast else [])  # W, for the product and for its gradient
        # Forth: logits and their logarithmic softmax, which stays. Back: it, the gradient of the likelihood
        # and that of the logits; then the last of them and that of W.
        passing = (_times(scores, 3) + cast, scores + dense + _times(cast, 2), scores + back)
        return cls(
            kept + max(forth, _times(scores, 2) + cast, key=_total),
            kept + max(passing, key=_total),
            dense,
        )


def _one_vs_rest(
    recipe: TrainingRecipe, N: int, V: int, D: int, W: torch.Tensor, *, device: str
) -> tuple[Blocks, Blocks, Blocks]:
    """What N positions make on the way forth, what on the way back, and what they keep in between."""
    dense = [W.nbytes] if W.requires_grad else []
    # U of the labelled positions, and the same without what a number must not teach: loc and scale each.
    kept = [N * D * FLOAT32] * 4
    if recipe.ovr_rivals is not None:
        words = N * (1 + min(recipe.ovr_rivals, V - 1))
        return Blocks(), _blocks([words * D * FLOAT32, *dense]), _blocks([*kept, words * D * FLOAT32])
    if recipe.loss_impl == "reference":
        # Scores and scales and what they are made of; going back, the angle, the radius and the arc as well.
        scores = N * V * FLOAT32
        return _blocks([scores] * 2), _blocks([scores] * 6), _blocks([*kept, *[scores] * 5, *dense])
    rows = V if recipe.loss_impl == "fused" else min(recipe.num_negatives + min(N, V) + 1, V)
    kept += [N * (D + 2) * FLOAT32] * 4  # [U, U0, ·], loc and scale, and their gradients
    kept += [rows * FLOAT32] * 2  # gradients of b − C and of the balance
    selected = rows * D * W.element_size()
    if recipe.loss_impl == "sampled":
        kept += [selected] * (2 if W.requires_grad else 1)  # rows of W, and their gradient
    else:
        kept += dense  # made on the way forth
        dense = []
    tokens, block = choose_blocks(N, rows, D + 2, block_size=None, device=torch.device(device))
    stride = math.ceil((D + 2) / ALIGNMENT) * ALIGNMENT
    walk = [block * stride * FLOAT32] * 4 + [tokens * block * FLOAT32] * 3 + [N * stride * FLOAT32] * 2
    return _blocks(walk), _blocks(dense), _blocks(kept)
