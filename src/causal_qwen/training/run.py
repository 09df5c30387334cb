"""train(): a recipe becomes a trained, calibrated model in a directory that is whole or absent."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from transformers import EarlyStoppingCallback, TrainingArguments, set_seed

from causal_qwen.conversion.files import atomic_directory
from causal_qwen.evaluation import evaluate, fit_conformal
from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.training import monitoring
from causal_qwen.training.card import model_card
from causal_qwen.training.checkpoints import clear_debris, flush_to_disk, last_checkpoint
from causal_qwen.training.data import Source
from causal_qwen.training.encoding import Collator, numbers_of
from causal_qwen.training.features import HeadsOnly, cache_features, collate_features
from causal_qwen.training.preparation import Rows, batches_of, load_model, prepare_rows
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.sharding import gathered, shard
from causal_qwen.training.start import recalibrate_gain, set_value_space, wake_numbers
from causal_qwen.training.trainer import CausalTrainer

__all__ = ["TrainingResult", "train"]

logger = logging.getLogger(__name__)

# What may differ when a run is resumed: it changes what is told or kept, not what is computed.
FREE_FIELDS = {"report_to", "run_name", "save_total_limit", "diagnostics"}
LOSS_FIELDS = (
    "loss_impl",
    "num_negatives",
    "classification_loss_weight",
    "reg_loss_weight",
    "softmax_loss_weight",
    "gate_alpha",
)
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class TrainingResult:
    """What came out.

    Args:
        output: Directory of the trained model.
        metrics: Every metric of the final evaluation, and train/steps, train/seconds and the parts' sizes.
        skipped_rows: Rows that could not be used.
    """

    output: Path
    metrics: dict[str, float]
    skipped_rows: int


def train(
    recipe: TrainingRecipe, *, rows: Source | None = None, resume: bool = False, overwrite: bool = False
) -> TrainingResult:
    """Train by a recipe; under torchrun or ``accelerate launch``, every process calls this.

    Args:
        recipe: What and how.
        rows: Rows (mappings, a `datasets` object) instead of the recipe's files.
        resume: Whether to continue an interrupted run from its last checkpoint; without one it begins anew.
        overwrite: Whether the output, and an interrupted run, may be replaced.

    Raises:
        ValueError: If the recipe, the data or the model do not fit; TrainingDiverged, a ValueError, if the
            loss becomes infinite or NaN.
        FileExistsError: If the output, or an interrupted run, exists and neither flag allows for it.
    """
    output = Path(recipe.output)
    workspace = output.with_name(output.name + ".run")
    set_seed(recipe.seed)
    arguments = _arguments(recipe, workspace)
    is_main = arguments.process_index == 0
    if is_main:
        _enter_workspace(output, workspace, resume=resume, overwrite=overwrite)
    PartialState().wait_for_everyone()
    model, processor = load_model(recipe)
    parts = prepare_rows(recipe, processor, rows)
    if is_main:
        _check_same_run(recipe, parts, workspace)
    _prepare_model(model, recipe, parts, processor)

    trainer = _trainer(model, processor, recipe, parts, arguments, workspace)
    checkpoint = last_checkpoint(workspace / "checkpoints") if resume else None
    seconds = trainer.run(checkpoint)
    facts = {
        "train/steps": float(trainer.state.global_step),
        "train/seconds": seconds,
        "train/rows": float(len(parts.sample)),
        "train/validation_rows": float(len(parts.validation)),
        "train/calibration_rows": float(len(parts.calibration)),
    }
    trained, adapter = _unwrapped(trainer, model)
    metrics: dict[str, float] = {}
    if is_main:
        metrics = facts | _calibrate_and_evaluate(trained, processor, recipe, parts)
        _save(trained, adapter, processor, recipe, metrics, parts, workspace, overwrite=overwrite)
    trainer.accelerator.wait_for_everyone()
    return TrainingResult(output, metrics, parts.bad_rows.count)


def _enter_workspace(output: Path, workspace: Path, *, resume: bool, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise FileExistsError(f"{output} exists; choose another output, or allow overwriting")
    if workspace.exists() and not resume:
        if not overwrite:
            raise FileExistsError(f"{workspace} holds an interrupted run; resume it, or allow overwriting")
        shutil.rmtree(workspace)
    (workspace / "checkpoints").mkdir(parents=True, exist_ok=True)
    clear_debris(workspace / "checkpoints")


def _check_same_run(recipe: TrainingRecipe, parts: Rows, workspace: Path) -> None:
    """Refuse to resume with another recipe or other data: the result would be neither run's."""
    file = workspace / "run.json"
    now = {"recipe": dataclasses.asdict(recipe), "data": parts.digest}
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        names = now["recipe"].keys() - FREE_FIELDS  # type: ignore[attr-defined]
        for name in sorted(names):
            old, new = before["recipe"].get(name), dataclasses.asdict(recipe)[name]
            if old != new:
                raise ValueError(
                    f"{workspace} was begun with {name} {old!r}, not {new!r}; resume it with that"
                )
        if before["data"] != parts.digest:
            raise ValueError(f"{workspace} was begun with other data; resume it with those, or begin anew")
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(now), encoding="utf-8")
    partial.replace(file)


def _prepare_model(
    model: CausalQwen2ForCausalLM, recipe: TrainingRecipe, parts: Rows, processor: CausalQwen2Processor
) -> None:
    """Losses as the recipe says, a value space of the data, numbers awake."""
    config = model.config
    for name in LOSS_FIELDS:
        setattr(config, name, getattr(recipe, name))
    config.conformal_scores = None  # they belong to the model as it was
    if config.num_token_id is None:
        raise ValueError(f"{recipe.model} has no <NUM> token; `causal-qwen convert` its base")
    if model.writes_numbers:
        return
    set_value_space(model, recipe.value_space, numbers_of(parts.sample, config.num_token_id))
    batches = batches_of(parts.sample, _collator(processor), recipe.batch_size)
    wake_numbers(model, batches, method=recipe.number_start)


def _collator(processor: CausalQwen2Processor, *, packed: bool = False) -> Collator:
    tokenizer = processor.tokenizer
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Collator(0 if padding is None else padding, packed=packed)


def _arguments(recipe: TrainingRecipe, workspace: Path) -> TrainingArguments:
    options: dict[str, Any] = {}
    if recipe.early_stopping:
        options |= {"load_best_model_at_end": recipe.save_steps > 0, "metric_for_best_model": "eval_loss"}
    return TrainingArguments(
        output_dir=str(workspace / "checkpoints"),
        per_device_train_batch_size=recipe.batch_size,
        per_device_eval_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.accumulation,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps or -1,
        lr_scheduler_type="cosine",
        warmup_steps=recipe.warmup,
        bf16=recipe.bf16,
        gradient_checkpointing=recipe.gradient_checkpointing,
        logging_steps=recipe.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if recipe.eval_steps else "no",
        eval_steps=recipe.eval_steps or None,
        save_strategy="steps" if recipe.save_steps else "no",
        save_steps=recipe.save_steps or 500,
        save_total_limit=recipe.save_total_limit,
        prediction_loss_only=True,
        remove_unused_columns=False,
        label_names=["shift_labels" if recipe.method == "heads" else "labels"],
        dataloader_pin_memory=torch.cuda.is_available(),
        accelerator_config={"dispatch_batches": False},
        # Without an accelerator several processes are joined only when this is said.
        use_cpu=not torch.accelerator.is_available(),
        report_to="none",
        disable_tqdm=True,
        seed=recipe.seed,
        **options,
    )


def _trainer(
    model: CausalQwen2ForCausalLM,
    processor: CausalQwen2Processor,
    recipe: TrainingRecipe,
    parts: Rows,
    arguments: TrainingArguments,
    workspace: Path,
) -> CausalTrainer:
    plain, collator = _collator(processor), _collator(processor, packed=recipe.packing)
    target: nn.Module = model
    train_rows: Any = parts.train
    validation: Any = parts.validation
    collate: Any = collator
    if recipe.method == "heads":
        target, collate = HeadsOnly(model), collate_features
        for name, rows in (("train", parts.sample), ("validation", parts.validation)):
            file = workspace / f"features-{name}-{arguments.process_index}.bin"
            cached = cache_features(model, rows, plain, batch_size=recipe.batch_size, file=file)
            train_rows, validation = (cached, validation) if name == "train" else (train_rows, cached)
    elif recipe.method == "lora":
        target = _with_adapter(model, recipe)
    elif recipe.fsdp and arguments.world_size > 1:
        shard(model, device=arguments.device, processes=arguments.world_size)
    lengths = None if recipe.streaming else [len(row) for row in parts.train]  # type: ignore[union-attr]
    if recipe.method == "heads":
        lengths = [len(row) for row in parts.sample]

    def measure() -> dict[str, float]:
        found = evaluate(model, processor, batches_of(parts.validation, plain, recipe.batch_size))
        agreement = monitoring.mode_agreement(model, batches_of(parts.validation, plain, recipe.batch_size))
        return found | {"dist/mode_agreement": agreement}

    trainer = CausalTrainer(
        recipe=recipe,
        num_token_id=processor.num_token_id,
        lengths=lengths,
        evaluation=measure if parts.validation else None,
        model=target,
        args=arguments,
        train_dataset=train_rows,
        eval_dataset=validation if recipe.eval_steps else None,
        data_collator=collate,
        processing_class=processor if recipe.method != "heads" else None,
    )
    if recipe.diagnostics and not recipe.fsdp:
        trainer.add_callback(monitoring.Diagnostics(target, every=recipe.logging_steps))
    trainer.add_callback(monitoring.LocalRecords(workspace))
    trainer.add_callback(monitoring.Trackers(recipe, workspace))
    trainer.add_callback(monitoring.ProgressBar(lambda: trainer.tokens_seen))
    if recipe.early_stopping:
        trainer.add_callback(EarlyStoppingCallback(recipe.early_stopping))
    return trainer


def _with_adapter(model: CausalQwen2ForCausalLM, recipe: TrainingRecipe) -> nn.Module:
    """LoRA on the backbone's matrices; the heads are trained whole."""
    try:
        import peft
    except ImportError:
        raise ValueError("method lora needs peft; run: pip install 'causal-qwen[train]'") from None
    learns_threshold = model.config.learn_threshold
    config = peft.LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=LORA_TARGETS,
        modules_to_save=["abduction", "action"],
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name and name.endswith("threshold"):
            parameter.requires_grad_(learns_threshold)
    return adapted


def _unwrapped(trainer: CausalTrainer, model: CausalQwen2ForCausalLM) -> tuple[CausalQwen2ForCausalLM, Any]:
    """The trained model as one piece on this process, and its adapter, if it has one."""
    if trainer.is_sharded:
        state = gathered(trainer.model)
        whole = CausalQwen2ForCausalLM(model.config)
        if trainer.args.process_index == 0:
            whole.load_state_dict(state, strict=False)
            whole.tie_weights()
        return whole.eval(), None
    unwrapped: Any = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.recipe.method == "lora":
        return unwrapped.get_base_model(), unwrapped
    return model.eval(), None


def _calibrate_and_evaluate(
    model: CausalQwen2ForCausalLM, processor: CausalQwen2Processor, recipe: TrainingRecipe, parts: Rows
) -> dict[str, float]:
    """κ and the intervals from rows that training has not seen, then every metric on the validation rows."""
    model.eval()
    collator = _collator(processor)
    held = parts.calibration or parts.validation
    recalibrate_gain(model, batches_of(held, collator, recipe.batch_size), seed=recipe.seed)
    if parts.calibration:
        fit_conformal(model, batches_of(parts.calibration, collator, recipe.batch_size), seed=recipe.seed)
    if not parts.validation:
        return {}
    found = evaluate(model, processor, batches_of(parts.validation, collator, recipe.batch_size))
    agreement = monitoring.mode_agreement(model, batches_of(parts.validation, collator, recipe.batch_size))
    return found | {"dist/mode_agreement": agreement}


def _save(
    model: CausalQwen2ForCausalLM,
    adapter: Any,
    processor: CausalQwen2Processor,
    recipe: TrainingRecipe,
    metrics: dict[str, float],
    parts: Rows,
    workspace: Path,
    *,
    overwrite: bool,
) -> None:
    """Model, processor, card, recipe, records and curves, in one step; then the workspace is not needed."""
    records = monitoring.read_records(workspace / monitoring.METRICS_FILE)
    with atomic_directory(Path(recipe.output), overwrite=overwrite) as temporary:
        if adapter is not None:
            adapter.save_pretrained(temporary / "adapter")
            model = adapter.merge_and_unload()
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)
        (temporary / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        (temporary / "evaluation.json").write_text(
            json.dumps(metrics, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        (temporary / "README.md").write_text(
            model_card(recipe, metrics, model.config, parts.bad_rows), encoding="utf-8"
        )
        lines = [json.dumps(record) + "\n" for record in records]
        (temporary / monitoring.METRICS_FILE).write_text("".join(lines), encoding="utf-8")
        monitoring.draw_curves(records, temporary / "curves.png")
        for tracked in ("tensorboard", "wandb"):
            if (workspace / tracked).is_dir():
                shutil.copytree(workspace / tracked, temporary / tracked, symlinks=True)
        flush_to_disk(temporary)
    shutil.rmtree(workspace, ignore_errors=True)
