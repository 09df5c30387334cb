"""In front of every path: the key, the size of the body, counts and headers."""

from __future__ import annotations

import hashlib
import hmac

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from causal_qwen.serving.errors import Json, Refusal, error_body
from causal_qwen.serving.metrics import Metrics

__all__ = ["Gate"]

GUARDED = ("/v1/", "/metrics")
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'",
    ),
)


class Gate:
    """Lets requests through, or not.

    Args:
        app: What is behind it.
        key: That clients must know; None lets everybody in.
        largest: Bytes of a body.
        metrics: Counts requests.
        paths: Those that are counted by name.
    """

    def __init__(
        self, app: ASGIApp, *, key: str | None, largest: int, metrics: Metrics, paths: frozenset[str]
    ) -> None:
        self.app, self.largest, self.metrics, self.paths = app, largest, metrics, paths
        # Digests have one length, so that comparing them tells nothing about the key's.
        self._key = None if key is None else hashlib.sha256(f"Bearer {key}".encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                shown = path if path in self.paths else "other"
                self.metrics.requests.add(path=shown, status=str(message["status"]))
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        refusal = self._refusal(scope, path)
        if refusal is not None:
            headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {"Connection": "close"}
            await Json(error_body(refusal), refusal.status, headers)(scope, receive, sending)
            return
        size = 0

        async def receiving() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.largest:
                raise HTTPException(413)
            return message

        await self.app(scope, receiving, sending)

    def _refusal(self, scope: Scope, path: str) -> Refusal | None:
        headers = dict(scope["headers"])
        if self._key is not None and path.startswith(GUARDED):
            given = hashlib.sha256(headers.get(b"authorization", b"")).digest()
            if not hmac.compare_digest(given, self._key):
                message = "the key is missing or wrong; send Authorization: Bearer KEY"
                return Refusal(message, status=401, code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.largest:
            return Refusal(f"the body is larger than {self.largest} bytes", status=413)
        return None
