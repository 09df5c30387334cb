"""What a decoder is made of: sizes, norm, rotary positions, biases.

Field names are those of transformers, so that a reader of one can read the other. This module knows no tensor
and no weight; it reads a transformers config (or the dictionary of a config.json) by its attributes and never
imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["DecoderConfig", "RopeScaling"]

_QWEN2, _QWEN3, _LLAMA = ("qwen2", "causal_qwen2"), ("qwen3", "causal_qwen3"), ("llama",)
_SUPPORTED_MODEL_TYPES = (*_QWEN2, *_QWEN3, *_LLAMA)
_QWEN3_HEAD_DIM = 128  # where a config does not say
_LARGEST_SIZE = 2**24  # far beyond any decoder; a damaged config must not ask for more than memory has


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context that the model was first trained on.

    Args:
        kind: ``"linear"`` divides every frequency by ``factor``. ``"llama3"`` divides only the slow ones,
            keeps the fast ones, and interpolates between.
        factor: Stretch, ≥ 1.
        low_freq_factor: llama3: wavelengths above ``original_context / low_freq_factor`` are divided.
        high_freq_factor: llama3: wavelengths below ``original_context / high_freq_factor`` are kept.
        original_context: llama3: the context of the first training.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rope scaling kind is {self.kind!r}; 'linear' and 'llama3' are supported")
        if not (_is_positive(self.factor) and self.factor >= 1):
            raise ValueError(f"rope scaling factor is {self.factor!r:.80}; it must be at least 1")
        low, high = self.low_freq_factor, self.high_freq_factor
        if not (_is_positive(low) and _is_positive(high) and low < high):
            raise ValueError(
                f"rope low_freq_factor is {low!r:.80}, high_freq_factor {high!r:.80}; "
                "both must be positive, the low one smaller"
            )
        if not _is_size(self.original_context):
            raise ValueError(f"rope original_context is {self.original_context!r:.80}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer: embedding → blocks (norm, attention, norm, SwiGLU) → norm → head.

    Args:
        vocab_size: V, rows of the embedding and of the head.
        hidden_size: H, width of the residual stream.
        num_hidden_layers: Blocks.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads, a divisor of the query heads (0: as many, plain multi-head
            attention).
        head_dim: Width of a head, even (0: ``hidden_size / num_attention_heads``).
        intermediate_size: F, width of the SwiGLU.
        max_position_embeddings: Context: the most positions that a sequence may take.
        norm: ``"rmsnorm"`` or ``"layernorm"``.
        norm_eps: Floor under the root of the norm.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: Stretch of the rotary wavelengths, None for none.
        qkv_bias: Biases on the query, key and value projections (Qwen2).
        o_bias: Bias on the attention's output projection (Llama and Qwen3 with ``attention_bias``).
        mlp_bias: Biases inside the SwiGLU (Llama with ``mlp_bias``).
        qk_norm: RMSNorm of each query and key head before its rotation (Qwen3).
        tie_word_embeddings: Whether the head is the embedding matrix.
        initializer_range: Standard deviation of fresh weights.

    Raises:
        ValueError: If a value cannot make a decoder; the message names it and what would be right.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int
    max_position_embeddings: int
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not _is_size(value):
                raise ValueError(
                    f"{name} is {value!r:.80}; it must be a whole number from 1 to {_LARGEST_SIZE:,}"
                )
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}: change one of them or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if not _is_size(self.num_key_value_heads) or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads!r:.80}; it must divide "
                f"num_attention_heads ({self.num_attention_heads})"
            )
        if not _is_size(self.head_dim) or self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim!r:.80}; rotary positions turn pairs: it must be even"
            )
        if not _is_size(self.num_attention_heads * self.head_dim):
            raise ValueError(
                f"{self.num_attention_heads} heads of {self.head_dim} are wider than any decoder: "
                "lower num_attention_heads or head_dim"
            )
        if self.norm not in ("rmsnorm", "layernorm"):
            raise ValueError(f"norm is {self.norm!r}; it must be 'rmsnorm' or 'layernorm'")
        for name in ("norm_eps", "rope_theta", "initializer_range"):
            if not _is_positive(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r:.80}; it must be positive")

    @classmethod
    def tiny(cls, **overrides: Any) -> DecoderConfig:
        """The smallest preset: 128 wide, 4 layers, 4 heads, 32,000 tokens, context 2,048.

        Args:
            **overrides: Fields to set otherwise, such as ``vocab_size=256``.
        """
        preset: dict[str, Any] = {
            "vocab_size": 32_000,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 512,
            "max_position_embeddings": 2048,
        }
        return cls(**(preset | overrides))

    @classmethod
    def llama_7b(cls, *, num_key_value_heads: int = 32) -> DecoderConfig:
        """The shape of Llama 2 7B, context 4,096.

        Args:
            num_key_value_heads: 32 is the original; 8 shrinks the cache to a quarter.
        """
        return cls(
            vocab_size=32_000,
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=num_key_value_heads,
            intermediate_size=11_008,
            max_position_embeddings=4096,
            norm_eps=1e-5,
        )

    @classmethod
    def from_hf_config(cls, config: object) -> DecoderConfig:
        """The same decoder as a transformers Qwen2, Qwen3, Llama or CausalQwen config describes.

        Args:
            config: The config object, or the dictionary of its config.json (of transformers 4 or 5).

        Raises:
            ValueError: If the config asks for something that this decoder does not do; it never guesses.
        """

        def get(name: str, default: Any = None) -> Any:
            value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
            return default if value is None else value

        model_type = get("model_type", "")
        if model_type not in _SUPPORTED_MODEL_TYPES:
            raise ValueError(
                f"model_type is {model_type!r:.80}; this decoder reads {', '.join(_SUPPORTED_MODEL_TYPES)}. "
                "For another model of the same architecture build DecoderConfig(...) by hand"
            )
        if get("hidden_act", "silu") != "silu":
            raise ValueError(
                f"hidden_act is {get('hidden_act')!r:.80}; the SwiGLU of this decoder uses 'silu'"
            )
        if get("use_sliding_window", False):
            raise ValueError("use_sliding_window is True; this decoder attends to all positions: turn it off")
        layer_types = get("layer_types", ())
        several = layer_types if isinstance(layer_types, list | tuple) else [layer_types]
        other_layers = sorted(set(map(str, several)) - {"full_attention"})
        if other_layers:
            raise ValueError(
                f"layer_types contain {', '.join(other_layers):.200}; this decoder attends to all positions: "
                "it reads 'full_attention' only"
            )
        rope_theta, rope_scaling = _rope(get)
        attention_bias = model_type not in _QWEN2 and bool(get("attention_bias", False))
        return cls(
            vocab_size=get("vocab_size"),
            hidden_size=get("hidden_size"),
            num_hidden_layers=get("num_hidden_layers"),
            num_attention_heads=get("num_attention_heads"),
            num_key_value_heads=get("num_key_value_heads", 0),
            head_dim=get("head_dim", _QWEN3_HEAD_DIM if model_type in _QWEN3 else 0),
            intermediate_size=get("intermediate_size"),
            max_position_embeddings=get("max_position_embeddings"),
            norm_eps=get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            qkv_bias=model_type in _QWEN2 or attention_bias,
            o_bias=attention_bias,
            mlp_bias=model_type in _LLAMA and bool(get("mlp_bias", False)),
            qk_norm=model_type in _QWEN3,
            tie_word_embeddings=bool(get("tie_word_embeddings", False)),
            initializer_range=get("initializer_range", 0.02),
        )


def _rope(get: Any) -> tuple[float, RopeScaling | None]:
    """(theta, scaling), from the fields of transformers 5 (``rope_parameters``) or of 4."""
    parts = [get(name, {}) for name in ("rope_scaling", "rope_parameters")]
    for part in parts:
        if not isinstance(part, Mapping):
            raise ValueError(f"rope parameters are {part!r:.80}; they must be an object with fields")
    rope: dict[str, Any] = {**parts[0], **parts[1]}
    theta = rope.get("rope_theta", get("rope_theta", 10_000.0))
    if rope.get("partial_rotary_factor", get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor is not 1; this decoder rotates whole heads")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    factor: Any = rope.get("factor")
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=factor)
    if kind == "llama3":
        low: Any = rope.get("low_freq_factor")
        high: Any = rope.get("high_freq_factor")
        context = rope.get("original_max_position_embeddings") or get("max_position_embeddings")
        scaling = RopeScaling(
            kind="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=context
        )
        return theta, scaling
    raise ValueError(
        f"rope_type is {kind!r:.80}; 'default', 'linear' and 'llama3' are supported. Within its original "
        "context a checkpoint usually works with rope_type 'default'"
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_SIZE


def _is_positive(value: object) -> bool:
    """Whether it is a number above 0 that a float can hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max  # type: ignore[operator]
