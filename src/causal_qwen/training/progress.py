"""Progress: a bar where somebody watches."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

__all__ = ["ProgressBar"]


class ProgressBar(TrainerCallback):
    """Steps, loss, tokens per second and the time that remains, where standard error is a terminal.

    Args:
        trained_tokens: How many tokens the run has trained on.
    """

    def __init__(self, trained_tokens: Callable[[], int]) -> None:
        self.trained_tokens, self.loss = trained_tokens, math.nan
        self.progress: Any = None
        self.start, self.task = 0.0, 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Show the bar."""
        if not (state.is_world_process_zero and sys.stderr.isatty()):
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
        )
        progress: Any = Progress(*columns, console=Console(stderr=True), transient=True)
        progress.start()
        self.task = progress.add_task("", total=state.max_steps, completed=state.global_step, facts="")
        self.progress, self.start = progress, time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Move it."""
        if self.progress is not None:
            rate = self.trained_tokens() / max(time.perf_counter() - self.start, 1e-9)
            facts = f"loss {self.loss:.4g} · {rate:,.0f} tokens/s"
            self.progress.update(self.task, completed=state.global_step, facts=facts)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Remember the loss."""
        self.loss = event["logs"].get("train/total_loss", self.loss)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Take it away."""
        if self.progress is not None:
            self.progress.stop()
