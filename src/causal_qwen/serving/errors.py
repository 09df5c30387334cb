"""What a client is told when something is wrong: OpenAI's shape, and nothing about this machine."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from causal_qwen.context import ContextError

__all__ = ["Json", "Refusal", "error_body", "json_bytes", "refusal_of", "refused", "unreadable", "wrong_path"]

RETRY_SECONDS = 2
TYPES = {401: "authentication_error", 429: "rate_limit_error"}
STATUSES = {
    404: "no such path; /docs lists them",
    405: "this path does not take that method; /docs lists them",
}


class Refusal(Exception):
    """A request that is not answered.

    Args:
        message: What is wrong, and what would be right.
        status: Of HTTP.
        param: The field that is wrong.
        code: A name for programs.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


class Json(Response):
    """JSON whose text may hold anything that a JSON string can."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """As bytes."""
        return json_bytes(content)


def json_bytes(content: Any) -> bytes:
    """UTF-8; half of a surrogate pair, which UTF-8 has no form for, stays escaped."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def error_body(refusal: Refusal) -> dict[str, Any]:
    """In OpenAI's shape."""
    kind = TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def refusal_of(error: Exception, fields: frozenset[str] = frozenset()) -> Refusal:
    """What to say of an error: ours are written for users, others say only that they happened.

    Args:
        error: Whatever was raised.
        fields: Names of the request; a message that begins with one is about it.
    """
    if isinstance(error, Refusal):
        return error
    if not isinstance(error, ValueError | TypeError):
        return Refusal("the server has failed at this request; its log says why", status=500)
    message = " ".join(str(error).split())
    first = message.partition(" ")[0]
    code = "context_length_exceeded" if isinstance(error, ContextError) else None
    return Refusal(message, param=first if first in fields else None, code=code)


async def refused(request: Request, error: Exception) -> Response:
    """The response to a `Refusal`."""
    refusal = refusal_of(error)
    headers = {}
    if refusal.status == 429:
        headers["Retry-After"] = str(RETRY_SECONDS)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Json(error_body(refusal), refusal.status, headers)


async def unreadable(request: Request, error: Exception) -> Response:
    """The response to a body that is no JSON, or not what the path takes."""
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    # Of a value that may be of several kinds, the deepest complaint is about the kind that was meant.
    worst = max(problems, key=lambda problem: (problem["type"] == "extra_forbidden", len(problem["loc"])))
    place = [str(part) for part in worst["loc"] if part not in ("body", "query", "path")]
    param, kind = ".".join(place) or None, worst["type"]
    if kind == "json_invalid":
        return await refused(request, Refusal("the body is not valid JSON"))
    if kind == "extra_forbidden":
        return await refused(
            request, Refusal(f"{param} is no field that is known here", param=param, code="unknown_field")
        )
    if param is None:
        message = "the body must be a JSON object, sent as application/json"
    else:
        message = f"{param}: {worst['msg']}"
    return await refused(request, Refusal(message, param=param))


async def wrong_path(request: Request, error: Exception) -> Response:
    """The response to a path or a method that is not there."""
    assert isinstance(error, HTTPException)
    message = STATUSES.get(error.status_code, "the request cannot be read")
    response = await refused(request, Refusal(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response
