"""One decision at a time: the laws behind a token, and generation that can be watched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from causal_qwen.decoder.engine import Engine
from causal_qwen.generation.decisions import Decision, InferenceMode
from causal_qwen.generation.loop import Inference, Texts, steps
from causal_qwen.generation.native import NativeStepper
from causal_qwen.generation.protocol import CausalModel
from causal_qwen.generation.settings import hides_num, resolve
from causal_qwen.generation.stepping import Stepper, TransformersStepper
from causal_qwen.individual import Individuals, one_per_row

__all__ = ["Inferencer"]


class Inferencer:
    """A model and a decision, without processors and stopping criteria.

    Args:
        model: In evaluation mode.
        mode: "standard", "causal" or "compatible"; as generate() has it by default.
        do_sample: Whether noise moves the cause (always so in "causal"), or tokens are drawn in "compatible".
        temperature: T.
        individual: Who is sampled: an `Individual`, a seed, or one per row; somebody new by default.
        noise_gain: κ.
        density_floor: Truncation of the noise.
        persistence: ρ for individuals that have none of their own.
        engine: Runs the forward passes on the CPU, fast.
    """

    def __init__(
        self,
        model: CausalModel,
        mode: InferenceMode | None = None,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        individual: Individuals | None = None,
        noise_gain: float | None = None,
        density_floor: float | None = None,
        persistence: float | None = None,
        engine: Engine | None = None,
    ) -> None:
        settings = resolve(
            model,
            inference_mode=mode,
            noise_gain=noise_gain,
            density_floor=density_floor,
            persistence=persistence,
        )
        mode = settings.pop("inference_mode")
        self.model, self.individual, self.engine = model, individual, engine
        self.options = settings | {
            "mode": mode,
            "do_sample": do_sample or mode == "causal",
            "temperature": temperature,
            "hide_num": hides_num(model, mode),
        }

    def infer(
        self, input_ids: Tensor, *, attention_mask: Tensor | None = None, numeric_values: Tensor | None = None
    ) -> Inference:
        """Laws and decision for the token after ``input_ids`` (B, T); arguments as for `steps`."""
        return next(self.steps(input_ids, 1, attention_mask=attention_mask, numeric_values=numeric_values))

    @torch.no_grad()
    def steps(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        numeric_values: Tensor | None = None,
    ) -> Iterator[Inference]:
        """Decide token after token, each with its laws; numbers are fed back, and nothing stops early.

        Args:
            input_ids: (B, T).
            max_new_tokens: How many tokens to decide.
            attention_mask: (B, T), 0 at padding, which is on the left.
            numeric_values: (B, T) value at each <NUM>.
        """
        texts = Texts(input_ids, numeric_values, num_token_id=self.model.config.num_token_id)
        decision = Decision(**self.options)
        if decision.draws_noise:
            decision = replace(decision, individuals=one_per_row(self.individual, len(input_ids)))
        stepper: Stepper
        if self.engine is None:
            stepper = TransformersStepper(self.model, attention_mask=attention_mask)
        else:
            longest = input_ids.shape[1] + max_new_tokens
            stepper = NativeStepper(self.model, self.engine, attention_mask, max_length=longest)
        yield from itertools.islice(steps(stepper, decision, texts), max_new_tokens)
