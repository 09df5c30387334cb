"""CausalTrainer: transformers' Trainer, with what a causal model adds.

Two sums with two divisors (tokens and numbers), larger steps for the heads, a number head that follows the
features, atomic checkpoints, whole or in shards, a row order that survives a restart with another number of
processes, and a guard against losses that are no numbers.
"""

from __future__ import annotations

import itertools
import math
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PrinterCallback, Trainer, TrainerCallback, set_seed
from transformers.trainer_callback import TrainerState

from causal_qwen.configuration import CausalFields
from causal_qwen.conversion.files import disk_errors
from causal_qwen.losses import IGNORE_INDEX
from causal_qwen.training import shards
from causal_qwen.training.checkpoints import (
    BAD_BATCH,
    STAGING,
    check_written,
    process_count,
    publish,
    readable,
    rotate,
)
from causal_qwen.training.following import FollowingHead, NumberFeatures, number_head
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.sampling import EpochSampler

__all__ = ["CausalTrainer", "TrainingDiverged", "hold_constants", "parameter_groups"]

# Parameters whose own unit is a nat, a log scale or a spread: they can move by heads_learning_rate.
FAST = (
    "action.bias",
    "action.threshold",
    "action.number.bias",
    "action.number_noise",
    "abduction.scale.bias",
)
# The rest of the heads reads z or U, of which every entry moves at once: a step in W_loc = I moves a logit by
# the step times ‖W_k‖₁·‖z‖₁, thousands of times the step. They learn by this share of the backbone's rate.
SLOW_SHARE = 0.02
HEADS = ("abduction.", "action.")
LOG_NAMES = {
    "loss": "train/total_loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "eval_loss": "eval/total_loss",
}
TRAINER_STATE = "trainer_state.json"
NUMBER_FEATURES = "number_features.pt"
SCHEDULER = "scheduler.pt"


class TrainingDiverged(ValueError):
    """The loss or a gradient is no longer a finite number; the batch has been saved."""


def parameter_groups(model: nn.Module, recipe: TrainingRecipe) -> list[dict[str, Any]]:
    """Parameters by learning rate (backbone, fast and slow heads) and decay (matrices do, vectors do not)."""
    groups: dict[tuple[float, bool, bool, str], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rate = recipe.learning_rate
        plain = name.replace(".modules_to_save.default", "")
        if plain.endswith(FAST):
            rate = recipe.heads_learning_rate
        elif any(part in plain for part in HEADS):
            rate = SLOW_SHARE * recipe.learning_rate
        decays = parameter.ndim >= 2 and "norm" not in name
        # One optimizer kernel takes shards or whole tensors, not both. What stays whole is told apart by
        # these, so that groups, which a schedule lists, are the same on any number of processes.
        kind = (rate, decays, parameter.ndim == 0, str(parameter.dtype))
        groups.setdefault(kind, []).append(parameter)
    return [
        {"params": parameters, "lr": rate, "weight_decay": recipe.weight_decay if decays else 0.0}
        for (rate, decays, *_), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def hold_constants(
    model: nn.Module, config: CausalFields, held: Sequence[str] = (), *, following: bool
) -> None:
    """Fix what the configuration does not learn, parameters whose name contains an entry of ``held``,
    b_noise, and a number head that is solved for.

    Only the sum scale_U + |b_noise| enters the loss, so that b_noise stays where calibration put it; there it
    is about 1e-5, and a step of any usual size would be many times that.

    Raises:
        ValueError: If an entry of ``held`` is part of no name.
    """
    for part in held:
        if not any(part in name for name, _ in model.named_parameters()):
            example = max((name for name, _ in model.named_parameters()), key=len)
            raise ValueError(f"hold names {part!r}; it must be part of a parameter's name, such as {example}")
    for name, parameter in model.named_parameters():
        if name.endswith("b_noise") or any(part in name for part in held):
            parameter.requires_grad_(False)
        elif name.endswith("numeric_embedding.direction"):
            parameter.requires_grad_(config.learn_numeric_direction)
        elif name.endswith("threshold") and not config.learn_threshold:
            parameter.requires_grad_(False)
    if following:
        for parameter in number_head(model):
            parameter.requires_grad_(False)


class _Resumable(TrainerCallback):
    """What a step needs beside transformers: the epoch's row order after a restart, what a record averages, a
    number head that follows.
    """

    def __init__(self, trainer: CausalTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.trainer.start_record(state.global_step)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        # A resumed loader wraps the sampler too deep for accelerate to reach it.
        if self.trainer.row_sampler is not None:
            self.trainer.row_sampler.set_epoch(math.floor(state.epoch or 0))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        control.should_log = control.should_log or control.should_save
        self.trainer.follow(state.global_step)


class CausalTrainer(Trainer):
    """Trainer over a `CausalLM`, adapted or not, or over its heads alone.

    Args:
        recipe: Learning rates, grouping, seed.
        num_token_id: <NUM>, to count numbers.
        lengths: Tokens of each training row; None for a stream.
        evaluation: Computes eval/* and dist/* at each evaluation; None evaluates the loss alone.
        following: The number head, solved while the features move; None trains it as any other head.
        **options: As for Trainer.
    """

    def __init__(
        self,
        *,
        recipe: TrainingRecipe,
        num_token_id: int,
        lengths: Sequence[int] | None,
        evaluation: Callable[[], dict[str, float]] | None = None,
        following: FollowingHead | None = None,
        **options: Any,
    ) -> None:
        self.following = following
        self._numbers: list[list[NumberFeatures]] = []  # of this step, batch by batch
        self.recipe, self.num_token_id, self.evaluation = recipe, num_token_id, evaluation
        self.trained_tokens = 0
        self._staging: Path | None = None
        self._num_numbers: Tensor | None = None
        self._last_batch: dict[str, Any] = {}
        self.start_record(0)
        super().__init__(**options)
        self.row_sampler: EpochSampler | None = None
        if lengths is not None:
            processes = self.args.world_size
            rows = recipe.batch_size * processes  # of a batch on all of them
            group = rows * recipe.accumulation if recipe.group_by_length else 0
            multiple = rows if processes > 1 else 1
            self.row_sampler = EpochSampler(lengths, seed=recipe.seed, group=group, multiple=multiple)
        self.is_sharded = shards.is_sharded(recipe, self.args)
        # Tells Trainer that the model places and reduces its own parameters.
        self.is_distributed_loading_by_transformers = self.is_sharded
        self.remove_callback(PrinterCallback)
        self.add_callback(_Resumable(self))

    def run(self, checkpoint: Path | None) -> float:
        """Train from the start, or from a checkpoint to the end; how many seconds it took.

        A run that was interrupted after its last step is not trained again: Trainer would take one step more.
        """
        with readable(checkpoint), warnings.catch_warnings():
            # Of what a sharded model returns, the loss alone is changed in place, and it is no view.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
            if checkpoint is not None:
                state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
                if state.global_step >= state.max_steps:
                    self.state = state
                    self._load_from_checkpoint(state.best_model_checkpoint or str(checkpoint))
                    return 0.0
            if checkpoint is not None and self.following is not None:
                self.following.load_state_dict(torch.load(checkpoint / NUMBER_FEATURES, weights_only=True))
            outcome = self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return float(outcome.metrics["train_runtime"])

    def follow(self, step: int) -> None:
        """Let the number head see the step's features of all processes, and every few steps follow them."""
        if self.following is None:
            return
        batches, self._numbers = self._numbers, []
        if self.args.world_size > 1:
            own = len(batches)
            gathered = gather_object(batches)  # process by process
            # In the order of the rows, which is that of one process with larger batches.
            batches = [batch for first in range(own) for batch in gathered[first::own]]
        self.following.add(itertools.chain.from_iterable(batches))
        if step % self.following.every == 0:
            self.following.solve()

    def start_record(self, step: int) -> None:
        """Begin to average the parts of the loss."""
        self._parts, self._parts_step = {"cls": 0.0, "reg": 0.0}, step

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler | None:
        return self.row_sampler

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW over `parameter_groups`."""
        optimizer: torch.optim.Optimizer | None = getattr(self, "optimizer", None)
        if optimizer is None:
            target = self.model if model is None else model
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, target)
            self.optimizer = optimizer = optimizer_class(parameter_groups(target, self.recipe), **options)
        return optimizer

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Average the gradients of what sharding leaves whole; sums work on every backend."""

        def average(parameter: Tensor) -> None:
            if self.accelerator.sync_gradients and parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.args.world_size

        for parameter in model.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(average)

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        """Labels of all accumulated batches on all processes; the numbers among them are kept."""
        counts = torch.zeros(2, dtype=torch.long, device=device)
        for batch in batch_samples:
            labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., 1:]
            counts[0] += (labels != IGNORE_INDEX).sum()
            counts[1] += (labels == self.num_token_id).sum()
        if self.args.world_size > 1:
            counts = self.accelerator.reduce(counts, reduction="sum")
        counts = counts.clamp(min=1)
        self._num_numbers = counts[1]
        return counts[0]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The model's loss, its two sums divided by what all accumulated batches hold."""
        training = model.training
        if num_items_in_batch is not None:
            inputs = {**inputs, "num_numbers_in_batch": self._num_numbers}
        if "input_ids" in inputs:
            inputs = {**inputs, "use_cache": False}  # with a cache, packed sequences would see one another
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if training:
            self._last_batch = inputs
            if self.following is not None:
                self._numbers.append(self.following.read(inputs, outputs))
            self._check_finite(loss, "the loss")
            self._parts["cls"] += float(outputs.cls_loss.detach())
            self._parts["reg"] += float(outputs.reg_loss.detach())
            self.trained_tokens += inputs["labels" if "labels" in inputs else "shift_labels"].numel()
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        self._check_finite(torch.as_tensor(norm), "the gradient")
        return norm

    def _check_finite(self, value: Tensor, quantity: str) -> None:
        value = value.detach()
        if not torch.isfinite(value).all():
            step, rank = self.state.global_step, self.args.process_index
            path = Path(self.args.output_dir) / f"{BAD_BATCH}-step{step}-process{rank}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self._last_batch, path)
            raise TrainingDiverged(
                f"{quantity} is {float(value.flatten()[0])} at step {step}; the batch is saved in {path}. "
                "Lower the learning rates, or look for broken values in the batch"
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record under the names that every tracker gets."""
        named = {LOG_NAMES.get(name, name): value for name, value in logs.items()}
        if "train/total_loss" in named:
            steps = max(self.state.global_step - self._parts_step, 1)
            parts = torch.tensor(
                [self._parts["cls"], self._parts["reg"]], dtype=torch.float64, device=self.args.device
            )
            if self.args.world_size > 1:
                parts = self.accelerator.reduce(parts, reduction="sum")
            named["train/cls_loss_mean"], named["train/reg_loss_effective"] = (parts / steps).tolist()
            self.start_record(self.state.global_step)
        super().log(named, start_time)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """The loss on the validation rows, and every eval/* and dist/* metric, deterministic."""
        metrics: dict[str, float] = super().evaluate(*args, **options)
        if self.evaluation is not None and not self.is_sharded:
            measured = self.evaluation()
            self.log(dict(measured))
            metrics |= measured
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging else super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The weights of a checkpoint: whole, or with ``fsdp`` in shards."""
        if self.recipe.fsdp and output_dir is not None:
            shards.save_model(self.model, Path(output_dir))
        else:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.recipe.fsdp:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        shards.save_optimizer(self.model, self.optimizer.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.recipe.fsdp:
            shards.load_model(self.model, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self.recipe.fsdp:
            shards.load_model(self.model, Path(str(self.state.best_model_checkpoint)))
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.recipe.fsdp or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer = self.optimizer.optimizer
        shards.load_optimizer(self.model, optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
        for group, rate in zip(optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Each process draws on where it was; with another number of them all draw anew, by seed and step."""
        if checkpoint is None or process_count(Path(checkpoint)) == self.args.world_size:
            super()._load_rng_state(checkpoint)
        else:
            draws = self.state.global_step * 1_000_003 + self.args.process_index
            set_seed((self.recipe.seed + draws) % 2**32)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write into a staging directory, flush, rename: a checkpoint that can be found is complete."""
        root = Path(self.args.output_dir)
        target = root / f"checkpoint-{self.state.global_step}"
        staged = root / STAGING / target.name
        if self.args.should_save:
            shutil.rmtree(root / STAGING, ignore_errors=True)
            staged.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        previous = self.state.best_model_checkpoint
        self._staging = root / STAGING
        try:
            with disk_errors(target):
                super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        is_best = self.state.best_global_step == self.state.global_step
        self.state.best_model_checkpoint = str(target) if is_best else previous
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            check_written(staged, processes=self.args.world_size)
            self.state.save_to_json(str(staged / TRAINER_STATE))
            if self.following is not None:
                torch.save(self.following.state_dict(), staged / NUMBER_FEATURES)
            publish(staged, target)
            rotate(root, keep=self.args.save_total_limit or 0, protected=self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()
