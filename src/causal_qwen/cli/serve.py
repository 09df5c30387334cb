"""causal-qwen serve MODEL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, quiet_libraries
from causal_qwen.cli.models import load_on

KEY_VARIABLE = "CAUSAL_QWEN_API_KEY"


def command(
    model: shared.Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other machines reach 0.0.0.0.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8000,
    name: Annotated[
        str | None, typer.Option(help="By which clients know the model; its directory's if not given.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            show_envvar=True,
            help="Key that clients must send, or @FILE that holds it: a key on the command line is seen by "
            "everybody on this machine.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[shared.Mode, typer.Option(help="Mode of requests that name none.")] = "causal",
    max_batch: Annotated[int, typer.Option(help="Texts at a time.", min=1, max=48)] = 16,
    max_queue: Annotated[
        int, typer.Option(help="Texts that may wait; more are answered with 429.", min=0)
    ] = 64,
    max_tokens: Annotated[int, typer.Option(help="New tokens of a text, at most.", min=1)] = 2048,
    max_body: Annotated[int, typer.Option(help="Bytes of a request, at most.", min=1)] = 1_000_000,
    timeout: Annotated[float, typer.Option(help="Seconds for a text, waiting included.", min=0.1)] = 300.0,
    drain: Annotated[float, typer.Option(help="Seconds for texts to end after SIGTERM.", min=0)] = 30.0,
    device: shared.Device = None,
    dtype: shared.Precision = "auto",
    engine: shared.Engine = "auto",
) -> None:
    """Serve a model over HTTP, in OpenAI's shapes and in ours, with a page at /."""
    quiet_libraries()
    try:
        from causal_qwen.serving.app import application
        from causal_qwen.serving.desk import Desk, Limits
        from causal_qwen.serving.server import bound_to, serve
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error.name} is missing; install the server with pip install 'causal-qwen[serve]'"
        ) from None
    from causal_qwen.data import Reading

    limits = Limits(body=max_body, tokens=max_tokens, waiting=max_queue, seconds=timeout, batch=max_batch)
    key = _key(api_key)
    reading = Reading.of(model)
    with bound_to(host, port) as bound:
        loaded, processor, native = load_on(engine, model, device=device, dtype=dtype)
        shown = name or Path(model).name or model
        desk = Desk(loaded, processor, native, name=shown, reading=reading, mode=mode, limits=limits)
        app = application(desk, key=key)
        address = f"[{host}]" if ":" in host else host
        told = f"serving {shown} on http://{address}:{bound.getsockname()[1]}"
        serve(app, bound, ready=lambda: note(told), patience=drain)
    note("stopped")


def _key(given: str | None) -> str | None:
    """The key itself.

    Raises:
        ValueError: If it is empty, or its file cannot be read.
    """
    if given is None or not given.startswith("@"):
        key = given
    else:
        try:
            key = Path(given[1:]).read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            raise ValueError(f"{given[1:]} is no text; a key is a line of it") from None
    if key is not None and not key.strip():
        raise ValueError("the key is empty; leave it out to let everybody in")
    return key
