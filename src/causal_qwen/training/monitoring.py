"""What a run tells: local records, curves, trackers, statistics, and a bar where somebody watches."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from causal_qwen.evaluation.positions import labelled_positions
from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
from causal_qwen.training.recipe import TrainingRecipe

__all__ = [
    "METRICS_FILE",
    "Diagnostics",
    "LocalRecords",
    "ProgressBar",
    "Trackers",
    "defined",
    "draw_curves",
    "mode_agreement",
    "read_records",
]

METRICS_FILE = "metrics.jsonl"
AGREEMENT_POSITIONS = 128  # scored at once


class LocalRecords(TrainerCallback):
    """Appends every record to metrics.jsonl and flushes it; a resumed run continues where its checkpoint was.

    Args:
        directory: Of the file.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / METRICS_FILE

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Drop records of steps that will be taken again."""
        if state.is_world_process_zero:
            kept = [record for record in read_records(self.path) if record["step"] <= state.global_step]
            partial = self.path.with_suffix(".partial")
            partial.write_text(
                "".join(_line(record) for record in kept if state.global_step), encoding="utf-8"
            )
            partial.replace(self.path)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Append one record."""
        if state.is_world_process_zero and logs:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(_line({"step": state.global_step, "time": time.time(), **logs}))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(defined(record)) + "\n"


def defined(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with None for NaN and infinity, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that a power cut has torn is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def draw_curves(records: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw losses, gradient norm and evaluation over steps; False if there is nothing to draw."""
    panels = {
        "loss": ("train/total_loss", "train/cls_loss_mean", "train/reg_loss_effective", "eval/total_loss"),
        "gradient norm": ("train/grad_norm",),
        "numbers": ("eval/num_f1", "eval/coverage_50", "eval/coverage_90"),
        "median absolute error": ("eval/reg_mdae",),
    }
    curves = {
        title: {name: points for name in names if (points := _points(records, name))}
        for title, names in panels.items()
    }
    curves = {title: lines for title, lines in curves.items() if lines}
    if not curves:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(curves), 4), layout="constrained")
    for axis, (title, lines) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 20 else None)
        axis.set(title=title, xlabel="step")
        axis.legend()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=100)
    partial.replace(path)
    return True


def _points(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


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
        from dataclasses import asdict

        self.module = module
        module.init(project="causal-qwen", name=recipe.run_name, config=asdict(recipe), **options)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.module.log(dict(metrics), step=step)

    def close(self) -> None:
        self.module.finish()


class Diagnostics(TrainerCallback):
    """Statistics of activations (root mean square and peak per layer) and gradients (norm per part).

    Taken on the steps that are recorded, and added to the next record. Tensors that several processes share
    are not gathered: with FSDP each record is the main process's share.

    Args:
        model: Whose layers are watched.
        every: Steps between records.
    """

    def __init__(self, model: nn.Module, *, every: int) -> None:
        self.every = every
        self.found: dict[str, float] = {}
        self.watching = False
        self.layers = [(name, module) for name, module in model.named_modules() if _is_layer(name)]
        self.hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Watch the layers."""
        for name, module in self.layers:
            number = name.rpartition(".")[2]
            self.hooks.append(module.register_forward_hook(self._hook(number)))

    def _hook(self, number: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.watching:
                states = (output[0] if isinstance(output, tuple) else output).detach().float()
                self.found[f"diag/act_rms/layer_{number}"] = float(states.square().mean().sqrt())
                self.found[f"diag/act_max/layer_{number}"] = float(states.abs().max())

        return record

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Watch the steps that will be recorded."""
        self.watching = (state.global_step + 1) % self.every == 0

    def on_pre_optimizer_step(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Gradients are complete here."""
        if not self.watching or model is None:
            return
        squares: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                part, square = _part(name), parameter.grad.detach().float().square().sum()
                squares[part] = squares[part] + square if part in squares else square
        self.found |= {f"diag/grad_norm/{part}": math.sqrt(float(value)) for part, value in squares.items()}
        self.watching = False

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add what was seen to the record that the other callbacks get."""
        if logs is not None and "train/total_loss" in logs:
            logs.update(self.found)
            self.found = {}

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Watch no more."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


def _is_layer(name: str) -> bool:
    head, _, number = name.rpartition(".")
    return head.endswith("layers") and number.isdigit()


def _part(name: str) -> str:
    for part in ("abduction", "action", "numeric_embedding", "embed_tokens", "lm_head"):
        if part in name:
            return part
    return "layers" if ".layers." in name else "norm"


class ProgressBar(TrainerCallback):
    """Steps, loss, tokens per second and the time that remains, where standard error is a terminal.

    Args:
        tokens_seen: How many tokens the run has seen.
    """

    def __init__(self, tokens_seen: Callable[[], int]) -> None:
        self.tokens_seen, self.loss = tokens_seen, math.nan
        self.progress: Any = None
        self.start, self.task = 0.0, 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
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

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Move it."""
        if self.progress is not None:
            rate = self.tokens_seen() / max(time.perf_counter() - self.start, 1e-9)
            facts = f"loss {self.loss:.4g} · {rate:,.0f} tokens/s"
            self.progress.update(self.task, completed=state.global_step, facts=facts)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Remember the loss."""
        self.loss = (logs or {}).get("train/total_loss", self.loss)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take it away."""
        if self.progress is not None:
            self.progress.stop()


@torch.no_grad()
def mode_agreement(model: CausalQwen2ForCausalLM, batches: Iterable[Mapping[str, Any]]) -> float:
    """Share of labelled positions at which "standard" and "compatible" choose the same token: 1 after
    conversion, and NaN of nothing.

    Training moves scale_S apart by token, and with it the two choices; a low share says that the logits are
    no longer what the model decides by.
    """
    same, count = 0, 0
    for positions in labelled_positions(model, batches):
        for part in torch.arange(len(positions.labels)).split(AGREEMENT_POSITIONS):
            U, U0 = positions.U_noisy[part], positions.U0[part]
            standard = model.action.z_scores(model.action.scores(U, U0, model.lm_head.weight)).argmax(-1)
            same += int((standard == model.token_logits(positions.U[part].loc).argmax(-1)).sum())
            count += len(part)
    return same / count if count else math.nan
