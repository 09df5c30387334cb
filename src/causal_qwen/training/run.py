"""train(): a recipe becomes a trained, calibrated model in a directory that is whole or absent."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from transformers import EarlyStoppingCallback, TrainingArguments, set_seed

from causal_qwen.calibration import set_value_space, wake_numbers
from causal_qwen.calibration.number_head import FEWEST_NUMBERS, forget_numbers
from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion import read_checkpoint
from causal_qwen.conversion.files import atomic_directory
from causal_qwen.data import Collator, Source, batches_of
from causal_qwen.data.encoding import numbers_of
from causal_qwen.data.reading import RECIPE_FILE
from causal_qwen.data.settings import read_settings
from causal_qwen.directories import check_output_directory, check_space
from causal_qwen.evaluation import evaluate
from causal_qwen.heads import NUM_BIAS
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.training.card import model_card
from causal_qwen.training.checkpoints import enter_workspace, flush_to_disk, last_checkpoint, leave_workspace
from causal_qwen.training.curves import draw_curves
from causal_qwen.training.diagnostics import Diagnostics
from causal_qwen.training.features import CachedFeatures
from causal_qwen.training.following import FollowingHead
from causal_qwen.training.methods import Trainable, as_one_model, trainable
from causal_qwen.training.preparation import Rows, check_files, load_model, prepare_rows
from causal_qwen.training.processes import check_launch, lost_processes, patient_barrier
from causal_qwen.training.progress import Progress
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.records import METRICS_FILE, LocalRecords, as_lines, defined, read_records
from causal_qwen.training.resumption import changes_of, check_same_data, check_same_recipe
from causal_qwen.training.sampling import FilledRows
from causal_qwen.training.solving import Batches, calibrate, solve
from causal_qwen.training.trackers import Trackers
from causal_qwen.training.trainer import CausalTrainer

__all__ = ["TrainingResult", "train"]

logger = logging.getLogger(__name__)

EVALUATION_FILE = "evaluation.json"
LOSS_FIELDS = (
    "loss_impl",
    "num_negatives",
    "classification_loss_weight",
    "reg_loss_weight",
    "softmax_loss_weight",
    "ovr_gradient_bound",
    "ovr_rivals",
    "ovr_rival_scale",
    "gate_alpha",
)


@dataclass(frozen=True)
class TrainingResult:
    """What came out.

    Args:
        output: Directory of the trained model.
        metrics: Every metric of the final evaluation, and train/steps, train/seconds and the parts' sizes.
        skipped_rows: Rows that could not be used.
        was_finished: Whether nothing was left to train when the run was resumed.
    """

    output: Path
    metrics: dict[str, float]
    skipped_rows: int
    was_finished: bool = False


def train(
    recipe: TrainingRecipe,
    *,
    rows: Source | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = logger.info,
) -> TrainingResult:
    """Train by a recipe; under torchrun or ``accelerate launch``, every process calls this.

    Args:
        recipe: What and how.
        rows: Rows (mappings, a `datasets` object) instead of the recipe's files.
        resume: Whether to continue an interrupted run from its last checkpoint; without one it begins anew,
            and a finished one is only read.
        overwrite: Whether the output, and an interrupted run, may be replaced.
        progress: Told in a line what is learned from and, every ten seconds where standard error is no
            terminal, which step it is; on a terminal there is a bar. None shows nothing.

    Raises:
        ValueError: If the recipe, the data or the model do not fit; TrainingDiverged, a ValueError, if the
            loss becomes infinite or NaN.
        ConnectionError: If another process of the run has ended.
        FileExistsError: If the output, or an interrupted run, exists and neither flag allows for it.
    """
    output = Path(recipe.output)
    workspace = output.with_name(output.name + ".run")
    check_launch()
    arguments = _arguments(recipe, workspace)  # joins the processes
    if resume and not overwrite and (output / EVALUATION_FILE).is_file():
        return _finished(recipe, output, workspace, processes=arguments.world_size)
    if resume:
        check_same_recipe(recipe, workspace, processes=arguments.world_size)
    check_output_directory(output, overwrite=overwrite)
    if rows is None:
        check_files(recipe)
    set_seed(recipe.seed)
    is_main = arguments.process_index == 0
    if is_main:
        check_space(output, _bytes_to_write(recipe))
        enter_workspace(workspace, resume=resume, overwrite=overwrite)
    PartialState().wait_for_everyone()
    try:
        with lost_processes(workspace):
            return _run(recipe, rows, arguments, resume=resume, overwrite=overwrite, progress=progress)
    except BaseException:
        if is_main:
            leave_workspace(workspace)
        raise


def _run(
    recipe: TrainingRecipe,
    rows: Source | None,
    arguments: TrainingArguments,
    *,
    resume: bool,
    overwrite: bool,
    progress: Callable[[str], None] | None,
) -> TrainingResult:
    """`train` in a workspace that it has entered."""
    output, workspace = Path(recipe.output), Path(arguments.output_dir).parent
    is_main = arguments.process_index == 0
    model, processor = load_model(recipe)
    _check_context(model, recipe)
    parts = prepare_rows(recipe, processor, rows)
    if is_main:
        check_same_data(recipe, parts, workspace, processes=arguments.world_size)
        if progress is not None:
            progress(str(parts))
    collator = Collator.of(processor)
    batches = partial(batches_of, collator=collator, batch_size=recipe.batch_size)
    _prepare_model(model, recipe, parts)
    has_numbers = model.writes_numbers

    prepared = trainable(model, recipe, parts, collator, arguments)
    checkpoint = last_checkpoint(workspace / "checkpoints") if resume else None
    following = None
    data = None  # of a backbone that stays
    if isinstance(prepared.train, CachedFeatures):
        data = solve(model, recipe, parts, batches, prepared.train.number_data(model), frozen=True)
    else:
        following = FollowingHead(model, prepared.module, every=recipe.solve_steps)
        if checkpoint is None:
            following.fill(batches(parts.sample))
    measure = partial(_measure, processor=processor, parts=parts, batches=batches)
    evaluation = partial(measure, model) if parts.validation else None
    trainer = _trainer(prepared, processor, recipe, arguments, evaluation, following, progress)
    try:
        # Of a table all that is learned is solved for: its numbers, and that the text ends behind them.
        seconds = trainer.run(checkpoint) if following is not None or parts.words else 0.0
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, Progress):
                callback.stop()
    facts = {
        "train/steps": float(trainer.state.global_step),
        "train/seconds": seconds,
        "train/processes": float(arguments.world_size),
        "train/sharded": float(trainer.is_sharded),
        "train/skipped_rows": float(parts.bad_rows.count),
        "train/rows": float(len(parts.sample)),
        "train/validation_rows": float(len(parts.validation)),
        "train/calibration_rows": float(len(parts.calibration)),
        "train/numbers": float(parts.numbers["train"]),
        "train/validation_numbers": float(parts.numbers["validation"]),
        "train/calibration_numbers": float(parts.numbers["calibration"]),
    }
    module = trainer.accelerator.unwrap_model(trainer.model)
    trained, adapter = as_one_model(module, model, recipe, arguments)
    wait_for_the_first = patient_barrier()
    metrics: dict[str, float] = {}
    if is_main:
        if progress is not None:
            progress("calibrating and evaluating …")
        if not has_numbers:  # words alone move b of <NUM> too, which has nothing to say
            trained.action.bias.data[trained.config.num_token_id] = NUM_BIAS
        moved = calibrate(trained, processor, recipe, parts, batches, data)
        metrics = facts | measure(trained)
        _save(trained, adapter, processor, recipe, metrics, parts, workspace, moved, overwrite=overwrite)
    wait_for_the_first()
    return TrainingResult(output, metrics, parts.bad_rows.count)


def _finished(recipe: TrainingRecipe, output: Path, workspace: Path, *, processes: int) -> TrainingResult:
    """The result of a run that has reached its end.

    Raises:
        ValueError: If the recipe is another one now: a finished run is not trained further.
    """
    evaluation = json.loads((output / EVALUATION_FILE).read_text(encoding="utf-8"))
    if (output / RECIPE_FILE).is_file():
        changes = changes_of(
            read_settings(output / RECIPE_FILE),
            recipe,
            processes_before=int(evaluation["train/processes"]),
            processes=processes,
        )
        if changes:
            raise ValueError(
                f"{output} is finished, with {', '.join(changes)}; to train it further begin a new run from "
                f"it (--model {output} -o ANOTHER), or train anew (--overwrite)"
            )
    metrics = {name: math.nan if value is None else value for name, value in evaluation.items()}
    shutil.rmtree(workspace, ignore_errors=True)
    return TrainingResult(output, metrics, int(metrics["train/skipped_rows"]), was_finished=True)


def _bytes_to_write(recipe: TrainingRecipe) -> int:
    """About what the model and its checkpoints will take: weights, and two moments of each that learns."""
    weights = read_checkpoint(recipe.model).bytes(recipe.dtype)
    checkpoints = (recipe.save_total_limit or 1) + 1 if recipe.save_steps and recipe.method == "full" else 0
    return weights * (1 + 3 * checkpoints)


def _check_context(model: CausalLM, recipe: TrainingRecipe) -> None:
    longest = model.config.max_position_embeddings
    if recipe.max_length > longest:
        raise ValueError(
            f"max_length is {recipe.max_length}; {recipe.model} reads {longest} tokens: lower it to that"
        )


def _prepare_model(model: CausalLM, recipe: TrainingRecipe, parts: Rows) -> None:
    """Losses as the recipe says, a value space of the data, numbers awake."""
    config = model.config
    for name in LOSS_FIELDS:
        setattr(config, name, getattr(recipe, name))
    config.number_token_gradient = False
    forget_numbers(model)  # what was seen and calibrated belongs to the model as it was
    if config.num_token_id is None:
        raise ValueError(f"{recipe.model} has no <NUM> token; `causal-qwen convert` its base")
    numbers = numbers_of(parts.sample, config.num_token_id)
    is_solved = len(numbers) >= FEWEST_NUMBERS and float(numbers.min()) < float(numbers.max())
    if is_solved or not model.writes_numbers:  # else a head that was solved before stays, in its space
        set_value_space(model, recipe.value_space, numbers)
    if len(numbers) and not model.writes_numbers:
        wake_numbers(model)


def _arguments(recipe: TrainingRecipe, workspace: Path) -> TrainingArguments:
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
        load_best_model_at_end=recipe.early_stopping > 0 and recipe.save_steps > 0,
        metric_for_best_model="eval_loss" if recipe.early_stopping else None,
    )


def _trainer(
    prepared: Trainable,
    processor: CausalQwen2Processor,
    recipe: TrainingRecipe,
    arguments: TrainingArguments,
    evaluation: Callable[[], dict[str, float]] | None,
    following: FollowingHead | None,
    progress: Callable[[str], None] | None,
) -> CausalTrainer:
    rows = prepared.train
    if arguments.world_size > 1 and prepared.lengths is not None:
        rows = FilledRows(rows, prepared.unlearned)
    trainer = CausalTrainer(
        recipe=recipe,
        num_token_id=processor.num_token_id,
        lengths=prepared.lengths,
        evaluation=evaluation,
        following=following,
        model=prepared.module,
        args=arguments,
        train_dataset=rows,
        eval_dataset=prepared.validation if recipe.eval_steps else None,
        data_collator=prepared.collate,
        processing_class=None if recipe.method == "heads" else processor,
    )
    workspace = Path(arguments.output_dir).parent
    if recipe.diagnostics and not recipe.fsdp:
        trainer.add_callback(Diagnostics(prepared.module, every=recipe.logging_steps))
    trainer.add_callback(LocalRecords(workspace))
    trainer.add_callback(Trackers(recipe, workspace))
    if progress is not None:
        trainer.add_callback(Progress(lambda: trainer.trained_tokens, progress))
    if recipe.early_stopping:
        trainer.add_callback(EarlyStoppingCallback(recipe.early_stopping))
    return trainer


def _measure(
    model: CausalLM, *, processor: CausalQwen2Processor, parts: Rows, batches: Batches
) -> dict[str, float]:
    """Every eval/* and dist/* metric on the validation rows, if there are any."""
    return evaluate(model, processor, batches(parts.validation)) if parts.validation else {}


def _save_adapter(adapter: Any, directory: Path, *, whole: bool) -> None:
    """What LoRA and the heads have learned; ``whole`` with W, which PEFT writes twice where it is tied."""
    adapter.save_pretrained(directory, save_embedding_layers=whole)
    if whole and adapter.config.tie_word_embeddings:
        file = directory / "adapter_model.safetensors"
        tensors = load_file(file)
        tensors.pop("base_model.model.lm_head.weight", None)
        save_file(tensors, file, metadata={"format": "pt"})


def _save(
    model: CausalLM,
    adapter: Any,
    processor: CausalQwen2Processor,
    recipe: TrainingRecipe,
    metrics: dict[str, float],
    parts: Rows,
    workspace: Path,
    moved: bool,
    *,
    overwrite: bool,
) -> None:
    """Model, processor, card, recipe, records and curves, in one step; then the workspace is not needed.

    With rows of W that have ``moved``, an adapter holds W: the base has another.
    """
    records = read_records(workspace / METRICS_FILE)
    with atomic_directory(Path(recipe.output), overwrite=overwrite) as temporary:
        if adapter is not None:
            _save_adapter(adapter, temporary / "adapter", whole=moved)
            model = adapter.merge_and_unload()
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)
        (temporary / RECIPE_FILE).write_text(recipe.to_yaml(), encoding="utf-8")
        (temporary / EVALUATION_FILE).write_text(
            json.dumps(defined(metrics), indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        (temporary / "README.md").write_text(
            model_card(recipe, metrics, model.config, parts.bad_rows, numbers=processor.numbers),
            encoding="utf-8",
        )
        (temporary / METRICS_FILE).write_text(as_lines(records), encoding="utf-8")
        draw_curves(records, temporary / "curves.png")
        for tracked in ("tensorboard", "wandb"):
            if (workspace / tracked).is_dir():
                shutil.copytree(workspace / tracked, temporary / tracked, symlinks=True)
        flush_to_disk(temporary)
    shutil.rmtree(workspace, ignore_errors=True)
