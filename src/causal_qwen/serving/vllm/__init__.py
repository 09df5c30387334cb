"""CausalQwen in vLLM: ``vllm serve DIR`` and ``LLM(DIR)`` run converted and trained models.

vLLM finds `register` by its entry point, in each of its processes. Backbone, KV cache, scheduling and the
OpenAI interface are vLLM's; abduction, action, individuals and decisions are this package's own, so that the
same individual says the same text as with generate(). vLLM is imported only where it calls.
"""

from __future__ import annotations

__all__ = ["register"]

FAMILIES = ("CausalQwen2ForCausalLM", "CausalQwen3ForCausalLM")


def register() -> None:
    """Tell vLLM of our configurations, model classes and what they ask of its engine; twice is harmless."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import causal_qwen  # noqa: F401  registers the configurations with transformers
    from causal_qwen.serving.vllm.engine import CausalEngineConfig

    for name in FAMILIES:
        ModelRegistry.register_model(name, f"{__name__}.model:{name}")
        MODELS_CONFIG_MAP[name] = CausalEngineConfig
