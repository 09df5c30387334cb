"""Where this library keeps what is expensive to make again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """$CAUSAL_QWEN_CACHE, else causal-qwen in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CAUSAL_QWEN_CACHE") or Path(home) / "causal-qwen")
