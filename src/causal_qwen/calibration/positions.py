"""The laws at the labelled positions of a batch: what every evaluation, and every fit to rows, looks at.

Always the deterministic law of "standard": causes widened by the exogenous noise, nothing sampled. This
module does not know metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy
from causal_qwen.causal_lm import CausalLM, shifted
from causal_qwen.decoder.engine import Engine
from causal_qwen.losses import IGNORE_INDEX
from causal_qwen.native_model import NativeModel

__all__ = ["Positions", "labelled_positions"]


class Positions(NamedTuple):
    """The N valid positions of one batch, each with the law that it infers and what came next."""

    U: Cauchy  # (N, D), the individual without exogenous noise
    U_noisy: Cauchy  # (N, D), U'
    U0: Cauchy  # (N,), the common cause
    Y: Cauchy  # (N,), the number in value space
    labels: Tensor  # (N,) true next tokens
    values: Tensor  # (N,) their values, 0 where the next token is no number; float64

    def at(self, index: Tensor | slice) -> Positions:
        """Some of the positions."""
        columns: tuple[Any, ...] = self
        return Positions(*(column[index] for column in columns))

    def split(self, size: int) -> Iterator[Positions]:
        """Up to ``size`` positions at a time."""
        return (self.at(slice(first, first + size)) for first in range(0, len(self.labels), size))


@torch.no_grad()
def labelled_positions(
    model: CausalLM | NativeModel, batches: Iterable[Mapping[str, Any]], *, engine: Engine | None = None
) -> Iterator[Positions]:
    """Run the model over batches in evaluation mode and yield the positions whose label is not −100.

    Args:
        model: Its mode of training is restored at the end.
        batches: Each with ``input_ids`` and ``labels`` (B, T), −100 ignored, and where there are any
            ``attention_mask``, ``numeric_values``, ``labels_values`` (``numeric_values`` by default) and what
            else forward takes.
        engine: Runs the backbone, as in `CausalLM.causes`.
    """
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            yield _positions(model, batch, engine)
    finally:
        model.train(was_training)


def _positions(model: CausalLM | NativeModel, batch: Mapping[str, Any], engine: Engine | None) -> Positions:
    inputs = {
        name: entry.to(model.device) if isinstance(entry, Tensor) else entry for name, entry in batch.items()
    }
    labels = inputs.pop("labels")
    values = inputs.pop("labels_values", inputs.get("numeric_values"))
    values = torch.zeros_like(labels, dtype=torch.float64) if values is None else values
    labels, values = shifted(labels, IGNORE_INDEX), shifted(values.double(), 0.0)
    valid = labels != IGNORE_INDEX  # (B, T)
    U, U0 = model.causes(inputs, engine)
    U_noisy = model.action.exogenous(U)
    return Positions(U, U_noisy, U0, model.action.numbers(U_noisy), labels, values).at(valid)
