"""The laws at the labelled positions of a batch: what every evaluation, and every fit to rows, looks at.

Always the deterministic law of "standard": causes widened by the exogenous noise, nothing sampled. This
module does not know metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy
from causal_qwen.causal_lm import shifted
from causal_qwen.losses import IGNORE_INDEX
from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM

__all__ = ["Positions", "labelled_positions"]


@dataclass(frozen=True)
class Positions:
    """The N valid positions of one batch, each with the law that it infers and what came next.

    Args:
        U: The individual without exogenous noise, (N, D).
        U_noisy: U', (N, D).
        U0: The common cause, (N,).
        Y: The number in value space, (N,).
        labels: (N,) true next tokens.
        values: (N,) their values, 0 where the next token is no number; float64.
    """

    U: Cauchy
    U_noisy: Cauchy
    U0: Cauchy
    Y: Cauchy
    labels: Tensor
    values: Tensor


@torch.no_grad()
def labelled_positions(
    model: CausalQwen2ForCausalLM, batches: Iterable[Mapping[str, Any]]
) -> Iterator[Positions]:
    """Run the model over batches in evaluation mode and yield the positions whose label is not −100.

    Args:
        model: Its mode of training is restored at the end.
        batches: Each with ``input_ids`` and ``labels`` (B, T), −100 ignored, and where there are any
            ``attention_mask``, ``numeric_values``, ``labels_values`` (``numeric_values`` by default) and what
            else forward takes.
    """
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            yield _positions(model, batch)
    finally:
        model.train(was_training)


def _positions(model: CausalQwen2ForCausalLM, batch: Mapping[str, Any]) -> Positions:
    inputs = {
        name: entry.to(model.device) if isinstance(entry, Tensor) else entry for name, entry in batch.items()
    }
    labels = inputs.pop("labels")
    values = inputs.pop("labels_values", inputs.get("numeric_values"))
    values = torch.zeros_like(labels, dtype=torch.float64) if values is None else values
    labels, values = shifted(labels, IGNORE_INDEX), shifted(values.double(), 0.0)
    valid = labels != IGNORE_INDEX  # (B, T)
    outputs: Any = model(**inputs, output_logits=False, use_cache=False)
    U = outputs.U[valid]
    return Positions(
        U=U,
        U_noisy=model.action.exogenous(U),
        U0=outputs.U0[valid],
        Y=outputs.Y[valid],
        labels=labels[valid],
        values=values[valid],
    )
