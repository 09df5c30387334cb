"""What labels say beside tokens."""

from __future__ import annotations

__all__ = ["IGNORE_INDEX"]

IGNORE_INDEX = -100  # of a position that teaches nothing, as torch and transformers have it
