"""The methods: what is trained of a model, on what, and how it becomes one model again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainingArguments

from causal_qwen.causal_lm import CausalLM
from causal_qwen.data import Collator, Encoded
from causal_qwen.losses import IGNORE_INDEX
from causal_qwen.training.features import HeadsOnly, cache_features, collate_features, unlearned_features
from causal_qwen.training.following import number_head
from causal_qwen.training.preparation import Rows
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.sampling import StreamedRows
from causal_qwen.training.shards import is_sharded
from causal_qwen.training.trainer import hold_constants

__all__ = ["Trainable", "as_one_model", "trainable", "with_adapter"]

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Trainable(NamedTuple):
    """What a trainer gets."""

    module: nn.Module
    train: Any  # its rows, or a stream of them
    validation: Any  # rows to evaluate the loss on
    collate: Callable[[Any], dict[str, torch.Tensor]]
    lengths: Sequence[int] | None  # tokens of each row; None for a stream
    unlearned: Callable[[Any], Any]  # a row of ``train`` without its labels


def trainable(
    model: CausalLM, recipe: TrainingRecipe, parts: Rows, collator: Collator, arguments: TrainingArguments
) -> Trainable:
    """The recipe's method applied to ``model``, in place; ``collator`` pads single sequences."""
    if recipe.method == "heads":
        return _heads(model, recipe, parts, collator, arguments)
    module: nn.Module = with_adapter(model, recipe) if recipe.method == "lora" else model
    # Before anything is cut: groups of shards are made of what learns and what does not.
    hold_constants(module, model.config, recipe.hold, following=True)
    if is_sharded(recipe, arguments):
        _shard(model, arguments)
    lengths = None if isinstance(parts.train, StreamedRows) else [len(row) for row in parts.train]
    collate = Collator(collator.pad_token_id, packed=recipe.packing)
    return Trainable(module, parts.train, parts.validation, collate, lengths, _unlearned)


def _unlearned(row: Encoded) -> Encoded:
    return dataclasses.replace(row, labels=[IGNORE_INDEX] * len(row))


def _heads(
    model: CausalLM, recipe: TrainingRecipe, parts: Rows, collator: Collator, arguments: TrainingArguments
) -> Trainable:
    """Features are computed here, once; each process keeps its own file of them."""
    train, validation = (
        cache_features(
            model,
            rows,
            collator,
            batch_size=recipe.batch_size,
            file=Path(arguments.output_dir) / f"features-{name}-{arguments.process_index}.bin",
        )
        # Where everything is solved for, no step is taken that would be watched on rows held out.
        for name, rows in (("train", parts.sample), ("validation", parts.validation if parts.words else []))
    )
    module = HeadsOnly(model)
    hold_constants(module, model.config, recipe.hold, following=False)
    lengths = [len(row) for row in parts.sample]
    return Trainable(module, train, validation, collate_features, lengths, unlearned_features)


def with_adapter(model: CausalLM, recipe: TrainingRecipe) -> nn.Module:
    """LoRA on the backbone's matrices; the heads are trained whole."""
    try:
        import peft
    except ImportError:
        raise ValueError("method lora needs peft; run: pip install 'causal-qwen[train]'") from None
    config = peft.LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,  # type: ignore[arg-type]  # a share of alpha is as good
        lora_dropout=recipe.lora_dropout,
        target_modules=LORA_TARGETS,
        modules_to_save=["abduction", "action"],
        task_type="CAUSAL_LM",
    )
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def _shard(model: CausalLM, arguments: TrainingArguments) -> None:
    """Cut the parameters in place, adapters among them, a share for each process, which all call this.

    Layers are gathered one at a time while they compute; embedding, norm and heads as one group. What every
    process holds whole: scalars, which cannot be cut; heads that are wider than what of the backbone learns
    with them, because a group has one precision; the number head, for which every process solves. Gradients
    of the first two are averaged by `CausalTrainer`.
    """
    model.to(arguments.device)
    mesh = init_device_mesh(arguments.device.type, (arguments.world_size,))
    whole = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    whole |= set(number_head(model))
    whole |= _wider(set(model.parameters()) - set(model.model.layers.parameters()) - whole)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=whole)


def _wider(group: set[nn.Parameter]) -> set[nn.Parameter]:
    """Those that learn in the widest of several precisions."""
    learned = {parameter for parameter in group if parameter.requires_grad}
    widths = {parameter.dtype.itemsize for parameter in learned}
    return {one for one in learned if one.dtype.itemsize == max(widths)} if len(widths) > 1 else set()


def as_one_model(
    module: Any, model: CausalLM, recipe: TrainingRecipe, arguments: TrainingArguments
) -> tuple[CausalLM, Any]:
    """The trained model as one piece, and its adapter, if it has one; every process calls this.

    ``module`` is what was trained, without wrappers of the trainer; the rest are arguments of `trainable`.
    Of shards only the first process makes a whole, in main memory; the others keep what they have.
    """
    if is_sharded(recipe, arguments):
        # Gathered tensor by tensor: no device holds more than one of them besides its shards.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(module, options=options)
        if arguments.process_index > 0:
            return model, None
        model, module = _assembled(module, model, recipe, state)
    adapter = module if recipe.method == "lora" else None
    return model.eval(), adapter


def _assembled(
    module: nn.Module, model: CausalLM, recipe: TrainingRecipe, state: dict[str, Any]
) -> tuple[CausalLM, nn.Module]:
    """A model, and what is trained of it, that take over the tensors of ``state``: none is copied."""
    with torch.device("meta"):
        whole = type(model)(model.config)
        target = with_adapter(whole, recipe) if recipe.method == "lora" else whole
    target.load_state_dict(state, assign=True)
    whole.tie_weights()
    for name, buffer in module.named_buffers():  # those that no state holds, too
        owner, _, leaf = name.rpartition(".")
        setattr(target.get_submodule(owner), leaf, buffer.cpu())
    whole.generation_config = model.generation_config
    return whole, target
