"""Room in the context: the one rule for prompts and new tokens, whoever runs the forward passes."""

from __future__ import annotations

__all__ = ["ContextError", "check_context"]


class ContextError(ValueError):
    """A text that the context has no room for."""


def check_context(context: int, prompt: int, new_tokens: int = 1) -> None:
    """T + n − 1 ≤ context, before the first token; nobody reads the last one, which takes no position.

    Args:
        context: Positions that the model has, its ``max_position_embeddings``.
        prompt: T, tokens of the prompt.
        new_tokens: n, tokens that are asked for; 1 to predict what comes next.

    Raises:
        ContextError: If they do not fit; it names all three and what would.
    """
    left = context - prompt + 1
    if new_tokens <= left:
        return
    if left > 0:
        remedy = f"lower max_new_tokens to {left} or less, or shorten the prompt"
    else:
        remedy = f"shorten the prompt to {max(context - new_tokens + 1, 1)} tokens or less"
    raise ContextError(
        f"a prompt of {prompt} tokens and {new_tokens} new do not fit the context of {context}: {remedy}"
    )
