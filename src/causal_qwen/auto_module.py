"""A module that is saved with every model, so that transformers can load it where nobody has imported us.

``from_pretrained(..., trust_remote_code=True)``, `transformers serve --trust-remote-code` and the like run
it; it imports the installed package, and holds no code of its own. Where causal_qwen is imported, it is not
used.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["SavedWithModule", "auto_map"]

NAME = "causal_qwen_auto"
SOURCE = '''"""How transformers finds the classes of this model, with trust_remote_code=True."""

from causal_qwen import (  # noqa: F401
    CausalQwen2Config,
    CausalQwen2ForCausalLM,
    CausalQwen2Processor,
    CausalQwen3Config,
    CausalQwen3ForCausalLM,
)
'''


def auto_map(**classes: str) -> dict[str, str]:
    """For each Auto class, where a saved configuration says that our class is."""
    return {auto: f"{NAME}.{name}" for auto, name in classes.items()}


class SavedWithModule:
    """Goes before a class of transformers that has `save_pretrained`."""

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As transformers', with the module that ``auto_map`` names."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / f"{NAME}.py").write_text(SOURCE, encoding="utf-8")
        return super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class=None):
        """Nothing: transformers would save a copy of our source, where ``auto_map`` names the package."""
