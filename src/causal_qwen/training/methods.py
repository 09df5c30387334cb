"""The methods: what is trained of a model, on what, and how it becomes one model again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from causal_qwen.data import Collator
from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
from causal_qwen.training.features import HeadsOnly, cache_features, collate_features
from causal_qwen.training.preparation import Rows
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.sampling import StreamedRows
from causal_qwen.training.sharding import gathered, shard

__all__ = ["Place", "Trainable", "as_one_model", "trainable"]

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Place:
    """Where a process works.

    Args:
        workspace: Directory of the run.
        device: Of this process.
        process: Its index.
        processes: How many there are.
    """

    workspace: Path
    device: torch.device
    process: int
    processes: int


@dataclass(frozen=True)
class Trainable:
    """What a trainer gets.

    Args:
        module: What is trained.
        train: Its rows, or a stream of them.
        validation: Rows to evaluate the loss on.
        collate: Makes batches of them.
        lengths: Tokens of each row; None for a stream.
    """

    module: nn.Module
    train: Any
    validation: Any
    collate: Callable[[Any], dict[str, torch.Tensor]]
    lengths: Sequence[int] | None


def trainable(
    model: CausalQwen2ForCausalLM, recipe: TrainingRecipe, parts: Rows, collator: Collator, place: Place
) -> Trainable:
    """The recipe's method applied to ``model``, in place; ``collator`` pads single sequences."""
    if recipe.method == "heads":
        return _heads(model, recipe, parts, collator, place)
    module: nn.Module = model
    if recipe.method == "lora":
        module = _with_adapter(model, recipe)
    elif recipe.fsdp and place.processes > 1:
        shard(model, device=place.device, processes=place.processes)
    lengths = None if isinstance(parts.train, StreamedRows) else [len(row) for row in parts.train]
    collate = Collator(collator.pad_token_id, packed=recipe.packing)
    return Trainable(module, parts.train, parts.validation, collate, lengths)


def _heads(
    model: CausalQwen2ForCausalLM, recipe: TrainingRecipe, parts: Rows, collator: Collator, place: Place
) -> Trainable:
    """Features are computed here, once; each process keeps its own file of them."""
    train, validation = (
        cache_features(
            model,
            rows,
            collator,
            batch_size=recipe.batch_size,
            file=place.workspace / f"features-{name}-{place.process}.bin",
        )
        for name, rows in (("train", parts.sample), ("validation", parts.validation))
    )
    lengths = [len(row) for row in parts.sample]
    return Trainable(HeadsOnly(model), train, validation, collate_features, lengths)


def _with_adapter(model: CausalQwen2ForCausalLM, recipe: TrainingRecipe) -> nn.Module:
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


def as_one_model(
    module: Any, model: CausalQwen2ForCausalLM, recipe: TrainingRecipe, place: Place
) -> tuple[CausalQwen2ForCausalLM, Any]:
    """The trained model as one piece, and its adapter, if it has one; every process calls this.

    Args:
        module: What was trained, without wrappers of the trainer.
        model: The argument of `trainable`, as are recipe and place.
        recipe: The same.
        place: The same.
    """
    if recipe.fsdp and place.processes > 1:
        state = gathered(module)
        whole = CausalQwen2ForCausalLM(model.config)
        if place.process == 0:
            whole.load_state_dict(state, strict=False)  # a tied head is not in it
            whole.tie_weights()
        return whole.eval(), None
    if recipe.method == "lora":
        return module.get_base_model().eval(), module
    return model.eval(), None
