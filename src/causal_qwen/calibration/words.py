"""One-vs-Rest after training: how wide scale_S is and where the thresholds lie, solved once more.

Training moves the scores of all tokens together, and a bounded gradient (`ovr_gradient_bound`) is balanced at
another height of them than the loss is. One factor of every scale_S and one shift of every C repair both:
two numbers, at the minimum of the loss on rows. The order of equally wide tokens stays as it is. This module
does not know how rows are read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from causal_qwen.calibration.corrections import FIT_POSITIONS, search_scale
from causal_qwen.calibration.positions import Positions, labelled_positions
from causal_qwen.causal_lm import CausalLM
from causal_qwen.heads import exact

__all__ = ["WordFit", "refit_words"]

logger = logging.getLogger(__name__)

FEWEST_POSITIONS = 32  # fewer say nothing about a vocabulary


class WordFit(NamedTuple):
    """What was solved for, and the One-vs-Rest loss per position that it has on its own rows."""

    scale_factor: float
    threshold_shift: float
    loss: float


@torch.no_grad()
def refit_words(model: CausalLM, batches: Iterable[Mapping[str, Any]], *, seed: int) -> WordFit | None:
    """Set scale_S ← factor·scale_S and C ← C + shift to where the One-vs-Rest loss is least, in place.

    The factor is that of scale_U, |b_noise| and scale_U0 together; κ and the number head, which read scale_U,
    are to be calibrated after this.

    Args:
        model: Any causal model whose scale_U is an exponential.
        batches: Labelled rows of running text.
        seed: Of the positions that are taken of them.

    Returns:
        The fit, or None, and nothing changed, where fewer than 32 positions are labelled or
        ``scale_activation`` is not "exp", so that no bias multiplies the scale.
    """
    if model.config.scale_activation != "exp":
        logger.warning("scale_S is not fitted again: scale_activation is %r", model.config.scale_activation)
        return None
    parts: list[Positions] = []
    for positions in labelled_positions(model, batches):
        parts.append(positions)
        if sum(len(part.labels) for part in parts) >= 4 * FIT_POSITIONS:
            break
    count = sum(len(part.labels) for part in parts)
    if count < FEWEST_POSITIONS:
        logger.warning("%d positions are too few to fit scale_S and C again", count)
        return None
    generator = torch.Generator().manual_seed(seed)
    subset = torch.randperm(count, generator=generator)[:FIT_POSITIONS].sort().values
    sizes = torch.tensor([len(part.labels) for part in parts])
    starts = sizes.cumsum(0) - sizes
    taken = [
        part.at((subset[(subset >= start) & (subset < start + size)] - start).to(part.labels.device))
        for part, start, size in zip(parts, starts, sizes, strict=True)
    ]
    action, heights, scales = model.action, [], []
    for part in taken:
        S = action.scores(part.U_noisy, part.U0, model.lm_head.weight, impl="fused")  # (n, V)
        heights.append(S.loc - exact(action.threshold))
        scales.append(S.scale)
    labels = torch.cat([part.labels for part in taken])
    log_factor, shift, loss = search_scale(torch.cat(heights), torch.cat(scales), labels)
    factor = math.exp(log_factor)
    model.abduction.scale.bias.add_(log_factor)
    model.abduction.common_scale.mul_(factor)
    action.b_noise.mul_(factor)
    action.threshold.add_(shift)
    return WordFit(factor, shift, loss)
