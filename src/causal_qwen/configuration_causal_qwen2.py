"""Configuration of CausalQwen2: a Qwen2 configuration plus the causal heads."""

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, Qwen2Config

from causal_qwen.configuration import CausalFields

__all__ = ["CausalQwen2Config"]


@strict
class CausalQwen2Config(CausalFields, Qwen2Config):
    """Qwen2's fields, and those of `CausalFields`."""

    model_type = "causal_qwen2"


AutoConfig.register(CausalQwen2Config.model_type, CausalQwen2Config, exist_ok=True)
