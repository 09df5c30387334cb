"""generate() on our own decoder: backbone steps by the compiled `Engine`, decisions by the heads as they are.

A `NativeEngine` is given to generate(engine=...), whose processors, stopping criteria, numbers and streaming
stay the same; only the forward pass is another. This module does not know how a decision is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy, magnitude
from causal_qwen.decoder.engine import Engine
from causal_qwen.decoder.packed import Precision
from causal_qwen.generation.readout import ReadOut
from causal_qwen.heads import EXPONENT_BOUND, exact
from causal_qwen.kernels.native import NativeAbduction, runs_native
from causal_qwen.kernels.products import Matrix

if TYPE_CHECKING:
    from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM

__all__ = ["NativeEngine", "NativeOutput", "NativeSession"]


@dataclass(slots=True)
class NativeOutput:
    """What a forward pass leaves: causes and numbers are computed when a decision asks for them.

    Args:
        hidden: (B, H) features of the last position.
        logits: (B, 1, V) W loc_U + b, where somebody needs them.
    """

    hidden: Tensor
    logits: Tensor | None = None


class _NativeReadOut(ReadOut):
    """The heads over the engine's features, with W in its precision."""

    def __init__(self, model: CausalQwen2ForCausalLM, weight: Matrix) -> None:
        super().__init__(model, weight)
        self._abduction = abduction = model.abduction
        self._scale_U0 = exact(magnitude(abduction.common_scale)).detach()
        maps, bias = abduction.stacked()
        self._native = None
        if runs_native(maps, None):
            self._native = NativeAbduction(maps, bias, abduction.scale_activation, EXPONENT_BOUND)

    def causes(self, outputs: NativeOutput) -> tuple[Cauchy, Cauchy]:
        """U (B, D) and U₀ (B,)."""
        if self._native is None:
            return self._abduction.forward(outputs.hidden)
        loc_U, scale_U, loc_U0 = self._native(outputs.hidden)
        return Cauchy(loc_U, scale_U), Cauchy(loc_U0, self._scale_U0.expand_as(loc_U0))

    def number(self, outputs: NativeOutput) -> Cauchy:
        """Y (B,) of the widened cause, in value space."""
        return self.action.numbers(self.action.exogenous(self.causes(outputs)[0]))

    def logits(self, loc_U: Tensor) -> Tensor:
        """W loc_U + b, (B, V), float32."""
        return self.act(loc_U)


class NativeEngine:
    """A causal model whose backbone runs in the `Engine`; its heads are the model's own modules.

    Args:
        model: In evaluation mode, on the CPU. Later changes of its weights are not seen.
        precision: Of the weights: "float32", "bfloat16", "int8" or "int4"; None takes the model's own.
        native: As for `Engine`.
        tell: As for `Engine`.

    Raises:
        ValueError: If the model is not on the CPU, or of a kind that the decoder does not do.
    """

    def __init__(
        self,
        model: CausalQwen2ForCausalLM,
        *,
        precision: Precision | None = None,
        native: bool = True,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        if model.device.type != "cpu":
            raise ValueError(
                f"the model is on {model.device}; the native engine runs on the CPU: move it there"
            )
        if precision is None:
            precision = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
        self.model = model
        self.engine = Engine.from_model(model, precision=precision, native=native, tell=tell)
        self.heads: ReadOut = _NativeReadOut(model, self.engine.weights.head)

    def session(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        max_length: int,
        output_logits: bool,
        hide_num: bool,
    ) -> NativeSession:
        """A text that begins with ``input_ids`` (B, T) and ends within ``max_length`` tokens."""
        return NativeSession(
            self,
            input_ids,
            attention_mask,
            max_length=max_length,
            output_logits=output_logits,
            hide_num=hide_num,
        )


class NativeSession:
    """One batch of growing texts, with its cache.

    Args:
        native: The engine.
        input_ids: (B, T) prompts, padded on the left.
        attention_mask: (B, T), 0 at padding; None where there is none.
        max_length: Most tokens of a row; the last one needs no slot.
        output_logits: Whether logits are needed.
        hide_num: Whether logits leave out a <NUM> row that conversion added.
    """

    def __init__(
        self,
        native: NativeEngine,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        max_length: int,
        output_logits: bool,
        hide_num: bool,
    ) -> None:
        self.native = native
        self.input_ids = input_ids
        self.attention_mask = attention_mask
        self.output_logits = output_logits
        self.hide_num = hide_num
        rows, length = input_ids.shape
        context = native.model.config.max_position_embeddings
        self.cache = native.engine.new_cache(rows, min(max(max_length - 1, length), max(context, length)))

    def prefill(self, numeric_values: Tensor | None) -> NativeOutput:
        """Read the prompts; ``numeric_values`` (B, T) belong to them."""
        return self._forward(self.input_ids, self.attention_mask, numeric_values)

    def step(self, tokens: Tensor, numeric_values: Tensor | None) -> NativeOutput:
        """Read one more token per row, (B,); ``numeric_values`` (B, T) are of the text so far, with it."""
        values = None if numeric_values is None else numeric_values[:, -1:]
        return self._forward(tokens[:, None], None, values)

    def _forward(
        self, input_ids: Tensor, attention_mask: Tensor | None, numeric_values: Tensor | None
    ) -> NativeOutput:
        engine, model = self.native.engine, self.native.model
        embeddings = None
        if numeric_values is not None:
            is_number = input_ids == model.config.num_token_id
            embeddings = model.numeric_embedding(engine.embed(input_ids), numeric_values, is_number)
        hidden = engine.hidden(input_ids, attention_mask, self.cache, embeddings=embeddings).select(1, -1)
        output = NativeOutput(hidden)
        if not self.output_logits:
            return output
        heads = self.native.heads
        logits = heads.logits(heads.causes(output)[0].loc)
        if self.hide_num and model.config.num_token_id == logits.shape[-1] - 1:
            logits = logits[:, :-1]
        return NativeOutput(hidden, logits.unsqueeze(1))
