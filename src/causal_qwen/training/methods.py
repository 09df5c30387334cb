"""The methods: what is trained of a model, on what, and how it becomes one model again."""

from __future__ import annotations

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
from causal_qwen.data import Collator
from causal_qwen.training.features import HeadsOnly, cache_features, collate_features
from causal_qwen.training.following import number_head
from causal_qwen.training.preparation import Rows
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.sampling import StreamedRows

__all__ = ["Trainable", "as_one_model", "trainable", "with_adapter"]

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Trainable(NamedTuple):
    """What a trainer gets."""

    module: nn.Module
    train: Any  # its rows, or a stream of them
    validation: Any  # rows to evaluate the loss on
    collate: Callable[[Any], dict[str, torch.Tensor]]
    lengths: Sequence[int] | None  # tokens of each row; None for a stream


def trainable(
    model: CausalLM, recipe: TrainingRecipe, parts: Rows, collator: Collator, arguments: TrainingArguments
) -> Trainable:
    """The recipe's method applied to ``model``, in place; ``collator`` pads single sequences."""
    if recipe.method == "heads":
        return _heads(model, recipe, parts, collator, arguments)
    module: nn.Module = model
    if recipe.method == "lora":
        module = with_adapter(model, recipe)
    elif recipe.fsdp and arguments.world_size > 1:
        _shard(model, arguments)
    lengths = None if isinstance(parts.train, StreamedRows) else [len(row) for row in parts.train]
    collate = Collator(collator.pad_token_id, packed=recipe.packing)
    return Trainable(module, parts.train, parts.validation, collate, lengths)


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
    lengths = [len(row) for row in parts.sample]
    return Trainable(HeadsOnly(model), train, validation, collate_features, lengths)


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
    """Cut the parameters in place, a share for each process, which all call this.

    Layers are gathered one at a time while they compute; embedding, norm and heads as one group. Scalars
    cannot be cut: every process holds them, and their gradients are averaged by `CausalTrainer`. The number
    head has no gradients: every process solves for all of it.
    """
    model.to(arguments.device)
    mesh = init_device_mesh(arguments.device.type, (arguments.world_size,))
    whole = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    whole |= set(number_head(model))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=whole)


def as_one_model(
    module: Any, model: CausalLM, recipe: TrainingRecipe, arguments: TrainingArguments
) -> tuple[CausalLM, Any]:
    """The trained model as one piece, and its adapter, if it has one; every process calls this.

    ``module`` is what was trained, without wrappers of the trainer; the rest are arguments of `trainable`.
    """
    if recipe.fsdp and arguments.world_size > 1:
        # The whole state on the first process, and nothing on the others.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(module, options=options)
        whole = type(model)(model.config)
        if arguments.process_index == 0:
            whole.load_state_dict(state, strict=False)  # a tied head is not in it
            whole.tie_weights()
        return whole.eval(), None
    if recipe.method == "lora":
        return module.get_base_model().eval(), module
    return model.eval(), None
