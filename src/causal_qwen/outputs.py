"""What a causal model says: the laws that one forward pass infers, and the number that would come next."""

from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import ModelOutput

from causal_qwen.cauchy import Cauchy
from causal_qwen.number_prediction import NumberPrediction

__all__ = ["CausalLMOutput", "NumberPrediction"]


@dataclass
class CausalLMOutput(ModelOutput):
    """What one forward pass infers. K positions are kept (``logits_to_keep``; all T by default).

    Args:
        loss: Scalar, with labels: classification + λ·regression (+ softmax).
        cls_loss: Scalar One-vs-Rest part.
        reg_loss: Scalar gated number part.
        logits: (B, K, V) W loc_U + b; None in training with labels, unless asked for.
        loc_U: (B, K, D) location of the individual.
        scale_U: (B, K, D) scale of the individual.
        loc_U0: (B, K) location of the common cause.
        scale_U0: (B, K) scale of the common cause.
        loc_S: (B, K, V) location of the token scores, with ``output_scores=True``.
        scale_S: (B, K, V) scale of the token scores, with ``output_scores=True``.
        loc_Y: (B, K) location of the number in value space.
        scale_Y: (B, K) scale of the number in value space.
        past_key_values: Cache of keys and values.
        hidden_states: Backbone states, when asked for.
        attentions: Attention weights, when asked for.
    """

    loss: Tensor | None = None
    cls_loss: Tensor | None = None
    reg_loss: Tensor | None = None
    logits: Tensor | None = None
    loc_U: Tensor | None = None
    scale_U: Tensor | None = None
    loc_U0: Tensor | None = None
    scale_U0: Tensor | None = None
    loc_S: Tensor | None = None
    scale_S: Tensor | None = None
    loc_Y: Tensor | None = None
    scale_Y: Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def U(self) -> Cauchy:
        """The individual, (B, K, D)."""
        return Cauchy(self.loc_U, self.scale_U)

    @property
    def U0(self) -> Cauchy:
        """The common cause, (B, K)."""
        return Cauchy(self.loc_U0, self.scale_U0)

    @property
    def S(self) -> Cauchy:
        """The token scores, (B, K, V), with ``output_scores=True``."""
        return Cauchy(self.loc_S, self.scale_S)

    @property
    def Y(self) -> Cauchy:
        """The number in value space, (B, K)."""
        return Cauchy(self.loc_Y, self.scale_Y)
