"""Room in the context: the one rule for prompts and new tokens, whoever runs the forward passes."""

from __future__ import annotations

__all__ = ["check_context", "room"]


def room(context: int, prompt: int) -> int:
    """New tokens that fit behind a prompt of T tokens, context − T + 1: nobody reads the last one, so that
    it takes no position. At most 0 where the prompt itself does not fit.
    """
    return context - prompt + 1


def check_context(context: int, prompt: int, new_tokens: int = 1) -> None:
    """T + n − 1 ≤ context, before the first token.

    Args:
        context: Positions that the model has, its ``max_position_embeddings``.
        prompt: T, tokens of the prompt.
        new_tokens: n, tokens that are asked for; 1 to predict what comes next.

    Raises:
        ValueError: If they do not fit; it names all three and what would.
    """
    left = room(context, prompt)
    if new_tokens <= left:
        return
    if left > 0:
        remedy = f"lower max_new_tokens to {left} or less, or shorten the prompt"
    else:
        remedy = f"shorten the prompt to {context} tokens or less"
    raise ValueError(
        f"a prompt of {prompt} tokens and {new_tokens} new do not fit the context of {context}: {remedy}"
    )
