"""Waiting for jobs in the event loop: their pieces as they come, and an end when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType

from fastapi import Request

from causal_qwen.serving.jobs import Job, Piece
from causal_qwen.serving.scheduler import Scheduler

__all__ = ["Gone", "Waiting"]


class Gone(Exception):
    """The client has closed the connection."""


class Waiting:
    """The pieces of some jobs, told apart by their index; what is not finished when it ends is cancelled.

    Args:
        scheduler: Who has the jobs done.
        jobs: Not submitted yet.
        request: Whose client waits for them.
        begun: Whether the request has been let in before.
    """

    def __init__(
        self, scheduler: Scheduler, jobs: Sequence[Job], request: Request, *, begun: bool = False
    ) -> None:
        self._scheduler, self._jobs, self._request = scheduler, list(jobs), request
        self._begun = begun
        self._news: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()
        self._left = set(range(len(self._jobs)))
        for index, job in enumerate(self._jobs):
            job.deliver = partial(self._take, index)

    def submit(self) -> None:
        """Put the jobs into the queue, and watch the client.

        Raises:
            Refusal: If there is no room.
        """
        self._scheduler.submit(self._jobs, begun=self._begun)
        self._watcher = asyncio.create_task(self._watch())

    def _take(self, index: int, piece: Piece) -> None:
        self._news.put_nowait((index, piece))

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._scheduler.cancel(self._jobs)  # at once, whether somebody reads the news or not
        self._news.put_nowait(None)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """As they come.

        Raises:
            Gone: If the client is.
        """
        while self._left:
            news = await self._news.get()
            if news is None:
                raise Gone
            index, piece = news
            if piece.last:
                self._left.discard(index)
            yield index, piece

    async def all(self) -> list[list[Piece]]:
        """Those of each job, when all are done.

        Raises:
            Gone: If the client is.
            Exception: What has gone wrong with one of them.
        """
        pieces: list[list[Piece]] = [[] for _ in self._jobs]
        async for index, piece in self.pieces():
            if piece.error is not None:
                raise piece.error
            pieces[index].append(piece)
        return pieces

    async def __aenter__(self) -> Waiting:
        self.submit()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop waiting."""
        self._watcher.cancel()
        if self._left:
            self._scheduler.cancel(self._jobs[index] for index in self._left)
