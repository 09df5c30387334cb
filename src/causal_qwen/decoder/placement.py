"""The places of new tokens behind those in a cache, what each may look at, and whether there is room.

This module knows neither weights nor layers.

Shapes: B rows, T new tokens, S visible slots (past and new).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from causal_qwen.decoder.cache import KVCache
from causal_qwen.decoder.config import DecoderConfig

__all__ = ["Placement", "check_fit", "placement"]


class Placement(NamedTuple):
    """The places of new tokens.

    Args:
        valid: (B, S), False at padding.
        positions: (B, T), of the rotary angles: they count the real tokens.
        slots: (T,) of the cache.
        mask: (B, 1, T, S), True where a token may look.
    """

    valid: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor


def placement(
    config: DecoderConfig, input_ids: Tensor, attention_mask: Tensor | None, cache: KVCache | None
) -> Placement:
    """The places of new tokens (B, T) behind those in the cache; arguments and errors as in `check_fit`."""
    total = check_fit(config, input_ids, attention_mask, cache)
    past = 0 if cache is None else cache.length
    valid = input_ids.new_ones(input_ids.shape[0], total, dtype=torch.bool)  # (B, S)
    if attention_mask is not None:
        valid = attention_mask.bool()
    elif cache is not None:
        valid[:, :past] = cache.valid[:, :past]
    positions = (valid.cumsum(-1) - 1).clamp(min=0)[:, past:]  # (B, T)
    keys = torch.arange(total, device=input_ids.device)  # (S,)
    slots = keys[past:]  # (T,)
    # A padded token sees itself, so that no row of the softmax is empty; nobody else sees it.
    mask = (keys <= slots[:, None]) & valid[:, None, None, :] | (keys == slots[:, None])  # (B, 1, T, S)
    return Placement(valid, positions, slots, mask)


def check_fit(
    config: DecoderConfig, input_ids: Tensor, attention_mask: Tensor | None, cache: KVCache | None
) -> int:
    """The slots in use after these tokens, S.

    Args:
        config: The decoder's.
        input_ids: (B, T).
        attention_mask: (B, S), 0 at padding; None: the new tokens are all real.
        cache: Of the tokens before, or None.

    Raises:
        ValueError: If the prompt is empty, the shapes disagree, or the context or the cache is too short.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be (batch, tokens)")
    batch, new = input_ids.shape
    if batch == 0 or new == 0:
        raise ValueError(
            f"the prompt is empty (input_ids has shape {tuple(input_ids.shape)}): "
            "give at least one token per row, such as the beginning-of-text token"
        )
    total = new if cache is None else cache.length + new
    context = config.max_position_embeddings
    if total > context:
        raise ValueError(f"{total} tokens do not fit the context of {context} positions: shorten the text")
    if cache is not None and cache.batch != batch:
        raise ValueError(f"input_ids has {batch} rows, the cache {cache.batch}: they must agree")
    if cache is not None and total > cache.capacity:
        raise ValueError(
            f"{total} tokens do not fit the cache of {cache.capacity} slots: "
            "start with new_cache(batch, capacity)"
        )
    if attention_mask is not None and attention_mask.shape != (batch, total):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it must cover the cached and the "
            f"new tokens: ({batch}, {total})"
        )
    return total
