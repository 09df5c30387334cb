"""Markdown of texts that come from elsewhere: file names and data say what they say, and nothing more."""

from __future__ import annotations

import html
import re

__all__ = ["code", "words"]

MARKUP = re.compile(r"([\\`*_\[\]|~#$!])")


def words(text: str) -> str:
    """A text as words of one line: neither markup, nor HTML, nor the end of a table's cell."""
    return MARKUP.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def code(text: str) -> str:
    """A text as code within a line."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"
