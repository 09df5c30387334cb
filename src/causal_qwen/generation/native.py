"""generate() on our own decoder: backbone steps by the compiled `Engine`, decisions by the heads as they are.

A `NativeEngine` is given to generate(engine=...), whose processors, stopping criteria, numbers and streaming
stay the same; only the forward pass is another. This module does not know how a decision is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy
from causal_qwen.decoder.engine import Engine
from causal_qwen.decoder.packed import Precision
from causal_qwen.kernels.products import Matrix, products

if TYPE_CHECKING:
    from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM

__all__ = ["NativeEngine", "NativeOutput", "NativeSession"]


class NativeOutput:
    """The laws of the last position under the names of the model's own output, (B, 1, D) and (B, 1).

    They are computed when somebody asks: no decision needs them all.

    Args:
        native: The engine.
        hidden: (B, 1, H) features of the last position.
    """

    def __init__(self, native: NativeEngine, hidden: Tensor) -> None:
        self.native = native
        self.hidden = hidden
        self.logits: Tensor | None = None  # (B, 1, V) W loc_U + b, where somebody needs them

    @functools.cached_property
    def _causes(self) -> tuple[Cauchy, Cauchy]:
        """U and U₀."""
        size = self.native.model.abduction.loc.out_features
        maps = self.native.abduce(self.hidden).split([size, size, 1], dim=-1)
        return self.native.model.abduction.causes(*maps)

    @functools.cached_property
    def _number(self) -> Cauchy:
        action = self.native.action
        return action.numbers(action.exogenous(self._causes[0]))

    @property
    def loc_U(self) -> Tensor:
        """Location of the individual."""
        return self._causes[0].loc

    @property
    def scale_U(self) -> Tensor:
        """Scale of the individual."""
        return self._causes[0].scale

    @property
    def loc_U0(self) -> Tensor:
        """Location of the common cause."""
        return self._causes[1].loc

    @property
    def scale_U0(self) -> Tensor:
        """Scale of the common cause."""
        return self._causes[1].scale

    @property
    def loc_Y(self) -> Tensor:
        """Location of the number in value space."""
        return self._number.loc

    @property
    def scale_Y(self) -> Tensor:
        """Scale of the number in value space."""
        return self._number.scale


@dataclass(frozen=True)
class _VocabularyMatrix:
    weight: Matrix


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
        # What a decision asks of a model; W is the engine's, so that it is read in the engine's precision.
        self.config = model.config
        self.action = model.action
        self._abduction, self._abduction_bias = model.abduction.stacked()
        self.value_space = model.value_space

    @property
    def lm_head(self) -> _VocabularyMatrix:
        """Where a decision finds W."""
        return _VocabularyMatrix(self.engine.weights.head)

    def abduce(self, hidden: Tensor) -> Tensor:
        """The linear maps of abduction side by side, (B, 1, H) → (B, 1, 2D + 1)."""
        return products(hidden[:, 0], Matrix(self._abduction), self._abduction_bias).unsqueeze(1)

    def token_logits(self, loc_U: Tensor) -> Tensor:
        """W loc_U + b, (..., V), float32."""
        flat = products(loc_U.reshape(-1, loc_U.shape[-1]), self.engine.weights.head, self.action.bias)
        return flat.view(*loc_U.shape[:-1], -1)

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
        context = native.config.max_position_embeddings
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
        native, model = self.native, self.native.model
        embeddings = None
        if numeric_values is not None:
            is_number = input_ids == native.config.num_token_id
            embeddings = model.numeric_embedding(native.engine.embed(input_ids), numeric_values, is_number)
        hidden = native.engine.hidden(input_ids, attention_mask, self.cache, embeddings=embeddings)[:, -1:]
        output = NativeOutput(native, hidden)
        if self.output_logits:
            logits = native.token_logits(output.loc_U)
            if self.hide_num and native.config.num_token_id == logits.shape[-1] - 1:
                logits = logits[..., :-1]
            output.logits = logits
        return output
