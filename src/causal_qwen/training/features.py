"""Heads only: the backbone's features are computed once, and everything else is set or trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from causal_qwen.calibration.number_head import NumberData, count_words, positions_of, some_elsewhere
from causal_qwen.causal_lm import CausalLM, shifted
from causal_qwen.data import Collator, Encoded, batches_of
from causal_qwen.heads import exact
from causal_qwen.losses import IGNORE_INDEX
from causal_qwen.outputs import CausalLMOutput

__all__ = ["CachedFeatures", "HeadsOnly", "cache_features", "collate_features", "unlearned_features"]


@dataclass(frozen=True)
class CachedFeatures(Dataset[dict[str, Tensor]]):
    """Features of the positions that are learned, row by row."""

    hidden_states: npt.NDArray[np.float32]  # (N, H), in memory or mapped from a file
    labels: Tensor  # (N,) tokens that follow
    values: Tensor  # (N,) their values
    bounds: list[int]  # row i holds positions bounds[i] to bounds[i + 1]
    elsewhere: Tensor  # (M, H) features of some positions before which no number stands

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def number_data(self, model: CausalLM) -> NumberData:
        """What the number head is solved on."""
        before = self.labels == model.config.num_token_id
        features = torch.from_numpy(np.asarray(self.hidden_states)[before.numpy()])
        rows = torch.arange(len(self)).repeat_interleave(torch.tensor(self.bounds).diff())
        words = count_words(self.labels, model.config)
        return NumberData.of(model, features, self.values[before], rows[before], self.elsewhere, words=words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        part = slice(self.bounds[index], self.bounds[index + 1])
        return {
            "hidden_states": torch.from_numpy(np.array(self.hidden_states[part])),
            "shift_labels": self.labels[part],
            "shift_labels_values": self.values[part],
        }


@torch.no_grad()
def cache_features(
    model: CausalLM, rows: Sequence[Encoded], collator: Collator, *, batch_size: int, file: Path
) -> CachedFeatures:
    """Run the backbone once over the rows; features go to ``file`` and are mapped from it."""
    model.eval()
    labels, values, bounds, elsewhere = [], [], [0], []
    with file.open("wb") as stream:
        for padded in batches_of(rows, collator, batch_size):
            batch = {name: tensor.to(model.device) for name, tensor in padded.items()}
            _, others = positions_of(batch, model.config)
            shift = shifted(batch.pop("labels"), IGNORE_INDEX)
            shift_values = shifted(batch["numeric_values"], 0.0)
            embeds = model.embed(batch.pop("input_ids"), batch.pop("numeric_values"))
            states = exact(model.model(inputs_embeds=embeds, **batch).last_hidden_state)
            elsewhere.append(states[others].float().cpu())
            for row in range(len(shift)):
                valid = shift[row] != IGNORE_INDEX
                stream.write(states[row, valid].float().cpu().numpy().tobytes())
                labels.append(shift[row, valid].cpu())
                values.append(shift_values[row, valid].cpu())
                bounds.append(bounds[-1] + int(valid.sum()))
    shape = (bounds[-1], model.config.hidden_size)
    mapped = np.memmap(file, np.float32, "r", shape=shape) if shape[0] else np.empty(shape, np.float32)
    if not labels:  # no rows are held out
        nothing = torch.empty(0, model.config.hidden_size)
        return CachedFeatures(mapped, torch.empty(0, dtype=torch.long), torch.empty(0), bounds, nothing)
    following = torch.cat(labels)
    words = count_words(following, model.config)
    others = some_elsewhere(torch.cat(elsewhere), words=words, numbers=len(following) - words)
    return CachedFeatures(mapped, following, torch.cat(values), bounds, others)


def collate_features(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All positions of the rows, one after another."""
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def unlearned_features(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """The row without its labels."""
    return {**row, "shift_labels": torch.full_like(row["shift_labels"], IGNORE_INDEX)}


class HeadsOnly(nn.Module):
    """The biases of a model's words as a module of their own: z → loss.

    Causes and numbers stay as they are: numbers are solved for on the same features, and the left-out
    residuals of that solution are honest only as long as nothing else has learned from the rows.

    Args:
        model: Whose b, balance and C are trained in place.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        model.requires_grad_(False)
        self.abduction, self.action = model.abduction, model.action
        for parameter in (self.action.bias, self.action.balance, self.action.threshold):
            parameter.requires_grad_(True)
        # Not a submodule: the backbone is neither trained nor saved here.
        self._whole = (model,)
        self.config = model.config

    def forward(
        self, hidden_states: Tensor, shift_labels: Tensor, shift_labels_values: Tensor, **divisors: Any
    ) -> CausalLMOutput:
        """The loss of N positions (N, H); divisors as for the model."""
        (model,) = self._whole
        U, U0 = self.abduction(hidden_states)
        U = self.action.exogenous(U)
        loss, cls_loss, reg_loss = model.causal_loss(
            U, U0, self.action.numbers(U), shift_labels, shift_labels_values, **divisors
        )
        return CausalLMOutput(loss=loss, cls_loss=cls_loss, reg_loss=reg_loss)
