"""What generation needs of a model: a backbone with its heads, and transformers' machinery for generate().

Everything in this package is typed by it, so that it stands below the models and knows none of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from causal_qwen.heads import AbductionNetwork, ActionNetwork, NumericEmbedding
from causal_qwen.value_space import ValueSpace

__all__ = ["CausalModel"]


class CausalModel(Protocol):
    """A causal language model: what `CausalLM` gives to a model of transformers.

    Its private members are hooks of transformers' GenerationMixin, listed in docs/reference/internals.md.
    """

    config: Any
    generation_config: GenerationConfig
    device: torch.device
    abduction: AbductionNetwork
    action: ActionNetwork
    numeric_embedding: NumericEmbedding
    lm_head: nn.Linear
    value_space: ValueSpace
    writes_numbers: bool

    def __call__(self, *args: Any, **options: Any) -> Any:
        """A forward pass."""
        ...

    def generate(self, *args: Any, **options: Any) -> Any:
        """Texts, as `CausalGenerationMixin` has it."""
        ...

    def token_logits(self, loc_U: Tensor) -> Tensor:
        """W loc_U + b, as the base rounds it."""
        ...

    def prepare_inputs_for_generation(self, input_ids: Tensor, **options: Any) -> dict[str, Any]:
        """What one forward pass takes."""
        ...

    def get_compiled_call(self, compile_config: Any) -> Any:
        """The forward pass, compiled."""
        ...

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> Any: ...

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any) -> dict[str, Any]: ...

    def _valid_auto_compile_criteria(self, model_kwargs: Any, generation_config: Any) -> bool: ...

    def _has_unfinished_sequences(self, finished: bool, synced_gpus: bool, device: Any) -> bool: ...

    def _prepare_generation_config(self, generation_config: Any, **options: Any) -> Any: ...
