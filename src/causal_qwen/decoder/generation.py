"""Text from a decoder: prefill the prompt once, then one token per step.

The loop is four small functions, ``prefill``, ``step``, ``Sampling.choose`` and ``RowMonitor.push``. This
module knows no tokenizer: text-based stops get their text from ``decode``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from causal_qwen.context import check_context
from causal_qwen.decoder.cache import KVCache
from causal_qwen.decoder.config import DecoderConfig
from causal_qwen.decoder.placement import check_fit
from causal_qwen.decoder.sampling import Sampling, tokens_so_far
from causal_qwen.decoder.stopping import RowMonitor, Stop, StopReason, as_conditions

__all__ = ["Decoder", "Generation", "generate", "pad_left", "prefill", "step"]


class Decoder(Protocol):
    """What generation needs of a model: `CausalLM` has it, and `Engine`."""

    config: DecoderConfig

    def new_cache(self, batch: int, capacity: int | None = None) -> KVCache:
        """An empty cache."""
        ...

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: KVCache | None = None
    ) -> Tensor:
        """Features of each new token, (B, T, H)."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits, (..., V)."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """What was generated.

    Args:
        sequences: (B, T + n), the prompt and the n tokens of the longest row; finished rows end in padding.
        stop_reasons: One per row.
        lengths: New tokens of each row, without padding; the one that ended it (EOS too) counts.
        prompt_length: T.
    """

    sequences: Tensor
    stop_reasons: list[StopReason]
    lengths: list[int]
    prompt_length: int

    def new_tokens(self, row: int) -> list[int]:
        """The tokens that were generated in ``row``, without padding."""
        start = self.prompt_length
        tokens: list[int] = self.sequences[row, start : start + self.lengths[row]].tolist()
        return tokens


def pad_left(rows: Sequence[Sequence[int]], pad_token_id: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts of uneven length as one batch: (input_ids, attention_mask), both (B, longest).

    Raises:
        ValueError: If there is no row, or one without tokens.
    """
    empty = [index for index, row in enumerate(rows) if len(row) == 0]
    if empty or not rows:
        raise ValueError(
            f"the prompt is empty in rows {empty} of {len(rows)}: give at least one token per row"
        )
    width = max(len(row) for row in rows)
    input_ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in rows])  # (B, T)
    attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])  # (B, T)
    return input_ids, attention_mask


def prefill(model: Decoder, input_ids: Tensor, attention_mask: Tensor, cache: KVCache) -> Tensor:
    """Fill the cache with the prompts (B, T); logits of the first new token, (B, V)."""
    return model.head(model.hidden(input_ids, attention_mask, cache)[:, -1])


def step(model: Decoder, tokens: Tensor, cache: KVCache) -> Tensor:
    """Append one token per row (B,); logits of the next, (B, V)."""
    return model.head(model.hidden(tokens[:, None], None, cache)[:, -1])


@torch.inference_mode()
def generate(
    model: Decoder,
    input_ids: Tensor,
    max_new_tokens: int = 128,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop: Stop = (),
    decode: Callable[[list[int]], str] | None = None,
    generator: torch.Generator | None = None,
) -> Generation:
    """Continue every row until it stops or ``max_new_tokens`` are written.

    The last token needs no position of its own, so a prompt that fills the context can still be continued by
    one.

    Args:
        model: The decoder.
        input_ids: (B, T) prompts; rows of uneven length are padded on the left (:func:`pad_left`).
        max_new_tokens: Most tokens per row.
        attention_mask: (B, T), 0 at padding. None: no padding.
        temperature: 0 is greedy; above 0 samples.
        top_k: Sample among the k most likely tokens; None for all.
        top_p: Sample among the tokens that together reach this probability; None for all.
        repetition_penalty: Above 1 makes tokens so far (padding does not count) less likely.
        eos_token_id: The token, or tokens, that end a row.
        pad_token_id: Fills finished rows; the first EOS token when None.
        stop: A string, ``StopString``, ``JsonComplete``, ``Repetition``, or several of them.
        decode: Token ids to text, for stops that read text.
        generator: Source of randomness; torch's own when None.

    Raises:
        ValueError: If the prompt is empty, the context too short, or an option out of range.
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty
    )
    eos = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
    conditions = as_conditions(stop)
    attention_mask = _check_prompt(model.config, input_ids, attention_mask, max_new_tokens)
    batch, prompt_length = input_ids.shape
    uneven_ends = batch > 1 and bool(eos or conditions)
    pad = _padding(pad_token_id, eos, model.config.vocab_size, uneven_ends=uneven_ends)
    monitors = [RowMonitor(conditions, decode) for _ in range(batch)]
    reasons: list[StopReason | None] = [None] * batch
    lengths = [max_new_tokens] * batch

    sequences = input_ids.new_full((batch, prompt_length + max_new_tokens), pad)  # (B, T + max_new_tokens)
    sequences[:, :prompt_length] = input_ids
    past_tokens = None  # (B, V)
    if sampling.needs_past_tokens:
        past_tokens = tokens_so_far(input_ids, attention_mask, model.config.vocab_size)
    cache = model.new_cache(batch, prompt_length + max_new_tokens - 1)
    logits = prefill(model, input_ids, attention_mask, cache)  # (B, V)
    for written in range(1, max_new_tokens + 1):
        tokens = sampling.choose(logits, past_tokens=past_tokens, generator=generator)  # (B,)
        for row, token in enumerate(tokens.tolist()):
            if reasons[row] is not None:
                tokens[row] = pad
                continue
            reasons[row] = StopReason.EOS if token in eos else monitors[row].push(token)
            if reasons[row] is not None:
                lengths[row] = written
        sequences[:, prompt_length + written - 1] = tokens
        if None not in reasons or written == max_new_tokens:
            break
        if past_tokens is not None:
            past_tokens.scatter_(1, tokens[:, None], True)
        logits = step(model, tokens, cache)  # (B, V)
    return Generation(
        sequences=sequences[:, : prompt_length + written],
        stop_reasons=[StopReason.LENGTH if reason is None else reason for reason in reasons],
        lengths=lengths,
        prompt_length=prompt_length,
    )


def _check_prompt(
    config: DecoderConfig, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
) -> Tensor:
    """The attention mask, (B, T) bool; or an error that says what cannot be continued."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    length = check_fit(config, input_ids, attention_mask, None)
    outside = input_ids[(input_ids < 0) | (input_ids >= config.vocab_size)]
    if len(outside):
        raise ValueError(
            f"token id {int(outside[0])} is outside the vocabulary of {config.vocab_size}: "
            "use the model's own tokenizer"
        )
    attention_mask = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
    unfinished = [row for row, last in enumerate(attention_mask[:, -1].tolist()) if not last]
    if unfinished:
        raise ValueError(
            f"rows {unfinished} end in padding: their prompt is empty or padded on the right; pad on the left"
        )
    check_context(config.max_position_embeddings, length, max_new_tokens)
    return attention_mask


def _padding(pad_token_id: int | None, eos: list[int], vocab_size: int, *, uneven_ends: bool) -> int:
    """The token that fills finished rows."""
    if pad_token_id is None:
        if uneven_ends and not eos:
            raise ValueError("rows may end at different lengths: give pad_token_id")
        pad_token_id = eos[0] if eos else 0
    if not 0 <= pad_token_id < vocab_size:
        raise ValueError(f"pad_token_id is {pad_token_id}; it must be one of the {vocab_size} tokens")
    return pad_token_id
