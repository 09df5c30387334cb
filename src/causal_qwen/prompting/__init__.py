"""Prompting: settings, files of prompts and conversations → texts, by either engine."""

from typing import TYPE_CHECKING

from causal_qwen.lazy import lazy_names

if TYPE_CHECKING:
    from causal_qwen.prompting.answers import Answer, Speaker
    from causal_qwen.prompting.conversation import Conversation
    from causal_qwen.prompting.requests import Asking, Request
    from causal_qwen.prompting.settings import Settings

__all__ = ["Answer", "Asking", "Conversation", "Request", "Settings", "Speaker"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "causal_qwen.prompting.answers": (
            "Answer",
            "Speaker",
        ),
        "causal_qwen.prompting.conversation": ("Conversation",),
        "causal_qwen.prompting.requests": (
            "Asking",
            "Request",
        ),
        "causal_qwen.prompting.settings": ("Settings",),
    },
)
