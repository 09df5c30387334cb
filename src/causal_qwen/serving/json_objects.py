"""Texts that are one JSON object: a logits processor that allows only what continues it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from causal_qwen.decoder.json_scanner import JsonScanner
from causal_qwen.number_processor import NumberProcessor

__all__ = ["JsonObject"]

# Tokens, the likeliest first, of which those that fit are allowed; more are tried only where none fits.
TRIED = 64
NUMBER = "1"  # how a number begins, whatever its value
GOES_ON = "0123456789.eE+-"  # what must not follow a number that is complete


class JsonObject:
    """Allows tokens after which the new text can still become one JSON object; one text from left to right.

    Args:
        processor: Knows the texts of tokens.
        start: Tokens of the prompt.
    """

    def __init__(self, processor: NumberProcessor, start: int) -> None:
        self._tokenizer, self._num = processor.tokenizer, processor.num_token_id
        self._scanner, self._begun, self._after_number = JsonScanner(), False, False
        self._read = start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(1, T) and (1, V) → (1, V), −inf where a token does not fit."""
        for token in input_ids[0, self._read :].tolist():
            self._push(token)
        self._read = input_ids.shape[1]
        allowed = torch.full_like(scores, -math.inf)
        for count in (TRIED, scores.shape[-1]):
            likeliest = torch.topk(scores[0], min(count, scores.shape[-1]))
            for token, score in zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True):
                if score > -math.inf and self._fits(token):
                    allowed[0, token] = score
                    if count > TRIED:
                        break
            if bool((allowed > -math.inf).any()):
                return allowed
        return scores  # no token of this vocabulary can go on: the text is what it is

    def _text(self, token: int) -> str:
        if token == self._num:
            return NUMBER
        text: str = self._tokenizer.decode(
            [token], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _push(self, token: int) -> None:
        text = self._text(token)
        self._begun = self._begun or bool(text.strip())
        self._after_number = token == self._num
        self._scanner.push(text)

    def _fits(self, token: int) -> bool:
        text = self._text(token)
        if not text or self._scanner.complete:
            return False
        if not self._begun and not text.lstrip().startswith("{") and text.strip():
            return False
        if self._after_number and (token == self._num or text[0] in GOES_ON):
            return False
        trial = self._scanner.copy()
        for index, character in enumerate(text):
            trial.push(character)
            if trial.failed:
                return False
            if trial.complete:
                return not text[index + 1 :].strip()
        return True
