"""Progress: a bar where somebody watches."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

__all__ = ["ProgressBar"]


class ProgressBar(TrainerCallback):
    """Steps, loss, tokens per second and the time that remains, where standard error is a terminal.

    Args:
        tokens_seen: How many tokens the run has seen.
    """

    def __init__(self, tokens_seen: Callable[[], int]) -> None:
        self.tokens_seen, self.loss = tokens_seen, math.nan
        self.progress: Any = None
        self.start, self.task = 0.0, 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Show the bar."""
        if not (state.is_world_process_zero and sys.stderr.isatty()):
            return
        from rich import progress
        from rich.console import Console

        self.progress = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[facts]}"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.progress.start()
        self.task = self.progress.add_task("", total=state.max_steps, completed=state.global_step, facts="")
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Move it."""
        if self.progress is not None:
            rate = self.tokens_seen() / max(time.perf_counter() - self.start, 1e-9)
            facts = f"loss {self.loss:.4g} · {rate:,.0f} tokens/s"
            self.progress.update(self.task, completed=state.global_step, facts=facts)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        """Remember the loss."""
        self.loss = logs.get("train/total_loss", self.loss)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Take it away."""
        if self.progress is not None:
            self.progress.stop()
