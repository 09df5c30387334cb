"""The process: a socket, uvicorn, and an end that lets everybody finish."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

__all__ = ["bound_to", "serve"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def bound_to(host: str, port: int) -> socket.socket:
    """A socket that has its address, before a model is loaded for nothing; nobody can connect yet.

    Raises:
        ValueError: If the address is taken or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = error.strerror if isinstance(error, OSError) else "ports end at 65535"
        raise ValueError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        ) from None
    return bound


class _Server(uvicorn.Server):
    """uvicorn's, whose first signal also stops new texts, and which tells when it can be reached."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None], ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain, self._ready = drain, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of SIGTERM and SIGINT."""
        self._drain()
        super().handle_exit(sig, frame)


def serve(
    app: FastAPI, bound: socket.socket, *, ready: Callable[[], None] = lambda: None, patience: float = 30.0
) -> None:
    """Answer until a signal comes; then finish what was begun, for so many seconds.

    Args:
        app: Of `application`.
        bound: Of `bound_to`.
        ready: Called when whoever connects is answered.
        patience: How long texts may take to end after the signal.
    """
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level=logging.WARNING,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(patience)),
        lifespan="on",
    )
    # uvicorn raises the signal again when it is done; it has been obeyed by then.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda *_: None)
    try:
        _Server(config, app.state.scheduler.drain, ready).run(sockets=[bound])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
