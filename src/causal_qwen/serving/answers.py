"""What is answered on each path under /v1: requests → jobs → bodies and streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from causal_qwen.counterfactual.interventions import Branch, Counterfactual, compared
from causal_qwen.data import Prompt
from causal_qwen.evaluation.predict import Prediction
from causal_qwen.individual import SEEDS, Individual
from causal_qwen.serving.completions import Reply, individual_body, usage_body
from causal_qwen.serving.desk import ROWS_AT_A_TIME, Asked, Desk
from causal_qwen.serving.errors import Json, error_body, json_bytes, refusal_of
from causal_qwen.serving.jobs import Job, Piece, finite, number_body
from causal_qwen.serving.requests import (
    ChatRequest,
    CompletionRequest,
    CounterfactualRequest,
    Generation,
    PredictRequest,
)
from causal_qwen.serving.scheduler import Scheduler
from causal_qwen.serving.waiting import Gone, Waiting

__all__ = ["CLIENT_GONE", "chat", "complete", "counterfact", "event_stream", "predict_rows"]

logger = logging.getLogger(__name__)
DEFAULT_TOKENS, DEFAULT_CHAT_TOKENS = 16, 256
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
CLIENT_GONE = 499  # nobody reads it


async def complete(desk: Desk, scheduler: Scheduler, request: Request, body: CompletionRequest) -> Response:
    """POST /v1/completions."""
    prompts: list[Prompt] = [body.prompt] if isinstance(body.prompt, str) else [*body.prompt]
    tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    return await _generate(desk, scheduler, request, body, prompts, tokens, body.logprobs, chat=False)


async def chat(desk: Desk, scheduler: Scheduler, request: Request, body: ChatRequest) -> Response:
    """POST /v1/chat/completions."""
    prompt = desk.prompt(body.messages)
    tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if tokens is None:
        room = await asyncio.to_thread(desk.room, prompt)
        tokens = min(DEFAULT_CHAT_TOKENS, desk.limits.tokens, room)
    top = (body.top_logprobs or 0) if body.logprobs else None
    return await _generate(desk, scheduler, request, body, [prompt], tokens, top, chat=True)


async def _generate(
    desk: Desk,
    scheduler: Scheduler,
    request: Request,
    body: Generation,
    prompts: list[Prompt],
    max_tokens: int,
    top: int | None,
    *,
    chat: bool,
) -> Response:
    asked = desk.asked(
        body,
        max_tokens=max_tokens,
        mode=body.inference_mode,
        sample=body.sample,
        seed=body.seed,
        individual=body.individual,
        level=body.interval_level,
        raw_intervals=body.raw_intervals,
        json_object=body.response_format is not None and body.response_format.type == "json_object",
        top=top,
    )
    people = asked.people(body.n or 1)

    def prepare() -> list[list[Job]]:
        return [desk.jobs(prompt, asked, people) for prompt in prompts]

    groups = await asyncio.to_thread(prepare)
    jobs = [job for group in groups for job in group]
    read = sum(group[0].prompt_tokens for group in groups)
    speakers = people * len(prompts) if asked.settings.samples else [None] * len(jobs)
    mode = str(asked.settings.mode)
    reply = Reply(desk.name, desk.fingerprint, mode, chat, speakers, top is not None)
    waiting = Waiting(scheduler, jobs, request)
    waiting.submit()
    if body.stream:
        options = body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        events = _events(reply, waiting, lambda: usage_body(read, jobs) if with_usage else None, len(jobs))
        return event_stream(events)
    try:
        pieces = await waiting.all()
    except Gone:
        return Response(status_code=CLIENT_GONE)
    finally:
        waiting.close()
    return Json(reply.whole(pieces, usage_body(read, jobs)))


async def _events(
    reply: Reply, waiting: Waiting, usage: Callable[[], dict[str, int] | None], choices: int
) -> AsyncIterator[dict[str, Any]]:
    """What a stream says, until it is done or its client has gone."""
    try:
        for index in range(choices):
            yield reply.opening(index)
        async for index, piece in waiting.pieces():
            if piece.error is not None:
                raise piece.error
            yield reply.event(index, piece)
        if (counts := usage()) is not None:
            yield reply.usage_event(counts)
    finally:
        waiting.close()


def event_stream(events: AsyncIterator[dict[str, Any]]) -> Response:
    """Server-sent events; an error is the last of them."""

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield b"data: " + json_bytes(event) + b"\n\n"
        except Gone:
            return
        except Exception as error:
            if refusal_of(error).status == 500:
                logger.exception("a stream has failed")
            yield b"data: " + json_bytes(error_body(refusal_of(error))) + b"\n\n"
        yield DONE

    return StreamingResponse(lines(), media_type="text/event-stream", headers=STREAM_HEADERS)


async def predict_rows(desk: Desk, scheduler: Scheduler, request: Request, body: PredictRequest) -> Response:
    """POST /v1/predict: a few rows between two steps of the others."""
    reading = desk.reading_of(body)
    data: list[dict[str, Any]] = []
    for start in range(0, len(body.rows), ROWS_AT_A_TIME):
        if await request.is_disconnected():
            return Response(status_code=CLIENT_GONE)
        future = scheduler.run(partial(desk.predictions, body, reading, start), begun=start > 0)
        found: list[Prediction] = await asyncio.wrap_future(future)
        data += [_prediction(start + offset, one) for offset, one in enumerate(found)]
    calibrated = not body.raw_intervals and desk.model.config.conformal_scores is not None
    return Json(
        {
            "object": "list",
            "model": desk.name,
            "interval_level": body.interval_level,
            "intervals": "conformal" if calibrated else "cauchy",
            "template": reading.templates[0] if reading.templates else None,
            "target": reading.target,
            "data": data,
        }
    )


def _prediction(index: int, prediction: Prediction) -> dict[str, Any]:
    figures = {name: finite(getattr(prediction, name)) for name in ("median", "lower", "upper", "prob_num")}
    head = {"index": index, "object": "prediction", "prompt": prediction.prompt}
    return head | figures | {"extrapolates": prediction.extrapolates}


async def counterfact(
    desk: Desk, scheduler: Scheduler, request: Request, body: CounterfactualRequest
) -> Response:
    """POST /v1/counterfactual: all branches together, each as alone."""
    asked = desk.asked(
        body,
        max_tokens=body.max_tokens,
        mode="causal",
        seed=body.seed,
        individual=body.individual,
        level=body.interval_level,
        raw_intervals=body.raw_intervals,
    )
    (person,) = asked.people(1)
    if person.path is not None and body.top_k is None:  # it is replayed as it was abducted
        asked = replace(asked, settings=replace(asked.settings, top_k=0))
    after = Individual((person.seed + 1) % SEEDS, person.persistence)
    other = desk.person(body.control) or after
    prompts = [desk.prompt(prompt) for prompt in (body.prompt, *body.interventions, body.prompt)]
    people = [person] * (len(prompts) - 1) + [other]
    branches, jobs = await _branches(desk, scheduler, request, asked, prompts, people)
    if branches is None:
        return Response(status_code=CLIENT_GONE)
    factual, *rest = (branch for branch, _ in branches)
    whole = Counterfactual(
        factual, tuple(compared(one, factual) for one in rest[:-1]), compared(rest[-1], factual), person
    )
    bodies = [
        _branch_body(branch, pieces)
        for branch, (_, pieces) in zip((factual, *whole.interventions, whole.control), branches, strict=True)
    ]
    return Json(
        {
            "object": "counterfactual",
            "model": desk.name,
            "individual": individual_body(person),
            "factual": bodies[0],
            "interventions": bodies[1:-1],
            "control": bodies[-1] | {"individual": individual_body(other)},
            "usage": usage_body(sum(job.prompt_tokens for job in jobs), jobs),
        }
    )


async def _branches(
    desk: Desk,
    scheduler: Scheduler,
    request: Request,
    asked: Asked,
    prompts: Iterable[Prompt],
    people: Iterable[Individual],
) -> tuple[list[tuple[Branch, list[Piece]]] | None, list[Job]]:
    """What each says to its prompt; None when the client has gone."""
    pairs = list(zip(prompts, people, strict=True))

    def prepare() -> list[Job]:
        return [job for prompt, person in pairs for job in desk.jobs(prompt, asked, [person])]

    jobs = await asyncio.to_thread(prepare)
    try:
        async with Waiting(scheduler, jobs, request) as waiting:
            said = await waiting.all()
    except Gone:
        return None, jobs
    branches = []
    for (prompt, person), pieces in zip(pairs, said, strict=True):
        tokens = tuple(token.id for piece in pieces for token in piece.tokens)
        numbers = tuple(number for piece in pieces for number in piece.numbers)
        text = "".join(piece.text for piece in pieces)
        branches.append((Branch(prompt, text, tokens, numbers, person), pieces))
    return branches, jobs


def _branch_body(branch: Branch, pieces: list[Piece]) -> dict[str, Any]:
    return branch.to_dict() | {
        "tokens": [token.text for piece in pieces for token in piece.tokens],
        "numbers": [number_body(number) for number in branch.numbers],
    }
