"""One decision at a time: the laws behind a token, and generation that can be watched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from causal_qwen.cauchy import Cauchy
from causal_qwen.generation.decisions import Choice, Decision, InferenceMode
from causal_qwen.generation.readout import ReadOut
from causal_qwen.individual import Individual

if TYPE_CHECKING:
    from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM

__all__ = ["Inference", "InferenceEngine"]


@dataclass(frozen=True)
class Inference:
    """What the model infers and decides at one position.

    Args:
        U: The individual, (B, D).
        U0: The common cause, (B,).
        Y: The number in value space, (B,).
        choice: The decision: tokens, values with intervals, and the scores behind them.
    """

    U: Cauchy
    U0: Cauchy
    Y: Cauchy
    choice: Choice


class InferenceEngine:
    """A model and a way of deciding, without transformers' generation machinery.

    Args:
        model: In evaluation mode.
        mode: "standard", "causal" or "compatible"; the configuration's by default.
        do_sample: Whether noise moves the cause (always so in "causal"), or tokens are drawn in "compatible".
        temperature: T.
        individual: Who is sampled, an `Individual` or a seed, for all rows; somebody by default.
    """

    def __init__(
        self,
        model: CausalQwen2ForCausalLM,
        mode: InferenceMode | None = None,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        individual: Individual | int | None = None,
    ) -> None:
        config = model.config
        self.model = model
        person = Individual.random() if individual is None else individual
        self.individual = person if isinstance(person, Individual) else Individual(person)
        self.decision = Decision(
            config.inference_mode if mode is None else mode,  # type: ignore[arg-type]
            do_sample=do_sample or mode == "causal",
            temperature=temperature,
            noise_gain=config.noise_gain,
            density_floor=config.density_floor,
            persistence=config.persistence,
        )

    def infer(self, input_ids: Tensor, **inputs: Any) -> Inference:
        """Laws and decision for the token after ``input_ids`` (B, T); ``inputs`` as for the model."""
        return next(self.steps(input_ids, 1, **inputs))

    @torch.no_grad()
    def steps(self, input_ids: Tensor, max_new_tokens: int, **inputs: Any) -> Iterator[Inference]:
        """Decide token after token, each with its laws; numbers are fed back, and nothing stops early.

        Args:
            input_ids: (B, T).
            max_new_tokens: How many tokens to decide.
            **inputs: ``attention_mask`` (padding on the left) and ``numeric_values``.
        """
        model, heads, rows = self.model, ReadOut(self.model), len(input_ids)
        decision = replace(self.decision, individuals=(self.individual,) * rows)
        mask = inputs.get("attention_mask", torch.ones_like(input_ids))
        values = inputs.get("numeric_values")
        fed: dict[str, Any] = {"input_ids": input_ids, "numeric_values": values}
        past = None
        for position in range(max_new_tokens):
            length = fed["input_ids"].shape[1]
            outputs = model(
                **fed,
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -length:],
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
                output_logits=decision.mode == "compatible",
            )
            past = outputs.past_key_values
            choice = decision.choose(heads, outputs, input_ids, position, LogitsProcessorList())
            yield Inference(
                Cauchy(outputs.loc_U[:, -1], outputs.scale_U[:, -1]),
                Cauchy(outputs.loc_U0[:, -1], outputs.scale_U0[:, -1]),
                Cauchy(outputs.loc_Y[:, -1], outputs.scale_Y[:, -1]),
                choice,
            )
            tokens = choice.tokens[:, None]
            input_ids = torch.cat([input_ids, tokens], dim=1)
            mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
            has_numbers = model.config.num_token_id is not None
            fed = {"input_ids": tokens, "numeric_values": choice.values[:, None] if has_numbers else None}
