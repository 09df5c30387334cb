"""The <NUM> token: which row of the vocabulary it takes, and what that row starts as."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import AddedToken

from causal_qwen.conversion.sources import ConversionError
from causal_qwen.processing_causal_qwen2 import NUM_TOKEN

__all__ = ["NumToken", "choose_num_token", "with_num_row"]

# GGUF files name the rows that no token uses [PAD151665], [PAD151666], ...
PLACEHOLDER = re.compile(r"\[PAD\d+\]")


@dataclass(frozen=True)
class NumToken:
    """Where <NUM> lives.

    Args:
        id: Its row in the vocabulary.
        digits: Ids of the tokens "0" to "9".
        tokenizer: The base's tokenizer with <NUM> added.
    """

    id: int
    digits: list[int]
    tokenizer: PreTrainedTokenizerBase


def choose_num_token(tokenizer: PreTrainedTokenizerBase, rows: int) -> NumToken:
    """Give <NUM> the first spare row of a vocabulary of ``rows`` rows, or the row after the last one.

    Args:
        tokenizer: The base's tokenizer, left unchanged.
        rows: V of the base.

    Raises:
        ConversionError: If the vocabulary has a <NUM> of its own, lacks a digit, or is larger than the
            embedding.
    """
    if NUM_TOKEN in tokenizer.get_vocab():
        raise ConversionError(
            f"the base's vocabulary has a token {NUM_TOKEN} of its own; the name is needed here"
        )
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
    if any(digit is None or digit == tokenizer.unk_token_id for digit in digits):
        raise ConversionError(
            f"the base's tokenizer has {len(tokenizer)} tokens, but not one for each digit 0 to 9, "
            "whose mean <NUM> starts as; is its tokenizer.json complete?"
        )
    tokenizer, num_token_id = _with_num_token(tokenizer)
    if num_token_id > rows:
        raise ConversionError(f"the tokenizer has {num_token_id} tokens, but the embedding only {rows} rows")
    return NumToken(num_token_id, digits, tokenizer)


def with_num_row(weight: Tensor, num_token: NumToken) -> Tensor:
    """A copy of W or of the embedding whose <NUM> row, added at the end if need be, is the mean of the
    digit rows.
    """
    added = max(num_token.id + 1 - weight.shape[0], 0)
    weight = torch.cat([weight, weight.new_empty(added, weight.shape[1])])
    weight[num_token.id] = weight[num_token.digits].double().mean(0).to(weight.dtype)
    return weight


def _with_num_token(tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, int]:
    """A copy of the tokenizer that has <NUM> at the first spare id, and that id."""
    state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    ids = {**state["model"]["vocab"], **{token["content"]: token["id"] for token in state["added_tokens"]}}
    spare = min((index for token, index in ids.items() if PLACEHOLDER.fullmatch(token)), default=None)
    if spare is not None:
        state["model"]["vocab"] = {t: i for t, i in state["model"]["vocab"].items() if i != spare}
        state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] != spare]
    num_token_id = max(ids.values()) + 1 if spare is None else spare
    entry = {"id": num_token_id, "content": NUM_TOKEN, "special": True, "normalized": False}
    entry |= {"single_word": False, "lstrip": False, "rstrip": False}
    state["added_tokens"] = sorted([*state["added_tokens"], entry], key=lambda token: token["id"])
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(state, ensure_ascii=False))

    copy = PreTrainedTokenizerFast(tokenizer_object=backend, **_settings(tokenizer))
    copy.chat_template = tokenizer.chat_template
    if copy.convert_tokens_to_ids(NUM_TOKEN) != num_token_id:
        raise ConversionError(
            f"the tokenizer gave {NUM_TOKEN} the id {copy.convert_tokens_to_ids(NUM_TOKEN)}, "
            f"not {num_token_id}"
        )
    return copy, num_token_id


def _settings(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a tokenizer is beside its backend: special tokens, sides and lengths."""
    special = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str | AddedToken)
    }
    return special | {
        "model_max_length": tokenizer.model_max_length,
        "padding_side": "left",  # texts are there to be continued
        "truncation_side": tokenizer.truncation_side,
        "clean_up_tokenization_spaces": False,
    }
