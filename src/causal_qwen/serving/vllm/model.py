"""Our model classes as vLLM loads them: its backbones, with our heads."""

from __future__ import annotations

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from causal_qwen.serving.vllm.heads import CausalHeads

__all__ = ["CausalQwen2ForCausalLM", "CausalQwen3ForCausalLM"]


class CausalQwen2ForCausalLM(CausalHeads, Qwen2ForCausalLM):
    """vLLM's Qwen2, and `CausalHeads`."""


class CausalQwen3ForCausalLM(CausalHeads, Qwen3ForCausalLM):
    """vLLM's Qwen3, and `CausalHeads`."""
