"""causal-qwen numbers TEXT."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from causal_qwen.cli.console import print_json


def command(
    text: Annotated[str, typer.Argument(help="Text to scan; - reads standard input.")],
    as_json: Annotated[
        bool, typer.Option("--json", help='Print {"numbers": [{"text", "value", "start", "end"}, …]}.')
    ] = False,
) -> None:
    """Show what is read as a number in a text, and as which value."""
    from causal_qwen.numbers import format_number, scan

    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
            raise ValueError(f"standard input: {byte} is not utf-8; convert it (iconv -f latin1)") from None
    numbers = scan(text)
    if as_json:
        order = ("text", "value", "start", "end")
        print_json({"numbers": [{name: asdict(number)[name] for name in order} for number in numbers]})
        return

    from rich.console import Console
    from rich.text import Text

    marked, end = Text(), 0
    for number in numbers:
        marked.append(text[end : number.start])
        marked.append(number.text, style="bold reverse green")
        end = number.end
    marked.append(text[end:])
    console = Console(highlight=False)
    console.print(marked)
    console.print(
        f"{len(numbers)} number{'' if len(numbers) == 1 else 's'}:" if numbers else "no numbers", style="dim"
    )
    for number in numbers:
        console.print(f"  {number.text}  →  {format_number(number.value)}", markup=False)
