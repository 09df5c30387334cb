"""A backbone as generation sees it: prefill a prompt, then step token by token, each time to the causes.

A `Stepper` gives the laws (U, U₀) of the last position and a `ReadOut` to act on them. `TransformersStepper`
runs transformers' forward pass, `NativeStepper` our engine; another backbone is one more class. This module
does not know how a token is decided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy
from causal_qwen.generation.protocol import CausalModel
from causal_qwen.generation.readout import ReadOut

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["Causes", "Stepper", "TransformersStepper"]


class Causes(NamedTuple):
    """The laws of the last position of each row.

    Args:
        U: The individual, (B, D).
        U0: The common cause, (B,).
    """

    U: Cauchy
    U0: Cauchy


class Stepper(Protocol):
    """One batch of growing texts, with whatever it caches of them."""

    readout: ReadOut

    def prefill(self, input_ids: Tensor, numeric_values: Tensor | None) -> Causes:
        """Read the prompts (B, T) and the values at their <NUM> tokens, (B, T) or None where none has one."""
        ...

    def step(self, tokens: Tensor, numeric_values: Tensor | None, ended: Tensor | None = None) -> Causes:
        """Read one more token per row, (B,), and its value, (B,) or None where no text has a number yet.

        Rows that have ``ended``, (B,), get nothing but padding: they need not be read, once and for all, and
        their causes mean nothing.
        """
        ...


class TransformersStepper:
    """transformers' forward pass, with the caches, masks and positions that generate() prepares.

    Args:
        model: The model.
        generation_config: Of generate(): prefill in chunks, compilation, what is recorded.
        **inputs: What generate() hands to every forward pass; ``attention_mask`` (B, T), padding on the left,
            is all that a plain text needs.

    Attributes:
        inputs: The same, as the last step left it: the cache is in it.
        hidden_states: Of the last step, where they are asked for.
        attentions: Of the last step, where they are asked for.
    """

    def __init__(
        self, model: CausalModel, generation_config: GenerationConfig | None = None, **inputs: Any
    ) -> None:
        self.model = model
        self.readout = ReadOut(model)
        self.config = model.generation_config if generation_config is None else generation_config
        self.inputs: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1} | inputs
        self.inputs["output_logits"] = False  # a decision computes them where it needs them
        self.hidden_states: tuple[Tensor, ...] | None = None
        self.attentions: tuple[Tensor, ...] | None = None

    def prefill(self, input_ids: Tensor, numeric_values: Tensor | None) -> Causes:
        """As in `Stepper`."""
        mask = self.inputs.get("attention_mask")
        if mask is not None and self.inputs.get("position_ids") is None:
            self.inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        self._input_ids, self.inputs["numeric_values"] = input_ids, numeric_values
        compiled = self.model._valid_auto_compile_criteria(self.inputs, self.config)
        self._forward = self.model.get_compiled_call(self.config.compile_config) if compiled else self.model
        return self._causes(self.model._prefill(input_ids, self.config, self.inputs))

    def step(self, tokens: Tensor, numeric_values: Tensor | None, ended: Tensor | None = None) -> Causes:
        """As in `Stepper`; every row is read."""
        self._input_ids = torch.cat([self._input_ids, tokens[:, None]], dim=-1)  # (B, T)
        if numeric_values is not None:
            self.inputs["numeric_values"] = self._grown(numeric_values)
        length = 1 if self.inputs["use_cache"] else None
        inputs = self.model.prepare_inputs_for_generation(
            self._input_ids, next_sequence_length=length, **self.inputs
        )
        return self._causes(self._forward(**inputs, return_dict=True))

    def _grown(self, values: Tensor) -> Tensor:
        """The values of the text with one more column, (B, T)."""
        before = self.inputs["numeric_values"]
        if before is None:
            before = values.new_zeros(self._input_ids.shape)[:, :-1]
        return torch.cat([before.to(values), values[:, None]], dim=-1)

    def _causes(self, outputs: Any) -> Causes:
        self.inputs = self.model._update_model_kwargs_for_generation(outputs, self.inputs)
        self.hidden_states, self.attentions = outputs.hidden_states, outputs.attentions
        return Causes(outputs.U[:, -1], outputs.U0[:, -1])
