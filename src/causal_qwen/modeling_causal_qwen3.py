"""CausalQwen3: a dense Qwen3 that infers the cause of what comes next, then acts."""

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, Qwen3Config, Qwen3ForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from causal_qwen.causal_lm import CausalLM
from causal_qwen.configuration import CausalFields
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["CausalQwen3Config", "CausalQwen3ForCausalLM"]


@strict
class CausalQwen3Config(CausalFields, Qwen3Config):
    """Qwen3's fields, and those of `CausalFields`."""

    model_type = "causal_qwen3"


class CausalQwen3ForCausalLM(CausalLM, Qwen3ForCausalLM):
    """A Qwen3ForCausalLM, and a `CausalLM`."""

    config_class = CausalQwen3Config
    config: CausalQwen3Config


AutoConfig.register(CausalQwen3Config.model_type, CausalQwen3Config, exist_ok=True)
AutoModelForCausalLM.register(CausalQwen3Config, CausalQwen3ForCausalLM, exist_ok=True)
AutoProcessor.register(CausalQwen3Config, CausalQwen2Processor, exist_ok=True)
# `transformers serve` knows the kind of a model by the name of its class, from this table alone.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[CausalQwen3Config.model_type] = CausalQwen3ForCausalLM.__name__
