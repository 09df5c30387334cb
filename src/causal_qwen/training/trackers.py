"""Trackers: where records go besides the local files, if they are installed; accelerate knows how."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from causal_qwen.training.recipe import TrainingRecipe

__all__ = ["Trackers"]

PROJECT = "causal-qwen"


class Trackers(TrainerCallback):
    """Sends every record, under the same names, to the trackers that the recipe names.

    Args:
        recipe: Names the trackers and the run.
        directory: Where they keep their files.

    Raises:
        ValueError: If a tracker is not installed.
    """

    def __init__(self, recipe: TrainingRecipe, directory: Path) -> None:
        self.trackers = [_tracker(name, recipe, directory) for name in recipe.report_to]
        self.running: list[GeneralTracker] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Open them on the main process."""
        if state.is_world_process_zero and not self.running:
            self.running = self.trackers
            for tracker in self.running:
                tracker.start()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Send the numbers of one record."""
        numbers = {
            name: float(value) for name, value in event["logs"].items() if isinstance(value, int | float)
        }
        for tracker in self.running:
            tracker.log(numbers, step=state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Finish them."""
        for tracker in self.running:
            tracker.finish()
        self.running = []


def _tracker(name: str, recipe: TrainingRecipe, directory: Path) -> GeneralTracker:
    """One of accelerate's trackers, not open yet. Offline or not is theirs to decide (WANDB_MODE)."""
    if find_spec(name) is None:
        raise ValueError(f"report_to names {name}, which is not installed; run: pip install {name}")
    if name == "tensorboard":
        return TensorBoardTracker(name, directory)
    options = {"name": recipe.run_name, "config": asdict(recipe)}
    return (
        WandBTracker(PROJECT, dir=str(directory), **options)
        if name == "wandb"
        else TrackioTracker(PROJECT, **options)
    )
