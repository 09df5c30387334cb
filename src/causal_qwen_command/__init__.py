"""The command ``causal-qwen``. A package of its own, so that ``causal_qwen`` knows who imports it and leaves
transformers alone until a verb needs it.
"""

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    from causal_qwen.cli import main

    main()
