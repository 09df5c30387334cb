"""Diagnostics: statistics of activations and gradients, added to the records."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from functools import partial
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

__all__ = ["Diagnostics"]

LAYER = re.compile(r"layers\.(\d+)$")


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
        matches = ((LAYER.search(name), module) for name, module in model.named_modules())
        self.layers = [(match[1], module) for match, module in matches if match]
        self.hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Watch the layers."""
        for number, module in self.layers:
            self.hooks.append(module.register_forward_hook(partial(self._record, number)))

    def _record(self, number: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.watching:
            states = (output[0] if isinstance(output, tuple) else output).detach().float()
            self.statistics[f"diag/act_rms/layer_{number}"] = float(states.square().mean().sqrt())
            self.statistics[f"diag/act_max/layer_{number}"] = float(states.abs().max())

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Watch the steps that will be recorded."""
        self.watching = (state.global_step + 1) % self.every == 0

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Gradients are complete here."""
        if not self.watching:
            return
        squares: defaultdict[str, Any] = defaultdict(float)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                squares[_part(name)] += parameter.grad.detach().float().square().sum()
        for part, square in squares.items():
            self.statistics[f"diag/grad_norm/{part}"] = math.sqrt(square)
        self.watching = False

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        """Add the statistics to the record that the other callbacks get."""
        if "train/total_loss" in logs:
            logs.update(self.statistics)
            self.statistics = {}

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Watch no more."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


def _part(name: str) -> str:
    for part in ("abduction", "action", "numeric_embedding", "embed_tokens", "lm_head"):
        if part in name:
            return part
    return "layers" if ".layers." in name else "norm"
