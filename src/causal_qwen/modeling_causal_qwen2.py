"""CausalQwen2ForCausalLM: a Qwen2 that infers the cause of what comes next, then acts."""

from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from causal_qwen.causal_lm import CausalLM
from causal_qwen.configuration_causal_qwen2 import CausalQwen2Config

__all__ = ["CausalQwen2ForCausalLM"]


class CausalQwen2ForCausalLM(CausalLM, Qwen2ForCausalLM):
    """A Qwen2ForCausalLM, and a `CausalLM`."""

    config_class = CausalQwen2Config
    config: CausalQwen2Config


AutoModelForCausalLM.register(CausalQwen2Config, CausalQwen2ForCausalLM, exist_ok=True)
# `transformers serve` knows the kind of a model by the name of its class, from this table alone.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[CausalQwen2Config.model_type] = CausalQwen2ForCausalLM.__name__
