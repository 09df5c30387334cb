"""causal-qwen push DIR REPO: a model to a hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json

__all__ = ["check_access", "command", "upload"]


def command(
    directory: Annotated[Path, typer.Argument(help="As convert or train wrote it.")],
    repo: Annotated[str, typer.Argument(help="Repository of the hub, OWNER/NAME; made if it is not there.")],
    private: Annotated[
        bool | None, typer.Option(help="Of a new repository; the owner's default if not given.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Address of the hub; $HF_ENDPOINT, or the public one, if not given.")
    ] = None,
    as_json: shared.AsJson = False,
) -> None:
    """Upload a model directory to a hub, with the token of `hf auth login` or $HF_TOKEN."""
    from causal_qwen.hub import check_directory

    check_directory(directory)
    address = upload(directory, repo, private=private, endpoint=endpoint)
    if as_json:
        print_json({"directory": str(directory), "repository": repo, "address": address})
    else:
        print(address)


def check_access(repo: str | None) -> None:
    """That --push can work, before a model is made."""
    if repo is not None:
        from causal_qwen import hub

        hub.check_access(repo)


def upload(directory: Path, repo: str, *, private: bool | None = None, endpoint: str | None = None) -> str:
    """Push, with bars where a person is looking; the address of the repository."""
    from huggingface_hub.utils import disable_progress_bars

    from causal_qwen import hub

    if not sys.stderr.isatty():
        disable_progress_bars()
    note(f"pushing {directory} to {repo} …")
    return hub.push(directory, repo, private=private, endpoint=endpoint)
