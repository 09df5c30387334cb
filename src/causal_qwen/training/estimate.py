"""estimate_memory(): what a device holds while a recipe is trained, by part and by moment, before it is.

A run is at its highest at one of a few moments, and at each the tensors that are alive can be counted:

    loading        the whole model, and its embedding once more while <NUM> gets a row
    forward        all activations, and what the loss over the vocabulary makes on its way
    backward       the same activations, and what the loss makes on its way back
    recomputing    with checkpointing: one layer, and gradients of those above it or inputs of those below
    last gradient  all gradients, and that of the embedding once more where W is the embedding
    solving        a copy of the backbone in bfloat16, made of one in its own precision
    gathering      of a model that processes share: its state and a new model, on the first of them

Weights, gradients and the optimizer's moments are those of a model without memory, prepared as `trainable`
does it; activations are what autograd keeps for the backward pass of a layer of transformers'. Allocators
keep some more than is alive, and nothing here knows them. Nothing is loaded or run.
"""

from __future__ import annotations

import math
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

PARTS = ("parameters", "gradients", "optimizer", "activations", "vocabulary loss", "framework")
FLOAT32 = 4  # bytes
GATHERED_LAYERS = 2  # of a sharded model: the one that computes, and the next one, fetched meanwhile


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
    moments = {"loading": {"parameters": weights.whole + weights.embedding}}
    takes_steps = recipe.method != "heads" or batch.learned > 0
    optimizer = 2 * weights.learned if takes_steps else 0
    if takes_steps:
        loss = _vocabulary_loss(model, recipe, batch, compute, device=device)
        kept = _Activations.of(model, recipe, batch, compute)
        held = {"parameters": weights.held, "optimizer": optimizer}
        # Gradients of copies of a model wait in buckets; those of the step's earlier batches are there.
        buckets = weights.learned if processes > 1 and not weights.sharded else 0
        earlier = buckets + (weights.learned if recipe.accumulation > 1 else 0)
        moments["forward"] = held | {
            "gradients": earlier,
            "activations": kept.layers + kept.heads + kept.casts,
            "vocabulary loss": loss.forward,
        }
        moments["backward"] = held | {
            "gradients": earlier,
            "activations": kept.layers + kept.heads + (0 if recipe.gradient_checkpointing else kept.casts),
            "vocabulary loss": loss.backward,
        }
        if recipe.gradient_checkpointing:
            # Inputs of layers go as gradients come, both evenly: one end or the other has the most.
            at_top = {"gradients": earlier + loss.gradient, "activations": kept.layers + kept.one_layer}
            at_bottom = {"gradients": buckets + weights.learned, "activations": kept.one_layer}
            moments["recomputing"] = held | max(at_top, at_bottom, key=lambda parts: sum(parts.values()))
        moments["last gradient"] = held | {
            "gradients": weights.learned + buckets + weights.unsharded_gradients + weights.second_gradient
        }
    if weights.sharded:
        if device == "cpu":  # elsewhere it is the memory of the host
            moments["gathering"] = {"parameters": weights.shares + 2 * weights.whole, "optimizer": optimizer}
    elif recipe.precision_proof and batch.numbers and compute.residual != 2:
        moments["solving"] = {"parameters": weights.whole + weights.backbone, "optimizer": optimizer}
    return MemoryEstimate(
        {
            moment: dict.fromkeys(PARTS, 0) | parts | {"framework": framework}
            for moment, parts in moments.items()
        }
    )


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


class _Weights(NamedTuple):
    """Bytes of parameters on one device."""

    whole: int  # of all, as they are loaded
    shares: int  # of what this device keeps, which is all unless it is cut
    held: int  # the same, and what is gathered in a step
    learned: int  # of those that learn: their gradients, and each of two moments
    backbone: int  # of what is copied to see what rounding does
    embedding: int
    second_gradient: int  # of a W that is the embedding: two gradients, which are added
    unsharded_gradients: int  # of what is not yet shared out
    sharded: bool

    @classmethod
    def of(cls, model: CausalLM, module: nn.Module, recipe: TrainingRecipe, processes: int) -> _Weights:
        backbone: Any = model.model
        everything = list(model.parameters()) if module is not model else []
        everything = list({*everything, *module.parameters()})
        learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
        embedding = model.get_input_embeddings().weight
        second = embedding.requires_grad and model.lm_head.weight is embedding
        sharded = recipe.fsdp and processes > 1
        shares, gathered, kept, unsharded = _bytes(everything), 0, _bytes(learned), 0
        if sharded:
            layers = [list(layer.parameters()) for layer in backbone.layers]
            in_layers = {parameter for layer in layers for parameter in layer}
            root = [p for p in everything if p not in in_layers]
            gathered = _bytes(root) + GATHERED_LAYERS * max(map(_bytes, layers))
            uncut = {p for p in root if p.ndim == 0} | set(number_head(model))
            shares = _shares(everything, uncut, processes)
            kept = _shares(learned, uncut, processes)
            unsharded = _bytes(p for p in root if p.requires_grad)
        return cls(
            whole=_bytes(everything),
            shares=shares,
            held=shares + gathered,
            learned=kept,
            backbone=_bytes(backbone.parameters()),
            embedding=_bytes([embedding]),
            second_gradient=_bytes([embedding]) if second else 0,
            unsharded_gradients=unsharded,
            sharded=sharded,
        )


def _shares(parameters: Iterable[nn.Parameter], uncut: set[nn.Parameter], processes: int) -> int:
    """What the first process holds: of each parameter a share of its rows, and of ``uncut`` all."""
    total = 0
    for parameter in parameters:
        rows = 1 if parameter in uncut else parameter.shape[0]
        share = rows if parameter in uncut else math.ceil(rows / processes)
        total += parameter.numel() // rows * share * parameter.element_size()
    return total


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

    layers: int  # all of them, or with checkpointing their inputs
    one_layer: int  # and what its backward pass makes on its way
    heads: int
    casts: int  # matrices that autocast has made bfloat16

    @classmethod
    def of(cls, model: CausalLM, recipe: TrainingRecipe, batch: Batch, compute: _Compute) -> _Activations:
        config: Any = model.config
        backbone: Any = model.model
        heads = _head_activations(config, batch, compute)
        if recipe.method == "heads":
            return cls(0, 0, heads, 0)
        learns = [any(p.requires_grad for p in layer.parameters()) for layer in backbone.layers]
        # Below the first layer that learns nothing is kept.
        if model.get_input_embeddings().weight.requires_grad:
            depth = len(learns)
        else:
            depth = len(learns) - learns.index(True) if any(learns) else 0
        one = _layer_activations(config, recipe, batch, compute)
        inputs = batch.tokens * config.hidden_size * compute.residual
        matrices = sum(p.numel() for layer in backbone.layers for p in layer.parameters() if p.ndim == 2)
        return cls(
            layers=depth * (inputs if recipe.gradient_checkpointing else one),
            one_layer=one + 3 * batch.tokens * config.intermediate_size * compute.matrices,
            heads=heads,
            casts=2 * matrices if compute.autocast else 0,
        )


def _layer_activations(config: Any, recipe: TrainingRecipe, batch: Batch, compute: _Compute) -> int:
    """What autograd keeps of one layer."""
    hidden, wide = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    c, r = compute.matrices, compute.residual
    lora = recipe.method == "lora"
    # Autocast gives every product a copy of its own of what it reads.
    copies_of_input = (3 * c, 2 * c) if compute.autocast else (r, r)
    normalised = 0 if lora else r
    per_token = 0
    for copies in copies_of_input:
        per_token += hidden * (FLOAT32 + normalised + copies) + FLOAT32
    if config.model_type.endswith("qwen3"):  # queries and keys have norms of their own
        widened = 0 if c == FLOAT32 else FLOAT32
        per_token += (queries + keys) * ((widened or c) + (0 if lora else c))
    eager = config._attn_implementation == "eager"
    repeated = queries if batch.padded or eager else keys
    per_token += c * (2 * queries + 2 * repeated)  # queries, keys, values, and what is read out
    if eager:
        per_token += config.num_attention_heads * batch.length * (FLOAT32 + (2 if c == 2 else 0))
    else:
        per_token += config.num_attention_heads * FLOAT32
        per_token += batch.length * c if batch.padded else 0
    per_token += 4 * c * wide  # gate, its activation, up, their product
    if lora:
        per_token += len(LORA_TARGETS) * recipe.lora_rank * c
        per_token += queries * c if compute.autocast else 0
    return batch.tokens * per_token


def _head_activations(config: Any, batch: Batch, compute: _Compute) -> int:
    """The last norm, z, and U with its scale before and after its activation and its noise, float32."""
    narrow = 0 if compute.residual == FLOAT32 else compute.residual
    features = config.hidden_size * (2 * FLOAT32 + compute.residual + narrow)
    laws = 4 * config.causal_size * FLOAT32
    return batch.tokens * (features + laws)


class _LossBytes(NamedTuple):
    """The most at once, on the way forth and on the way back, and the gradient of W that remains."""

    forward: int
    backward: int
    gradient: int


def _vocabulary_loss(
    model: CausalLM, recipe: TrainingRecipe, batch: Batch, compute: _Compute, *, device: str
) -> _LossBytes:
    """One-vs-Rest, and cross-entropy where it has a weight, over N positions and V words."""
    config: Any = model.config
    W = model.lm_head.weight
    N, V, D = batch.learned, config.vocab_size, config.causal_size
    row = D * W.element_size()
    dense = V * row if W.requires_grad else 0  # a gradient of W
    # U of the labelled positions, and the same without what a number must not teach: loc and scale each.
    laws = 4 * N * D * FLOAT32
    kept, workspace, back = laws, 0, 0
    if recipe.ovr_rivals is not None:
        words = N * (1 + min(recipe.ovr_rivals, V - 1))
        kept += words * (D * FLOAT32 + 8)
        back = words * D * FLOAT32 + dense
    elif recipe.loss_impl == "reference":
        kept += 5 * N * V * FLOAT32
        back = 3 * N * V * FLOAT32 + dense
        workspace = 3 * N * V * FLOAT32
    else:
        rows = V if recipe.loss_impl == "fused" else min(recipe.num_negatives + min(N, V) + 1, V)
        kept += 4 * N * (D + 2) * FLOAT32  # [U, U0, ·], loc and scale, and their gradients
        kept += rows * 2 * FLOAT32
        kept += dense // V * rows  # the gradient is made on the way forth
        if recipe.loss_impl == "sampled":
            kept += rows * row
            back = dense
        tokens, block = choose_blocks(N, rows, D + 2, block_size=None, device=torch.device(device))
        stride = math.ceil((D + 2) / ALIGNMENT) * ALIGNMENT
        workspace = FLOAT32 * (4 * block * stride + 3 * tokens * block + 2 * N * stride)
    if not recipe.softmax_loss_weight:
        return _LossBytes(kept + workspace, kept + back, dense)
    scores = N * V * FLOAT32
    # Forth: logits and their logarithmic softmax, which stays. Back: it, the gradient of the likelihood and
    # that of the logits; then the last of them and that of W.
    cast = V * D * 2 if compute.autocast else 0
    return _LossBytes(
        kept + max(workspace, 2 * scores + cast),
        kept + max(3 * scores + cast, scores + dense + 2 * cast, scores + back),
        dense,
    )
