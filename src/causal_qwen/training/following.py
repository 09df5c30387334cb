"""The number head follows the features: while the backbone moves, w, b_Y and β_Y are solved for, not trained.

Variable projection: on given features the likeliest head is known (`cauchy_regression`), so that gradients of
the number loss are left to shape the features. A head that gradients move as well lags behind them, and a
fixed one diverges. The features come from the forward passes of training itself, the latest of each number.

Features that are some steps old have another mean and another spread. So all that are kept say which
direction tells numbers apart, and the latest of them how far along it a number is.

The ridge is strong. A gentle slope survives features that move under it, and it makes the backbone put what
tells numbers apart into directions of large variance, where no precision loses it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from causal_qwen.calibration.cauchy_regression import cauchy_regression
from causal_qwen.causal_lm import CausalLM, shifted
from causal_qwen.losses import IGNORE_INDEX

__all__ = ["FollowingHead", "NumberFeatures", "number_head"]

MOST_NUMBERS = 512  # features that are kept: more are older, and no better
LATEST_NUMBERS = 64  # of these, the ones that say where the features are now
FEWEST_NUMBERS = 16  # fewer say nothing about a slope
# Of the ridge; at first by way of stronger ones, whose lines cannot follow wrong labels.
STRENGTH, FIRST_STRENGTHS = 1e-3, (1.0, 1e-1, 1e-2, 1e-3)
# Least β_Y in training, in units of value_spread: narrower than this, far numbers pull no more.
NARROWEST = 0.05
HEAD = ("action.number.weight", "action.number.bias", "action.number_noise")
PEFT_COPY = ".modules_to_save.default"


def number_head(module: nn.Module) -> list[nn.Parameter]:
    """w (1, D), b_Y (1,) and β_Y () of a model, or of the copies that an adapter trains."""
    named = {name.replace(PEFT_COPY, ""): parameter for name, parameter in module.named_parameters()}
    return [parameter for ending in HEAD for name, parameter in named.items() if name.endswith(ending)]


class NumberFeatures(NamedTuple):
    """A position before a number, on the CPU; ``key`` is the same whenever its row comes again."""

    key: bytes
    loc_U: Tensor  # (D,)
    scale_U: Tensor  # (D,)
    target: float  # g(v)


class FollowingHead:
    """The latest features of the last numbers, and the head that is solved on them.

    Every process holds all of it and solves for itself: the sums are the same.

    Args:
        model: Whose value space and <NUM> are meant.
        module: What is trained: the model, or an adapted one.
        every: Steps between solutions.
        capacity: Numbers that are kept, the latest ones.
    """

    def __init__(
        self, model: CausalLM, module: nn.Module, *, every: int, capacity: int = MOST_NUMBERS
    ) -> None:
        self.model, self.every, self.capacity = model, every, capacity
        self.weight, self.bias, self.noise = number_head(module)
        self._latest: dict[bytes, NumberFeatures] = {}  # oldest first
        self._is_solved = False  # before, the head says nothing about where to begin

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, numbers: Iterable[NumberFeatures]) -> None:
        """Keep features; those of a row that comes again replace its former ones."""
        for number in numbers:
            self._latest.pop(number.key, None)
            self._latest[number.key] = number
        for key in list(self._latest)[: max(len(self) - self.capacity, 0)]:
            del self._latest[key]

    def read(self, inputs: Mapping[str, Any], outputs: Any) -> list[NumberFeatures]:
        """Features of a batch (B, T) that has gone through the model, where the next token is a number."""
        labels = shifted(inputs["labels"], IGNORE_INDEX)
        values = inputs.get("labels_values", inputs.get("numeric_values"))
        if values is None:
            return []
        is_num = labels == self.model.config.num_token_id
        targets = self.model.value_space.encode(shifted(values.double(), 0.0)[is_num]).tolist()
        loc_U, scale_U = (law[is_num].detach().cpu() for law in (outputs.loc_U, outputs.scale_U))  # (N, D)
        places = is_num.nonzero().tolist()
        return [
            NumberFeatures(_key(inputs, row, position, targets[i]), loc_U[i], scale_U[i], targets[i])
            for i, (row, position) in enumerate(places)
        ]

    @torch.no_grad()
    def fill(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Features of the first rows by the model as it is, and the head for them."""
        was_training = self.model.training
        self.model.eval()
        for batch in batches:
            inputs = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
            forwarded = {name: tensor for name, tensor in inputs.items() if name != "labels"}
            outputs = self.model(**forwarded, output_logits=False, use_cache=False)
            self.add(self.read(inputs, outputs))
            if len(self) >= self.capacity:
                break
        self.model.train(was_training)
        self.solve()

    @torch.no_grad()
    def solve(self) -> None:
        """Set w and b_Y to the likeliest line, β_Y to what scale_Y lacks; below 16 numbers nothing is set."""
        if len(self) < FEWEST_NUMBERS:
            return
        numbers = list(self._latest.values())
        target = torch.tensor([number.target for number in numbers], dtype=torch.float64)
        if target.min() == target.max():
            return
        loc_U, scale_U = (
            torch.stack([getattr(number, name) for number in numbers]).double()
            for name in ("loc_U", "scale_U")
        )
        residuals = None
        if self._is_solved:
            residuals = target - loc_U @ self.weight[0].double().cpu() - self.bias.double().cpu()
        for strength in (STRENGTH,) if self._is_solved else FIRST_STRENGTHS:
            fit = cauchy_regression(
                loc_U, target, strengths=(strength,), residuals=residuals, folds=0, doubt=False
            )
            residuals = fit.left_out
        slope = fit.slope
        along = (loc_U @ slope)[-LATEST_NUMBERS:, None]
        line = cauchy_regression(along, target[-LATEST_NUMBERS:], strengths=(STRENGTH,), folds=0, doubt=False)
        slope = slope * line.slope
        from_causes = float((scale_U @ slope.abs()).median())
        self.weight.copy_(slope[None])
        self.bias.fill_(line.intercept)
        self._is_solved = True
        self.noise.fill_(max(max(line.scale, NARROWEST) - from_causes, 0.1 * NARROWEST))

    def state_dict(self) -> dict[str, Tensor]:
        """What is kept, as tensors, for a checkpoint."""
        numbers = list(self._latest.values())
        width = self.weight.shape[1]
        empty = torch.empty(0, width)
        return {
            "keys": torch.tensor([list(number.key) for number in numbers], dtype=torch.uint8),
            "loc_U": torch.stack([number.loc_U for number in numbers]) if numbers else empty,
            "scale_U": torch.stack([number.scale_U for number in numbers]) if numbers else empty,
            "targets": torch.tensor([number.target for number in numbers], dtype=torch.float64),
            "is_solved": torch.tensor(self._is_solved),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Keep what a checkpoint holds; its weights hold the head."""
        self._is_solved = bool(state["is_solved"])
        rows = zip(state["keys"].tolist(), state["loc_U"], state["scale_U"], state["targets"], strict=True)
        self._latest = {
            bytes(key): NumberFeatures(bytes(key), loc_U, scale_U, float(target))
            for key, loc_U, scale_U, target in rows
        }


def _key(inputs: Mapping[str, Any], row: int, position: int, target: float) -> bytes:
    """A digest of what stands before the number, from the beginning of its sequence, and of the number."""
    start = position - int(inputs["position_ids"][row, position]) if "position_ids" in inputs else 0
    digest = hashlib.blake2b(digest_size=16)
    for name in ("input_ids", "numeric_values"):
        if name in inputs:
            digest.update(inputs[name][row, start : position + 1].cpu().numpy().tobytes())
    digest.update(repr(target).encode())
    return digest.digest()
