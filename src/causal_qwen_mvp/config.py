"""The configuration under its known name: sizes follow from ``hidden_size``, and noise is untruncated."""

from huggingface_hub.dataclasses import strict

from causal_qwen import configuration_causal_qwen2

__all__ = ["CausalQwen2Config"]

HEAD_WIDTH = 64  # of Qwen2's attention heads
LAYERS = 4


@strict
class CausalQwen2Config(configuration_causal_qwen2.CausalQwen2Config):
    """`causal_qwen.CausalQwen2Config`, in which sizes that are not given follow from ``hidden_size``, and
    noise is untruncated unless ``density_floor`` says otherwise.

    Qwen2's own defaults are those of a 7B model, whatever ``hidden_size`` is. Here
    ``CausalQwen2Config(vocab_size=32000, hidden_size=512)`` is a model of 50M parameters, ready in a second:
    4 layers, heads of 64, a SwiGLU of 4·H. A configuration that names its sizes is what it says.

    Args:
        intermediate_size: Width of the SwiGLU; None is 4·hidden_size.
        num_hidden_layers: Number of layers.
        num_attention_heads: None makes heads of 64, or of hidden_size where that is not a multiple.
        num_key_value_heads: None is num_attention_heads.
        density_floor: 0 draws every tail of the Cauchy law; the modern default, 0.01, never the rarest.
    """

    intermediate_size: int | None = None
    num_hidden_layers: int = LAYERS
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    density_floor: float | int = 0.0

    def __post_init__(self, **kwargs):
        """Derive the sizes; a Qwen2 configuration given as ``**config.to_dict()`` keeps our model type."""
        kwargs.pop("model_type", None)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.num_attention_heads is None:
            heads_of_64, rest = divmod(self.hidden_size, HEAD_WIDTH)
            self.num_attention_heads = 1 if rest else heads_of_64
        super().__post_init__(**kwargs)
