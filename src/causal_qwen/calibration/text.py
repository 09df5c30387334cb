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

__all__ = ["TextFeatures", "logit_blocks", "text_features", "windows"]

WINDOW = 256  # tokens per forward pass
MAX_WINDOWS = 8  # spread evenly over the text, so that a long one costs no more than a short one
MIN_TOKENS = 64
BLOCK_ELEMENTS = 2**24  # elements of a (positions, V) block: 64 MiB in float32


class TextFeatures(NamedTuple):
    """Backbone features of a text and the tokens that followed."""

    hidden_states: Tensor  # (N, H)
    labels: Tensor  # (N,)


@torch.no_grad()
def text_features(model: CausalLM, tokenizer: PreTrainedTokenizerBase, text: str) -> TextFeatures:
    """Backbone features of evenly spread windows of ``text``; each position is paired with the token that
    follows it.

    Raises:
        ValueError: If the text is too short to calibrate on.
    """
    hidden_states, labels = [], []
    for window in windows(tokenizer, text):
        window = window.to(model.device)
        hidden_states.append(model.model(input_ids=window[None]).last_hidden_state[0, :-1])
        labels.append(window[1:])
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
    rows = max(1, BLOCK_ELEMENTS // model.config.vocab_size)
    for block in hidden_states.split(rows):
        U, _ = model.abduction(block)
        yield exact(model.token_logits(U.loc))
