"""Serving: one model behind HTTP, in OpenAI's shapes and in ours; requests share the decoder's batch."""

from causal_qwen.serving.app import application
from causal_qwen.serving.desk import Desk, Limits
from causal_qwen.serving.server import serve

__all__ = ["Desk", "Limits", "application", "serve"]
