"""The command line: one file per verb, each with its arguments and one call into the library.

Nothing heavy is imported before a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys

import typer

from causal_qwen.cli import chat, convert, counterfactual, demo, generate, info, numbers, parity
from causal_qwen.cli.console import fail

__all__ = ["app", "main"]

app = typer.Typer(
    name="causal-qwen",
    help="Causal language models from Qwen2 checkpoints: exact on day one, numbers as numbers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("convert")(convert.command)
app.command("info")(info.command)
app.command("parity")(parity.command)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("counterfactual")(counterfactual.command)
app.command("numbers")(numbers.command)
app.command("demo")(demo.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from causal_qwen import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version."
    ),
) -> None:
    """Causal language models from Qwen2 checkpoints."""


def main() -> None:
    """Run the command line; a mistake of the user's gets one line, a mistake of ours a traceback."""
    try:
        app()
    except KeyboardInterrupt:
        fail("interrupted", code=130)
    except (ValueError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        fail(str(error))
