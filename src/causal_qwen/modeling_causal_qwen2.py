"""CausalQwen2ForCausalLM: a Qwen2 that infers the cause of what comes next, then acts."""

from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from causal_qwen.causal_lm import CausalLM
from causal_qwen.configuration_causal_qwen2 import CausalQwen2Config

__all__ = ["CausalQwen2ForCausalLM"]


class CausalQwen2ForCausalLM(CausalLM, Qwen2ForCausalLM):
    """A Qwen2ForCausalLM, and a `CausalLM`."""

    config_class = CausalQwen2Config
    config: CausalQwen2Config


AutoModelForCausalLM.register(CausalQwen2Config, CausalQwen2ForCausalLM, exist_ok=True)
