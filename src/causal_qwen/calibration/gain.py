"""κ: the gain of the noise at which causal sampling is as decided as softmax sampling.

The score of token k is logit_k + κ·noise_k, linear in κ, and at κ = 0 the favourite f wins. So each draw has
one gain at which f is overtaken, for the first time and for good,

    min over k with noise_k > noise_f of (logit_f − logit_k)/(noise_k − noise_f),

and the rate at which f wins at κ is the share of draws whose gain lies above κ: κ is a quantile of these
gains. This module does not know texts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causal_qwen.calibration.text import block_rows, logit_blocks, products
from causal_qwen.cauchy import standard_draw
from causal_qwen.causal_lm import CausalLM
from causal_qwen.heads import exact
from causal_qwen.progress import Watch, unwatched

__all__ = ["Gain", "match_gain", "recalibrate_gain"]

logger = logging.getLogger(__name__)

DRAWS = 4  # causes drawn per position
MOST_POSITIONS = 256
FEWEST_POSITIONS = 32


class Gain(NamedTuple):
    """κ, and how often softmax sampling and causal sampling at κ pick the favourite, at T = 1."""

    noise_gain: float
    softmax_rate: float
    causal_rate: float


@torch.no_grad()
def match_gain(
    model: CausalLM, hidden_states: Tensor, generator: torch.Generator, *, watch: Watch = unwatched
) -> Gain:
    """κ at which argmax W(loc_U + κ(scale_U + |b_noise|)ε) + b is the favourite as often as softmax picks it.

    Args:
        model: Any causal model; after training scale_U differs by position and dimension.
        hidden_states: (N, H) features of a few hundred positions.
        generator: Of the noise.
        watch: Told of the positions.
    """
    scale = model.action.exogenous(model.abduction(hidden_states)[0]).scale  # (N, D)
    uniform = torch.rand(DRAWS, len(scale), scale.shape[-1], generator=generator).to(scale.device)
    gains = scale.new_empty(DRAWS, len(scale))  # at which the favourite is overtaken
    favoured = scale.new_empty(len(scale))  # how likely softmax picks the favourite
    size = block_rows(model)
    with watch("calibrating: gain", len(scale)) as advance:
        for start, logits in zip(range(0, len(scale), size), logit_blocks(model, hidden_states), strict=True):
            block = slice(start, start + size)
            top, favourite = logits.max(-1, keepdim=True)  # (n, 1)
            favoured[block] = (top.squeeze(-1) - logits.logsumexp(-1)).exp()
            lead = torch.sub(top, logits, out=logits)  # (n, V)
            for gain, draw in zip(gains[:, block], uniform[:, block], strict=True):
                epsilon = standard_draw(draw, density_floor=model.config.density_floor)  # (n, D)
                noise = products(scale[block] * epsilon, model.lm_head.weight)  # (n, V)
                pursuit = noise.sub_(noise.gather(-1, favourite))  # (n, V)
                never = (pursuit > 0).logical_not_()
                gain.copy_(torch.div(lead, pursuit, out=pursuit).masked_fill_(never, math.inf).amin(-1))
            advance(len(logits))
    softmax_rate, gains = float(favoured.mean()), gains.flatten()
    # Where the noise favours the favourite itself it is never overtaken, and κ stays finite all the same.
    noise_gain = gains.quantile(1 - softmax_rate, interpolation="lower").clamp(
        max=gains[gains.isfinite()].max()
    )
    return Gain(float(noise_gain), softmax_rate, float((gains > noise_gain).double().mean()))


@torch.no_grad()
def recalibrate_gain(model: CausalLM, batches: Iterable[Mapping[str, Any]], *, seed: int) -> float | None:
    """Match κ again, since training has moved scale_U: on all positions of some rows, prompts included.

    Args:
        model: Its ``config.noise_gain`` is set.
        batches: Rows that training did not use.
        seed: Of the noise.

    Returns:
        κ, or None where the rows hold fewer than 32 positions.
    """
    features: list[Tensor] = []
    for batch in batches:
        inputs = {name: entry.to(model.device) for name, entry in batch.items() if name != "labels"}
        mask = inputs["attention_mask"]
        embeds = model.embed(inputs["input_ids"], inputs["numeric_values"])
        states = model.model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state  # (B, T, H)
        features.append(exact(states[mask.bool()]))
        if sum(map(len, features)) >= 4 * MOST_POSITIONS:
            break
    hidden_states = torch.cat(features) if features else torch.empty(0)  # (N, H)
    count = len(hidden_states)
    if count < FEWEST_POSITIONS:
        logger.warning("%d positions are too few to calibrate the gain of the noise again", count)
        return None
    generator = torch.Generator().manual_seed(seed)
    subset = torch.randperm(count, generator=generator)[:MOST_POSITIONS].to(hidden_states.device)
    gain = match_gain(model, hidden_states[subset], generator).noise_gain
    model.config.noise_gain = gain
    return gain
