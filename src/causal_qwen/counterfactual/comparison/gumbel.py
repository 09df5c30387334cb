"""Gumbel coupling: one Gumbel per (seed, index of the generated token, token), for any model with logits.

argmax_k logits_k/T + g_k is a draw from softmax(logits/T), and two models that are given the same g choose
alike where their logits do. A token is known by its bytes, so models of different vocabularies are coupled
where they have tokens in common. Noise is counter-based, as an individual's is: Philox gives two words per
(seed, index), and a hash mixes them with the key of each token. This module knows no model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from causal_qwen.individual import Individual
from causal_qwen.packed_tokenizer import PackedTokenizer

__all__ = ["GumbelNoise", "gumbel", "gumbel_choice", "text_ends", "token_bytes", "token_keys"]

STREAM = 2  # of a seed, behind the two of `individual`
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how vocabularies with a fallback write a single byte
BELOW_ONE = np.float32(1 - 2.0**-24)
Keys = npt.NDArray[np.uint64]


def token_bytes(
    tokenizer: PreTrainedTokenizerBase | PackedTokenizer, rows: int, ends: Sequence[int] = ()
) -> list[bytes]:
    """What each row of a vocabulary stands for, all different: ``rows`` of them.

    The ends of a text are known by their rank, other special tokens by their names, rows that no token uses
    by their index; of tokens with the same bytes, the second is another one.

    Args:
        tokenizer: Of the vocabulary.
        rows: Of the model's logits.
        ends: Tokens that end a text.
    """
    names: list[bytes] = [b"\0row %d" % row for row in range(rows)]
    added, spelled = tokenizer.added_tokens_decoder, _spelling(tokenizer)
    for token, row in tokenizer.get_vocab().items():
        if row < rows:
            names[row] = b"\0special " + token.encode() if row in added else spelled(token)
    for rank, row in enumerate(ends):
        if row < rows:
            names[row] = b"\0end %d" % rank
    times: Counter[bytes] = Counter()
    for row, name in enumerate(names):
        if times[name]:
            names[row] = name + b"\0again %d" % times[name]
        times[name] += 1
    return names


def _spelling(tokenizer: PreTrainedTokenizerBase | PackedTokenizer) -> Callable[[str], bytes]:
    """How a token's name becomes bytes: by the letters of a byte-level vocabulary, or as text."""
    decoder = ""
    if isinstance(tokenizer, PreTrainedTokenizerFast | PackedTokenizer):
        decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}

    def byte_level(token: str) -> bytes:
        if all(letter in letters for letter in token):
            return bytes(letters[letter] for letter in token)
        return token.encode()

    def as_text(token: str) -> bytes:
        byte = BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

    return byte_level if "ByteLevel" in decoder else as_text


def text_ends(eos_token_id: int | Sequence[int] | None) -> tuple[int, ...]:
    """The tokens that end a text, as a generation config has them: one, several or none."""
    return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id or ())


def token_keys(
    tokenizer: PreTrainedTokenizerBase | PackedTokenizer, rows: int, ends: Sequence[int] = ()
) -> Keys:
    """A key of 64 bits per row, (rows,): a hash of its bytes; arguments as for `token_bytes`."""
    digests = (hashlib.blake2b(name, digest_size=8).digest() for name in token_bytes(tokenizer, rows, ends))
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def gumbel(seed: int, position: int, keys: Keys) -> npt.NDArray[np.float32]:
    """g = −log E with E = −log(1 − v) standard exponential, v uniform by (seed, position, key): (V,)."""
    uniform = _mixed(_mixed(keys + _words(seed, position)[0]) ^ _words(seed, position)[1]) >> np.uint64(32)
    v = ((uniform.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)
    exponential = -np.log1p(-np.minimum(v, BELOW_ONE))
    noise: npt.NDArray[np.float32] = -np.log(exponential)
    return noise


@functools.lru_cache(maxsize=4096)
def _words(seed: int, position: int) -> Keys:
    """Two words of the Philox counter (STREAM, position) under the key ``seed``."""
    key, counter = np.array([seed, STREAM], np.uint64), np.array([0, position, 0, 0], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(2)


def _mixed(words: Keys) -> Keys:
    """MurmurHash3's finaliser: every bit of the input reaches every bit of the output."""
    words = words ^ (words >> np.uint64(33))
    words *= np.uint64(0xFF51AFD7ED558CCD)
    words ^= words >> np.uint64(33)
    words *= np.uint64(0xC4CEB9FE1A85EC53)
    words ^= words >> np.uint64(33)
    return words


class GumbelNoise(LogitsProcessor):
    """Adds g to the logits of each row, so that their argmax is a draw from their softmax.

    Args:
        keys: Of the vocabulary's rows.
        people: Whose noise each row gets; the first call decides the first token of each.
    """

    def __init__(self, keys: Keys, people: Sequence[Individual]) -> None:
        self.keys, self.people = keys, people
        self._start: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) with the noise of this position."""
        if self._start is None:
            self._start = input_ids.shape[1]
        position, rows = input_ids.shape[1] - self._start, scores.shape[-1]
        draws = [(person.seed, position + person.start) for person in self.people]
        noise = {draw: gumbel(*draw, self.keys[:rows]) for draw in set(draws)}
        stacked = torch.from_numpy(np.stack([noise[draw] for draw in draws]))  # (B, V)
        return scores.float() + stacked.to(scores.device)


def gumbel_choice(
    keys: Keys,
    people: Sequence[Individual],
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> LogitsProcessorList:
    """What makes a greedy choice a draw from softmax(logits/T) among the allowed tokens; T = 0 is greedy."""
    processors = LogitsProcessorList()
    if temperature == 0:
        return processors
    if temperature not in (None, 1.0):
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    processors.append(GumbelNoise(keys, people))
    return processors
