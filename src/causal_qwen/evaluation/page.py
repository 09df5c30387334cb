"""One HTML file that needs nothing else: sections of text, tables and pictures."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from causal_qwen.conversion.files import write_file

__all__ = ["Section", "data_address", "picture", "table", "write_page"]

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6876; --line: #d9dfe6; --accent: #1f5fa8; }
:root { --page: #f6f7f9; --card: #fff; --code: #f1f4f7; --mark: #fdeeb8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ef; --soft: #9aa7b5; --line: #323c48; --accent: #7db3f0; }
  :root { --page: #12171d; --card: #1a2129; --code: #222b35; --mark: #5a4a12; }
  img { background: #fff; border-radius: 6px; }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0; }
main { max-width: 860px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 30px; margin: 0 0 4px; }
h2 { font-size: 20px; margin: 0 0 8px; }
.lead { color: var(--soft); margin: 0 0 24px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
section { padding: 20px 24px; margin: 0 0 20px; }
img { max-width: 100%; display: block; margin: 12px auto; }
table { border-collapse: collapse; width: 100%; margin: 12px 0; }
th, td { text-align: left; vertical-align: top; padding: 6px 10px; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td:first-child { white-space: nowrap; }
pre { background: var(--code); border-radius: 6px; padding: 10px 12px; margin: 12px 0 0; }
pre { overflow-x: auto; font-size: 13.5px; }
.note { color: var(--soft); font-size: 14px; }
.wide { overflow-x: auto; }
.wide table { font-size: 14px; font-variant-numeric: tabular-nums; }
svg { width: 100%; display: block; }
svg text { fill: var(--soft); font-size: 14px; }
svg .value { fill: var(--ink); font-weight: 600; }
svg line { stroke: var(--line); stroke-width: 2; }
svg .zero { stroke: var(--soft); stroke-dasharray: 4 4; }
svg .interval { stroke: var(--accent); stroke-width: 5; stroke-linecap: round; }
svg .point { fill: var(--accent); stroke: var(--card); stroke-width: 2; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; border-top: 1px solid var(--line); }
.pair { padding: 12px 0; }
.side { min-width: 0; overflow-wrap: anywhere; }
.side p { margin: 0 0 6px; }
.said { white-space: pre-wrap; font-size: 15px; }
.asked { color: var(--soft); }
mark { background: var(--mark); color: inherit; border-radius: 3px; }
@media (max-width: 640px) { .pair { grid-template-columns: 1fr; } }
"""


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Args:
        title: Heading.
        text: A sentence or two, plain.
        body: HTML, made by `table` and `picture`.
        commands: Lines that repeat this part.
    """

    title: str
    text: str = ""
    body: str = ""
    commands: Sequence[str] = field(default_factory=tuple)


def table(rows: Sequence[Sequence[str]], *, header: Sequence[str] | None = None) -> str:
    """A table of plain texts."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = row(header, "th") if header else ""
    return f"<table>{head}{''.join(row(cells, 'td') for cells in rows)}</table>"


def picture(png: bytes, *, alt: str) -> str:
    """An image inside the page."""
    return f'<img alt="{html.escape(alt, quote=True)}" src="{data_address(png)}">'


def data_address(png: bytes) -> str:
    """The address of an image that carries the image itself."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def write_page(file: Path, *, title: str, lead: str, sections: Sequence[Section]) -> None:
    """Write the page, whole or not at all."""
    parts = []
    for section in sections:
        commands = "\n".join(html.escape(line) for line in section.commands)
        parts.append(
            f"<section><h2>{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>{section.body}"
            + (f"<pre>{commands}</pre>" if commands else "")
            + "</section>"
        )
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p>'
        f"{''.join(parts)}</main></body></html>"
    )
    write_file(file, page)
