"""What generation needs of a model: a backbone with its heads, and transformers' machinery for generate().

Everything in this package is typed by it, so that it stands below the models and knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from causal_qwen.heads import AbductionNetwork, ActionNetwork, NumericEmbedding
from causal_qwen.value_space import ValueSpace

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["CausalHeads", "CausalModel", "Criteria", "Processors", "Streamer"]

# Called with ids (B, T) and logits (B, V), as transformers' are; each gives logits.
Processors = Sequence[Callable[[Tensor, Tensor], Tensor]]
# Called with ids (B, T) and scores; each says of every row, (B,), or of all, whether it ends.
Criteria = Sequence[Callable[[Tensor, Any], Tensor | bool]]


class Streamer(Protocol):
    """Takes tokens as they come."""

    def put(self, value: Tensor) -> None:
        """Take prompts (B, T), then tokens (B,)."""
        ...

    def end(self) -> None:
        """There are no more."""
        ...


class CausalHeads(Protocol):
    """What acts on features, whoever computes these: all that the native engine asks of a model."""

    config: Any
    abduction: AbductionNetwork
    action: ActionNetwork
    numeric_embedding: NumericEmbedding

    @property
    def device(self) -> torch.device:
        """Where it is."""
        ...

    @property
    def value_space(self) -> ValueSpace:
        """Where its numbers live."""
        ...

    @property
    def writes_numbers(self) -> bool:
        """Whether <NUM> can be chosen."""
        ...


class CausalModel(CausalHeads, Protocol):
    """A causal language model: what `CausalLM` gives to a model of transformers.

    Its private members are hooks of transformers' GenerationMixin, listed in docs/reference/internals.md.
    """

    generation_config: GenerationConfig
    lm_head: nn.Linear

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
