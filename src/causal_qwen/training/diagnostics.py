"""Diagnostics: statistics of activations and gradients, added to the records."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

__all__ = ["Diagnostics"]


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
        self.statistics: dict[str, float] = {}
        self.watching = False
        self.layers = [(name, module) for name, module in model.named_modules() if _is_layer(name)]
        self.hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Watch the layers."""
        for name, module in self.layers:
            number = name.rpartition(".")[2]
            self.hooks.append(module.register_forward_hook(self._hook(number)))

    def _hook(self, number: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.watching:
                states = (output[0] if isinstance(output, tuple) else output).detach().float()
                self.statistics[f"diag/act_rms/layer_{number}"] = float(states.square().mean().sqrt())
                self.statistics[f"diag/act_max/layer_{number}"] = float(states.abs().max())

        return record

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Watch the steps that will be recorded."""
        self.watching = (state.global_step + 1) % self.every == 0

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **event: Any
    ) -> None:
        """Gradients are complete here."""
        if not self.watching:
            return
        squares: dict[str, Tensor] = {}
        for name, parameter in event["model"].named_parameters():
            if parameter.grad is not None:
                part, square = _part(name), parameter.grad.detach().float().square().sum()
                squares[part] = squares[part] + square if part in squares else square
        self.statistics |= {
            f"diag/grad_norm/{part}": math.sqrt(float(value)) for part, value in squares.items()
        }
        self.watching = False

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Add the statistics to the record that the other callbacks get."""
        if "train/total_loss" in event["logs"]:
            event["logs"].update(self.statistics)
            self.statistics = {}

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
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
