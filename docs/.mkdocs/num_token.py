"""A mkdocs hook: <NUM> in prose and docstrings is our token, not an HTML tag that nobody sees."""

from __future__ import annotations

import re

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig


class _NumToken(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]
        return self.md.htmlStash.store("&lt;NUM&gt;"), m.start(0), m.end(0)


class _NumTokenExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # After code (190), before HTML tags (90).
        md.inlinePatterns.register(_NumToken("<NUM>", md), "num-token", 95)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the extension; mkdocstrings renders docstrings with the same list."""
    config.markdown_extensions.append(_NumTokenExtension())  # type: ignore[arg-type]
    return config
