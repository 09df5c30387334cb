"""A text as calibration reads it: windows of tokens, their backbone features, the logits of these.

It does not know what is fitted to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from causal_qwen.causal_lm import CausalLM
from causal_qwen.heads import exact
from causal_qwen.progress import Watch, unwatched

__all__ = [
    "WEIGHT_ROWS",
    "TextFeatures",
    "block_rows",
    "logit_blocks",
    "products",
    "text_features",
    "windows",
]

WINDOW = 256  # tokens per forward pass
MAX_WINDOWS = 8  # spread evenly over the text, so that a long one costs no more than a short one
MIN_TOKENS = 64
# Elements of a (positions, V) block: 36 MiB in float32. What is smaller than 32 MiB malloc may keep when it
# is freed.
BLOCK_ELEMENTS = 9 * 2**20
WEIGHT_ROWS = 8192  # rows of W that are float32 at a time


class TextFeatures(NamedTuple):
    """Backbone features of a text and the tokens that followed."""

    hidden_states: Tensor  # (N, H)
    labels: Tensor  # (N,)


@torch.no_grad()
def text_features(
    model: CausalLM, tokenizer: PreTrainedTokenizerBase, text: str, *, watch: Watch = unwatched
) -> TextFeatures:
    """Backbone features of evenly spread windows of ``text``; each position is paired with the token that
    follows it.

    Args:
        model: Any causal model.
        tokenizer: Its tokenizer.
        text: Any text.
        watch: Told of the windows.

    Raises:
        ValueError: If the text is too short to calibrate on.
    """
    hidden_states, labels = [], []
    stretches = windows(tokenizer, text)
    with watch("calibrating: text", len(stretches)) as advance:
        for window in stretches:
            window = window.to(model.device)
            hidden_states.append(model.model(input_ids=window[None]).last_hidden_state[0, :-1])
            labels.append(window[1:])
            advance(1)
    return TextFeatures(exact(torch.cat(hidden_states)), torch.cat(labels))


def windows(tokenizer: PreTrainedTokenizerBase, text: str) -> list[Tensor]:
    """At most MAX_WINDOWS stretches of WINDOW tokens each, spread evenly over ``text``.

    Raises:
        ValueError: If the text has fewer than MIN_TOKENS tokens.
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if len(ids) < MIN_TOKENS:
        raise ValueError(f"the text has only {len(ids)} tokens; give at least {MIN_TOKENS}")
    count = min(MAX_WINDOWS, -(-len(ids) // WINDOW))
    starts = torch.linspace(0, max(len(ids) - WINDOW, 0), count).long().tolist()
    return [ids[start : start + WINDOW] for start in starts]


def logit_blocks(model: CausalLM, hidden_states: Tensor) -> Iterator[Tensor]:
    """Logits (n, V), in float32 at least, of successive blocks of the positions (N, H)."""
    for block in hidden_states.split(block_rows(model)):
        U, _ = model.abduction(block)
        yield exact(model.token_logits(U.loc))


def block_rows(model: CausalLM) -> int:
    """How many positions a block of `logit_blocks` has."""
    return max(1, BLOCK_ELEMENTS // int(model.config.vocab_size))


def products(vectors: Tensor, weight: Tensor) -> Tensor:
    """W v (N, V) in float32 for vectors (N, D): W (V, D) of another dtype is never whole in float32."""
    if weight.dtype == vectors.dtype:
        return torch.nn.functional.linear(vectors, weight)
    result = vectors.new_empty(len(vectors), len(weight))
    for columns, rows in zip(result.split(WEIGHT_ROWS, dim=1), weight.split(WEIGHT_ROWS), strict=True):
        columns.copy_(torch.nn.functional.linear(vectors, exact(rows)))
    return result
