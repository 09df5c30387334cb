"""The paths of the server, and what stands around them."""

from __future__ import annotations

import asyncio
import html
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import Scope

from causal_qwen.serving import answers
from causal_qwen.serving.comparing import compare
from causal_qwen.serving.desk import Desk
from causal_qwen.serving.errors import Json, Refusal, refusal_of, refused, unreadable, wrong_path
from causal_qwen.serving.gate import Gate
from causal_qwen.serving.metrics import Metrics
from causal_qwen.serving.requests import (
    ChatRequest,
    CompareRequest,
    CompletionRequest,
    CounterfactualRequest,
    PredictRequest,
)
from causal_qwen.serving.scheduler import News, Scheduler

__all__ = ["application"]

logger = logging.getLogger(__name__)
PAGE = Path(__file__).parent / "page"
ERRORS = {
    400: "The request is wrong.",
    401: "The key is missing or wrong.",
    404: "No such model.",
    413: "The body is too large.",
    429: "The queue is full.",
    500: "The server has failed.",
    503: "The server is about to stop.",
    504: "It took too long.",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def application(desk: Desk, *, key: str | None = None) -> FastAPI:
    """The server of one model.

    Args:
        desk: Of the model.
        key: That clients must know; None lets everybody in.

    Returns:
        An ASGI application; its ``state.scheduler`` begins to work with it.
    """
    metrics = Metrics()
    scheduler = Scheduler(desk.batch(), most_waiting=desk.limits.waiting, metrics=metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def deliver(news: News) -> None:
            for job, piece in news:
                job.deliver(piece)

        def post(news: News) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, news)

        scheduler.post = post
        scheduler.start()
        yield
        await asyncio.to_thread(scheduler.stop)

    app = FastAPI(title="CausalQwen", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.scheduler = scheduler
    _add_paths(app, desk, scheduler, metrics)
    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(ValueError, refused)
    app.add_exception_handler(RequestValidationError, unreadable)
    app.add_exception_handler(HTTPException, wrong_path)
    app.add_exception_handler(Exception, _failed)
    paths = frozenset(app.openapi()["paths"]) | {"/", "/docs", "/openapi.json"}
    app.mount("/", _Page(directory=PAGE, html=True))
    app.add_middleware(Gate, key=key, largest=desk.limits.body, metrics=metrics, paths=paths)
    return app


class _Page(StaticFiles):
    """The files of the page. What is no file may be a path that takes another method."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """As Starlette's."""
        try:
            return await super().get_response(path, scope)
        except HTTPException as error:
            described = scope["app"].openapi()["paths"].get(scope["path"])
            if described is None:
                raise
            allowed = ", ".join(method.upper() for method in described)
            raise HTTPException(405, headers={"Allow": allowed}) from error


async def _failed(request: Request, error: Exception) -> Response:
    logger.error("a request has failed", exc_info=error)
    return await refused(request, error)


def _add_paths(app: FastAPI, desk: Desk, scheduler: Scheduler, metrics: Metrics) -> None:
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": meaning, "content": {"application/json": {"schema": ERROR}}}
        for status, meaning in ERRORS.items()
    }

    async def answer(
        path: Callable[[Desk, Scheduler, Request, Any], Awaitable[Response]], request: Request, body: Any
    ) -> Response:
        desk.check_model(body.model)
        try:
            return await path(desk, scheduler, request, body)
        except (ValueError, TypeError) as error:
            raise refusal_of(error, frozenset(type(body).model_fields)) from error

    @app.get("/v1/models", responses={401: responses[401]})
    async def models() -> Response:
        """The model that is served."""
        return Json({"object": "list", "data": [desk.card()]})

    @app.get("/v1/models/{model}", responses={401: responses[401], 404: responses[404]})
    async def model(model: str) -> Response:
        """The same, by its name."""
        desk.check_model(model)
        return Json(desk.card())

    @app.post("/v1/completions", responses=responses)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        return await answer(answers.complete, request, body)

    @app.post("/v1/chat/completions", responses=responses)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer messages."""
        return await answer(answers.chat, request, body)

    @app.post("/v1/predict", responses=responses)
    async def predict(request: Request, body: PredictRequest) -> Response:
        """The number that follows each row, with its interval."""
        return await answer(answers.predict_rows, request, body)

    @app.post("/v1/counterfactual", responses=responses)
    async def counterfactual(request: Request, body: CounterfactualRequest) -> Response:
        """What the same individual says to other prompts."""
        return await answer(answers.counterfact, request, body)

    @app.post("/v1/compare", responses=responses)
    async def comparison(request: Request, body: CompareRequest) -> Response:
        """A against B on the same individuals, pair by pair."""
        return await answer(compare, request, body)

    @app.get("/health", responses={503: {"description": "It is about to stop."}})
    async def health() -> Response:
        """Whether it is ready."""
        status = "draining" if scheduler.draining else "ok"
        counts = {"running": scheduler.running, "waiting": scheduler.waiting}
        return Json({"status": status, "model": desk.name} | counts, 503 if scheduler.draining else 200)

    @app.get("/metrics", response_class=PlainTextResponse, responses={401: responses[401]})
    async def prometheus() -> Response:
        """Counts and times, as Prometheus reads them."""
        gauges = {"running": lambda: scheduler.running, "waiting": lambda: scheduler.waiting}
        return PlainTextResponse(metrics.text(gauges), media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        """This description as a page."""
        return HTMLResponse(_page_of(app.openapi()))

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in described["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # it is a 400 here
            for name in ("HTTPValidationError", "ValidationError"):
                described.get("components", {}).get("schemas", {}).pop(name, None)
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _page_of(described: dict[str, Any]) -> str:
    """The description, without any script."""
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>CausalQwen: the interface</title>"]
    parts.append("<style>body{font:16px sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}</style>")
    parts.append('<h1>The interface</h1><p>As JSON: <a href="/openapi.json">/openapi.json</a></p>')
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('description', ''))}</p>")
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            schema = described.get("components", {}).get("schemas", {}).get(name)
            if schema is not None:
                shown = json.dumps(schema["properties"], indent=2, ensure_ascii=False)
                parts.append(f"<details><summary>{name}</summary><pre>{html.escape(shown)}</pre></details>")
    return "\n".join(parts)
