"""POST /v1/compare: A against B on the same individuals, told pair by pair.

Texts go through the scheduler as everybody's do, a few pairs at a time; scores and statistics are those of
`causal_qwen.counterfactual.comparison`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from causal_qwen.counterfactual.comparison import Said, Score, Tally, score_of
from causal_qwen.counterfactual.comparison.scores import is_yes_or_no
from causal_qwen.data import Prompt
from causal_qwen.individual import SEEDS, Individual
from causal_qwen.prompting import Answer
from causal_qwen.serving.answers import CLIENT_GONE, event_stream
from causal_qwen.serving.completions import usage_body
from causal_qwen.serving.desk import Asked, Desk
from causal_qwen.serving.errors import Json, Refusal
from causal_qwen.serving.jobs import Job, Piece, finite
from causal_qwen.serving.requests import CompareRequest, Sampling, Side
from causal_qwen.serving.scheduler import Scheduler
from causal_qwen.serving.waiting import Gone, Waiting

__all__ = ["compare"]

NAMES = {"distinct_tokens": "distinct"}  # what the library calls them
TOLD = ("difference", "lower", "upper", "correlation", "variance_ratio")


async def compare(desk: Desk, scheduler: Scheduler, request: Request, body: CompareRequest) -> Response:
    """Answer with a stream of pairs, or with all of them."""
    comparing = _Comparing(desk, body)
    await asyncio.to_thread(comparing.jobs, 0)  # what is wrong is said before anything is begun
    events = comparing.events(scheduler, request)
    if body.stream:
        return event_stream(events)
    last: dict[str, Any] = {}
    try:
        async for event in events:
            last = event
    except Gone:
        return Response(status_code=CLIENT_GONE)
    return Json(last)


@dataclass
class _Comparing:
    """One request to compare."""

    desk: Desk
    body: CompareRequest
    sides: tuple[tuple[Prompt, Asked], ...] = field(init=False)
    score: Score = field(init=False)

    def __post_init__(self) -> None:
        if self.body.seed + 2 * self.body.pairs > SEEDS:
            raise Refusal("seed is too large: those that follow it must be seeds, too", param="seed")
        self.sides = (self._side(self.body.a), self._side(self.body.b))
        self.score = _score(self.body)
        same = self.sides[0] == self.sides[1] and self.body.coupling == "individual"
        spans = {self.score.name: 1.0} if is_yes_or_no(self.score.name) else {}
        self.tally = Tally(self.body.pairs, 1, (self.score.name,), spans=spans, equal=same)

    def _side(self, side: Side) -> tuple[Prompt, Asked]:
        own = side.model_dump(exclude_none=True, exclude={"prompt", "messages", "inference_mode"})
        common = self.body.model_dump(include=set(Sampling.model_fields), exclude_none=True)
        settings = Sampling(**({"top_k": 0} | common | own))
        mode = side.inference_mode or self.body.inference_mode or "causal"
        if mode == "compatible" and self.body.coupling == "individual":
            raise Refusal(
                "mode compatible samples tokens, not individuals; give coupling independent, or mode causal",
                param="inference_mode",
            )
        asked = self.desk.asked(
            settings,
            max_tokens=self.body.max_tokens,
            mode=mode,
            sample=None if mode == "compatible" else True,
            top=0 if self.body.score == "nats" else None,
        )
        messages = side.messages if side.prompt is None else side.prompt
        assert messages is not None
        return self.desk.prompt(messages), asked

    def people(self, index: int) -> tuple[Individual, Individual]:
        """Who speaks a pair: one and the same, or strangers."""
        strangers = self.body.pairs if self.body.coupling == "independent" else 0
        return Individual(self.body.seed + index), Individual(self.body.seed + strangers + index)

    def jobs(self, index: int) -> list[Job]:
        """Of one pair."""
        return [
            job
            for (prompt, asked), person in zip(self.sides, self.people(index), strict=True)
            for job in self.desk.jobs(prompt, asked, [person])
        ]

    async def events(self, scheduler: Scheduler, request: Request) -> AsyncIterator[dict[str, Any]]:
        """A pair each, as they are finished, and the result."""
        at_a_time = max(1, scheduler.batch.size // 2)
        done: list[dict[str, Any]] = []
        everything: list[Job] = []
        estimate = None
        for first in range(0, self.body.pairs, at_a_time):
            indices = range(first, min(first + at_a_time, self.body.pairs))
            groups = await asyncio.to_thread(lambda: [self.jobs(index) for index in indices])  # noqa: B023
            jobs = [job for group in groups for job in group]
            everything += jobs
            said: list[list[Piece]] = [[] for _ in jobs]
            async with Waiting(scheduler, jobs, request, begun=first > 0) as waiting:
                async for place, piece in waiting.pieces():
                    if piece.error is not None:
                        raise piece.error
                    said[place].append(piece)
                    both = said[place // 2 * 2 : place // 2 * 2 + 2]
                    if not all(pieces and pieces[-1].last for pieces in both):
                        continue
                    pair, estimate = await asyncio.to_thread(self._pair, indices[place // 2], both)
                    done.append(pair)
                    yield {"object": "compare.pair", **pair, "estimate": estimate}
        yield {
            "object": "compare.result",
            "model": self.desk.name,
            "score": self.score.name,
            "coupling": self.body.coupling,
            "estimate": estimate,
            "pairs": sorted(done, key=lambda pair: int(pair["index"])),
            "usage": usage_body(sum(job.prompt_tokens for job in everything), everything),
        }

    def _pair(
        self, index: int, both: Sequence[Sequence[Piece]]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The scores of a pair, and what all pairs so far say."""
        people = self.people(index)
        texts = [
            _said(prompt, pieces, person, side)
            for (prompt, _), pieces, person, side in zip(self.sides, both, people, "ab", strict=True)
        ]
        a, b = self.score(texts)
        self.tally.add(index, 0, (b,), (a,))  # B − A
        bodies = {
            said.side: {"text": said.text, "score": finite(value)}
            for said, value in zip(texts, (a, b), strict=True)
        }
        head = {"index": index, "seed": people[0].seed}
        return head | bodies | {"difference": finite(b - a)}, self._estimate()

    def _estimate(self) -> dict[str, Any] | None:
        found = self.tally.estimate(self.score.name, level=self.body.interval_level)
        if found.difference is None:
            return None
        return {"pairs": found.pairs} | {name: getattr(found, name) for name in TOLD}


def _score(body: CompareRequest) -> Score:
    if not isinstance(body.score, str):
        text = body.score.contains
        return Score("contains", lambda texts: [float(text in said.text) for said in texts])
    if body.score == "nats":
        return Score("nats", lambda texts: [said.row["nats"] for said in texts])
    return score_of(NAMES.get(body.score, body.score))


def _said(prompt: Prompt, pieces: Sequence[Piece], person: Individual, side: str) -> Said:
    tokens = [token for piece in pieces for token in piece.tokens]
    answer = Answer(
        "".join(piece.text for piece in pieces),
        tuple(number for piece in pieces for number in piece.numbers),
        person.seed,
        str(pieces[-1].finish),
        len(tokens),
        tuple(token.id for token in tokens),
    )
    nats = -sum(token.logprob for token in tokens) / len(tokens) if tokens else math.nan
    return Said(prompt, answer, side, person.seed, {"nats": nats})
