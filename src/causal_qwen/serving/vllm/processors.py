"""What narrows the choice of a request, as vLLM's sampling parameters say it.

Outside "compatible" they say which tokens are allowed, and what is added to scores: the rule of generate().
Where transformers has the processor, it is transformers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from causal_qwen.generation.decisions import InferenceMode
from causal_qwen.serving.vllm.settings import Sampling

__all__ = ["Processing"]


@dataclass(frozen=True)
class Processing:
    """Settings of one request; equal ones are decided together.

    Args:
        top_k: 0 allows all.
        top_p: 1 allows all.
        min_p: 0 allows all.
        penalties: Repetition, presence and frequency.
        adjusts: Whether vLLM has processors of its own for this request that come before ours: bad words, a
            grammar, a bias, allowed tokens, a least length.
        suppressed: A token that is not allowed.
        needs_logits: Whether softmax logits are needed for this, or are part of the answer.
        temperature: Divides logits, where tokens are drawn by Gumbel noise, and 0 is no noise; None where
            vLLM's sampler divides, or it scales the noise of causes.
    """

    top_k: int
    top_p: float
    min_p: float
    penalties: tuple[float, float, float]
    adjusts: bool
    suppressed: int | None
    needs_logits: bool
    temperature: float | None = None

    @classmethod
    def of(
        cls,
        params: Sampling,
        mode: InferenceMode,
        suppressed: int | None = None,
        *,
        drawn: bool = False,
        others: bool = False,
    ) -> Processing:
        """That of a request; ``drawn`` says that its tokens are drawn by Gumbel noise, ``others`` that
        somebody else's processors come before ours.
        """
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        adjusts = others or any(
            (
                params.bad_words,
                params.allowed_token_ids,
                params.logit_bias,
                params.min_tokens,
                params.structured_outputs,
            )
        )
        answers = params.logprobs is not None or params.prompt_logprobs is not None
        return cls(
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
            penalties,
            adjusts,
            suppressed,
            needs_logits=(mode == "compatible" and not drawn) or adjusts or answers,
            temperature=params.temperature if drawn else None,
        )

    def processors(
        self,
        adjustment: Tensor | None,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[list[int]],
        device: torch.device,
    ) -> LogitsProcessorList:
        """For generate()'s decisions, of rows that share these settings.

        Args:
            adjustment: (B, V) what vLLM's own processors have added to the logits, −inf where they forbid;
                None where there are none.
            prompts: Ids of each prompt.
            outputs: Ids that were generated.
            device: Of the logits.
        """
        chosen: list[LogitsProcessor] = []
        if adjustment is not None:
            chosen.append(_Adjusted(adjustment))
        if self.penalties != (1.0, 0.0, 0.0):
            chosen.append(_Penalised(self.penalties, prompts, outputs))
        if self.suppressed is not None:
            chosen.append(SuppressTokensLogitsProcessor([self.suppressed], device=device))
        if self.temperature not in (None, 0.0, 1.0):
            chosen.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k > 0:
            chosen.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            chosen.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0.0:
            chosen.append(MinPLogitsWarper(self.min_p))
        return LogitsProcessorList(chosen)


class _Adjusted(LogitsProcessor):
    """Adds what vLLM's own processors added."""

    def __init__(self, adjustment: Tensor) -> None:
        self.adjustment = adjustment

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        return scores + self.adjustment[:, : scores.shape[-1]]  # a hidden <NUM> row is not there


class _Penalised(LogitsProcessor):
    """vLLM's penalties of tokens that were said."""

    def __init__(
        self,
        penalties: tuple[float, float, float],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[list[int]],
    ) -> None:
        self.penalties, self.prompts, self.outputs = penalties, prompts, outputs

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        from vllm.utils.torch_utils import make_tensor_with_pad
        from vllm.v1.sample.ops.penalties import apply_all_penalties

        rows, vocab = scores.shape
        said = make_tensor_with_pad(
            [list(prompt) for prompt in self.prompts],
            pad=vocab,
            dtype=torch.int64,
            device=scores.device,
            pin_memory=False,
        )
        repetition, presence, frequency = (scores.new_full((rows,), one) for one in self.penalties)
        penalised: Tensor = apply_all_penalties(
            scores, said, presence, frequency, repetition, list(self.outputs)
        )
        return penalised
