"""Trackers: where records go besides the local files, through accelerate's interface to each."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

from causal_qwen.training.recipe import TrainingRecipe

__all__ = ["Trackers"]

PROJECT = "causal-qwen"


class Trackers(TrainerCallback):
    """Sends every record, under the same names, to the trackers that the recipe names.

    Offline or not is theirs to decide (WANDB_MODE).

    Args:
        recipe: Names the trackers and the run.
        directory: Where they keep their files.

    Raises:
        ValueError: If a tracker is not installed.
    """

    def __init__(self, recipe: TrainingRecipe, directory: Path) -> None:
        for name in recipe.report_to:
            if importlib.util.find_spec(name) is None:
                raise ValueError(f"report_to names {name}, which is not installed; run: pip install {name}")
        run = {"name": recipe.run_name, "config": asdict(recipe)}
        trackers: dict[str, GeneralTracker] = {
            "tensorboard": TensorBoardTracker("tensorboard", logging_dir=directory),
            "wandb": WandBTracker(PROJECT, dir=str(directory), **run),
            "trackio": TrackioTracker(PROJECT, **run),
        }
        self.trackers = [trackers[name] for name in recipe.report_to]

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Open them on the main process; the others send nothing."""
        if not state.is_world_process_zero:
            self.trackers = []
        for tracker in self.trackers:
            tracker.start()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        """Send the numbers of one record."""
        numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        for tracker in self.trackers:
            tracker.log(numbers, step=state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Finish them."""
        for tracker in self.trackers:
            tracker.finish()
