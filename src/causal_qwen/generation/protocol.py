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
    """A causal language model."""

    config: Any
    generation_config: GenerationConfig
    abduction: AbductionNetwork
    action: ActionNetwork
    numeric_embedding: NumericEmbedding
    lm_head: nn.Linear

    @property
    def device(self) -> torch.device:
        """Of its weights."""
        ...

    @property
    def value_space(self) -> ValueSpace:
        """Where its numbers live."""
        ...

    @property
    def writes_numbers(self) -> bool:
        """Whether <NUM> can be chosen."""
        ...

    def __call__(self, *args: Any, **options: Any) -> Any:
        """A forward pass."""
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

    # Hooks of transformers' GenerationMixin; docs/reference/internals.md says why each is needed.

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> Any: ...

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any]
    ) -> dict[str, Any]: ...

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool: ...

    def _has_unfinished_sequences(
        self, this_peer_finished: bool, synced_gpus: bool, device: torch.device
    ) -> bool: ...

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **options: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]: ...
