"""Prompting: settings, files of prompts and conversations → texts, by either engine."""

from causal_qwen.prompting.answers import Answer, Speaker
from causal_qwen.prompting.conversation import Conversation
from causal_qwen.prompting.requests import Asking, Request
from causal_qwen.prompting.settings import Settings

__all__ = ["Answer", "Asking", "Conversation", "Request", "Settings", "Speaker"]
