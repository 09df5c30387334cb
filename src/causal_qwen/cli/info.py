"""causal-qwen info MODEL."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import print_json, print_table, quiet_libraries


def command(
    model: Annotated[
        str, typer.Argument(help="A converted or trained directory, or any source that `convert` takes.")
    ],
    as_json: shared.AsJson = False,
) -> None:
    """Show where a model comes from, its precision, what its constants mean and how intervals are made."""
    quiet_libraries()
    from causal_qwen.conversion.description import describe

    facts = describe(model)
    if as_json:
        print_json(facts)
        return
    for title, section in facts.items():
        print_table(title, [_row(name, fact) for name, fact in section.items()])


def _row(name: str, fact: Any) -> tuple[Any, ...]:
    """A fact, with its meaning where it has one."""
    if isinstance(fact, dict):
        return (name, fact["value"], fact["meaning"])
    return (name, {True: "yes", False: "no"}[fact] if isinstance(fact, bool) else fact)
