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

from causal_qwen.conversion.headers import ConversionError
from causal_qwen.processing_causal_qwen2 import NUM_TOKEN

__all__ = ["NumToken", "choose_num_token", "settings_of", "with_num_row"]

# Rows of no token, as llama.cpp names them: [PAD151665], [PAD151666], ...
UNUSED_ROW = re.compile(r"\[PAD\d+\]")
# Tokens that a vocabulary sets aside by name: <|reserved_special_token_7|>, <|extra_7|>, <unused7>,
# [unused7], <|placeholder7|>. T5's <extra_id_7> are not spare: it writes them.
RESERVED = re.compile(
    r"<\|(reserved(_special)?_token|reserved|extra|unused|placeholder)_?\d+\|>|<unused_?\d+>|\[unused\d+\]"
)


@dataclass(frozen=True)
class NumToken:
    """Where <NUM> lives.

    Args:
        id: Its row in the vocabulary.
        digits: Ids of the tokens "0" to "9".
        tokenizer: The base's tokenizer with <NUM> added.
        replaced: The name that the row had, if it had one.
    """

    id: int
    digits: list[int]
    tokenizer: PreTrainedTokenizerBase
    replaced: str | None = None


def choose_num_token(tokenizer: PreTrainedTokenizerBase, rows: int) -> NumToken:
    """Give <NUM> a row that nothing uses of a vocabulary of ``rows`` rows, or one more row.

    A row is spare, in this order, if its name says that it has no token ([PAD151665]; the first), if it lies
    beyond the tokenizer (the first), or if its token is reserved by name and neither a special token nor the
    chat template uses it (the last, since those who use reserved tokens begin with the first).

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
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values())
    if largest >= rows:
        raise ConversionError(f"the tokenizer has {largest + 1} tokens, but the embedding only {rows} rows")
    replaced = _spare_token(tokenizer, vocabulary, rows)
    num_token_id = largest + 1 if replaced is None else vocabulary[replaced]
    copy = _with_num_token(tokenizer, replaced, num_token_id)
    kept = {token: index for token, index in vocabulary.items() if token != replaced}
    if copy.get_vocab() != kept | {NUM_TOKEN: num_token_id}:
        raise ConversionError(
            f"the tokenizer cannot take {NUM_TOKEN} at {num_token_id} without moving other tokens; "
            "are there gaps in its vocabulary?"
        )
    return NumToken(num_token_id, digits, copy, replaced)


def with_num_row(weight: Tensor, num_token: NumToken) -> Tensor:
    """W or the embedding with the mean of the digit rows as its <NUM> row: in place, or with one row more."""
    if num_token.id >= len(weight):
        weight = torch.cat([weight, weight.new_empty(num_token.id + 1 - len(weight), weight.shape[1])])
    weight[num_token.id] = weight[num_token.digits].double().mean(0).to(weight.dtype)
    return weight


def _spare_token(tokenizer: PreTrainedTokenizerBase, vocabulary: dict[str, int], rows: int) -> str | None:
    """The token that gives up its row; None if <NUM> comes after the last one."""
    unused = [token for token in vocabulary if UNUSED_ROW.fullmatch(token)]
    if unused:
        return min(unused, key=vocabulary.__getitem__)
    if max(vocabulary.values()) + 1 < rows:
        return None
    named = {str(token) for token in tokenizer.special_tokens_map.values()}
    post_processor = json.loads(tokenizer.backend_tokenizer.to_str())["post_processor"]
    texts = f"{tokenizer.chat_template} {json.dumps(post_processor, ensure_ascii=False)}"
    reserved = [token for token in vocabulary if RESERVED.fullmatch(token)]
    spare = [token for token in reserved if token not in named and token not in texts]
    return max(spare, key=vocabulary.__getitem__, default=None)


def _with_num_token(
    tokenizer: PreTrainedTokenizerBase, replaced: str | None, num_token_id: int
) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer that has <NUM>, in the place of ``replaced`` or after all others.

    A name in the model's own vocabulary is exchanged there. Were it taken out, the vocabulary would be
    shorter, and what is added to it would get other ids.
    """
    state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    if isinstance(state["model"]["vocab"], dict):
        vocab = state["model"]["vocab"]
        state["model"]["vocab"] = {NUM_TOKEN if t == replaced else t: index for t, index in vocab.items()}
    else:  # a list of tokens and scores
        pairs = state["model"]["vocab"]
        state["model"]["vocab"] = [[NUM_TOKEN if t == replaced else t, score] for t, score in pairs]
    entry = {"id": num_token_id, "content": NUM_TOKEN, "special": True, "normalized": False}
    entry |= {"single_word": False, "lstrip": False, "rstrip": False}
    others = [token for token in state["added_tokens"] if token["content"] != replaced]
    state["added_tokens"] = sorted([*others, entry], key=lambda token: token["id"])
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(state, ensure_ascii=False))
    copy = PreTrainedTokenizerFast(tokenizer_object=backend, **settings_of(tokenizer))
    copy.chat_template = tokenizer.chat_template
    return copy


def settings_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
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
