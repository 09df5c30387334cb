"""Progress: a bar where somebody watches, and elsewhere a line now and then."""

from __future__ import annotations

import datetime
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

__all__ = ["Progress"]

SECONDS_PER_LINE = 10.0


class Progress(TrainerCallback):
    """Steps, loss, tokens per second and the time that remains.

    On a terminal they are a bar; elsewhere they are told in a line every ten seconds.

    Args:
        trained_tokens: How many tokens the run has seen.
        tell: Takes a line.
    """

    def __init__(self, trained_tokens: Callable[[], int], tell: Callable[[str], None]) -> None:
        self.trained_tokens, self.tell, self.loss = trained_tokens, tell, math.nan
        self.bar: Any = None
        self.task = self.first_step = 0
        self.start = self.told = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Show the bar."""
        self.start = self.told = time.perf_counter()
        self.first_step = state.global_step
        if not (state.is_world_process_zero and sys.stderr.isatty()):
            return
        from rich import progress
        from rich.console import Console

        self.bar = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[facts]}"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.bar.start()
        self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step, facts="")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Move it, or tell a line when the last one is long ago."""
        now = time.perf_counter()
        rate = self.trained_tokens() / max(now - self.start, 1e-9)
        loss = "" if math.isnan(self.loss) else f"loss {self.loss:.4g} · "
        facts = f"{loss}{rate:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=state.global_step, facts=facts)
        elif state.is_world_process_zero and now - self.told >= SECONDS_PER_LINE:
            self.told = now
            seconds = (now - self.start) / (state.global_step - self.first_step)
            left = datetime.timedelta(seconds=round(seconds * (state.max_steps - state.global_step)))
            self.tell(f"step {state.global_step}/{state.max_steps} · {facts} · {left} left")

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        """Remember the loss."""
        self.loss = logs.get("train/total_loss", self.loss)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Take it away."""
        self.stop()

    def stop(self) -> None:
        """Take the bar away, also when a run does not end: a bar hides the cursor of its terminal."""
        if self.bar is not None:
            self.bar.stop()
