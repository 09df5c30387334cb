"""The command line: one file per verb, each with its arguments and one call into the library.

Nothing heavy is imported before a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

import typer

from causal_qwen.cli import (
    chat,
    compare,
    convert,
    counterfactual,
    demo,
    generate,
    info,
    kv_memory,
    numbers,
    parity,
    push,
    serve,
)
from causal_qwen.cli import eval as evaluation
from causal_qwen.cli import predict as prediction
from causal_qwen.cli import simulate as simulation
from causal_qwen.cli import train as training
from causal_qwen.cli.console import fail, silent_stderr
from causal_qwen.cli.interruption import INTERRUPTED, signals_unwind, what_is_kept

__all__ = ["app", "main"]

app = typer.Typer(
    name="causal-qwen",
    help="Causal language models from Qwen2 and Qwen3 checkpoints: exact on day one, numbers as numbers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

VERBS: dict[str, dict[str, Callable[..., None]]] = {
    "Start here": {"demo": demo.command, "simulate": simulation.command},
    "Make a model": {"convert": convert.command, "train": training.command, "push": push.command},
    "Use it": {
        "generate": generate.command,
        "chat": chat.command,
        "predict": prediction.command,
        "counterfactual": counterfactual.command,
        "serve": serve.command,
    },
    "Measure it": {
        "compare": compare.command,
        "parity": parity.command,
        "eval": evaluation.command,
        "info": info.command,
        "numbers": numbers.command,
        "kv-memory": kv_memory.command,
    },
}
for panel, verbs in VERBS.items():
    for verb, command in verbs.items():
        app.command(verb, rich_help_panel=panel)(command)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Understood wherever they stand, not only before the verb.
EVERYWHERE = ("--debug", "--quiet")


def _print_version(flag: bool) -> None:
    if flag:
        from causal_qwen import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    quiet: bool = typer.Option(False, "--quiet", help="Say nothing but the result."),
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version."
    ),
) -> None:
    """Causal language models from Qwen2 and Qwen3 checkpoints."""
    if quiet:
        context.with_resource(silent_stderr())  # until the verb ends: errors are said after that


def main() -> None:
    """Run the command line; a mistake of the user's gets one line, a mistake of ours a traceback."""
    arguments = sys.argv[1:]
    # What follows "--" is text, even if it looks like a flag.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = [flag for flag in EVERYWHERE if flag in arguments[:end]]
    rest = [argument for argument in arguments[:end] if argument not in EVERYWHERE] + arguments[end:]
    try:
        with signals_unwind():
            app(flags + rest)
    except SystemExit as exit_:
        if exit_.code in INTERRUPTED:
            print(f"interrupted: {what_is_kept()}", file=sys.stderr)
        raise
    except (ValueError, OSError) as error:
        if "--debug" in flags:
            raise
        fail(_reason(error))


def _reason(error: ValueError | OSError) -> str:
    """What went wrong, in one line; the system's own errors name the file first."""
    if not isinstance(error, OSError) or error.strerror is None:
        return " ".join(str(error).split("\n"))
    place = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in FULL:
        return f"{place}the disk is full ({error.strerror}); nothing half-written remains. Make room there"
    return f"{place}{error.strerror}"
