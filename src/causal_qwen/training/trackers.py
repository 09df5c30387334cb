"""Trackers: where records go besides the local files, if they are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from causal_qwen.training.recipe import TrainingRecipe

__all__ = ["Trackers"]


class Tracker(Protocol):
    """Where records can be sent."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send one record."""

    def close(self) -> None:
        """Finish."""


class Trackers(TrainerCallback):
    """Sends every record, under the same names, to the trackers that the recipe names.

    Args:
        recipe: Names the trackers and the run.
        directory: Where they keep their files.

    Raises:
        ValueError: If a tracker is not installed.
    """

    def __init__(self, recipe: TrainingRecipe, directory: Path) -> None:
        self.open = [_tracker(name) for name in recipe.report_to]
        self.recipe, self.directory = recipe, directory
        self.trackers: list[Tracker] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open them on the main process."""
        if state.is_world_process_zero and not self.trackers:
            self.trackers = [make(self.recipe, self.directory) for make in self.open]

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Send the numbers of one record."""
        numbers = {
            name: float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)
        }
        for tracker in self.trackers:
            tracker.log(numbers, state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Finish them."""
        for tracker in self.trackers:
            tracker.close()
        self.trackers = []


def _tracker(name: str) -> Callable[[TrainingRecipe, Path], Tracker]:
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return lambda recipe, directory: _TensorBoard(SummaryWriter(str(directory / "tensorboard")))
        if name == "wandb":
            import wandb

            return lambda recipe, directory: _Module(wandb, recipe, {"dir": str(directory)})
        import trackio

        return lambda recipe, directory: _Module(trackio, recipe, {})
    except ImportError:
        raise ValueError(f"report_to names {name}, which is not installed; run: pip install {name}") from None


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _Module:
    """wandb, or trackio, which has its interface. Offline or not is theirs to decide (WANDB_MODE)."""

    def __init__(self, module: Any, recipe: TrainingRecipe, options: dict[str, Any]) -> None:
        self.module = module
        module.init(project="causal-qwen", name=recipe.run_name, config=asdict(recipe), **options)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.module.log(dict(metrics), step=step)

    def close(self) -> None:
        self.module.finish()
