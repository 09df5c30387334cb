"""Who is served when: one thread owns the batch, lets jobs in as others end, and tells each what is decided.

Everything else only puts jobs into the queue or takes them out. This module knows neither HTTP nor words.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from causal_qwen.generation.batching import Batch, Text
from causal_qwen.serving.errors import Refusal
from causal_qwen.serving.jobs import Job, Piece
from causal_qwen.serving.metrics import Metrics

__all__ = ["News", "Scheduler"]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
News = Sequence[tuple[Job, Piece]]


def _deliver(news: News) -> None:
    for job, piece in news:
        job.deliver(piece)


class Scheduler:
    """A queue in front of a batch.

    Args:
        batch: Owned by the scheduler's thread.
        most_waiting: Jobs that may wait for a place; more are refused.
        metrics: Counted here.
        post: Hands news of one step to those who wait for it; in the scheduler's thread by default.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        most_waiting: int = 64,
        metrics: Metrics | None = None,
        post: Callable[[News], None] = _deliver,
    ) -> None:
        self.batch, self.most_waiting, self.post = batch, most_waiting, post
        self.metrics = Metrics() if metrics is None else metrics
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[Text, Job] = {}
        self._cancelled: set[Job] = set()
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._draining = self._stopped = False
        self._thread = threading.Thread(target=self._work, name="decoder", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def running(self) -> int:
        """Jobs in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Jobs and tasks in the queue."""
        return len(self._waiting) + len(self._tasks)

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self._draining

    def submit(self, jobs: Iterable[Job], *, begun: bool = False) -> None:
        """Put jobs into the queue, all or none.

        Args:
            jobs: Not submitted before.
            begun: Whether they belong to a request that has been let in.

        Raises:
            Refusal: If there is no room, or the server is about to stop.
        """
        jobs = list(jobs)
        now = time.monotonic()
        with self._changed:
            if not begun:
                self._check_room(len(jobs))
            for job in jobs:
                job.started = now
            self._waiting += jobs
            self._changed.notify()

    def run(self, task: Callable[[], Result], *, begun: bool = False) -> Future[Result]:
        """Have something computed between two steps, where nothing else uses the model.

        Args:
            task: What to compute.
            begun: As for `submit`.

        Raises:
            Refusal: As for `submit`.
        """
        future: Future[Result] = Future()
        with self._changed:
            if not begun:
                self._check_room(1)
            self._tasks.append((task, future))
            self._changed.notify()
        return future

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Nobody waits for these any more: their places are free at the next step."""
        with self._changed:
            self._cancelled |= set(jobs)
            self._changed.notify()

    def drain(self) -> None:
        """Take nothing new; what was taken is finished."""
        with self._changed:
            self._draining = True

    def stop(self, patience: float = 10.0) -> None:
        """End the thread after its step; who still waits is told so."""
        with self._changed:
            self._draining = self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(patience)

    def _check_room(self, count: int) -> None:
        if self._draining:
            raise Refusal("the server is about to stop", status=503, code="shutting_down")
        most = self.most_waiting + self.batch.size
        if count > most:
            raise Refusal(f"the request asks for {count} texts at once; this server takes {most} at most")
        free = self.batch.size - len(self._running)
        if self.waiting + count > self.most_waiting + max(free, 0):
            self.metrics.rejected.add()
            raise Refusal(
                f"{self.waiting} texts are waiting, of {self.most_waiting} that may; try again later",
                status=429,
                code="queue_full",
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting or self._running or self._tasks or self._cancelled or self._stopped
                )
                if self._stopped:
                    break
                news = self._let_go()
                joining = self._next()
                task = self._tasks.popleft() if self._tasks else None
            for job in joining:
                news += self._join(job)
            if task is not None:
                _run(*task)
            self._tell(news + self._step())
        self._give_up()

    def _let_go(self) -> list[tuple[Job, Piece]]:
        """Drop what nobody waits for, and what has taken too long."""
        for job in self._cancelled:
            if self._leave(job):
                self.metrics.disconnected.add()
        self._cancelled.clear()
        late = [job for job in (*self._waiting, *self._running.values()) if time.monotonic() > job.deadline]
        news = []
        for job in late:
            waited = job in self._waiting
            self._leave(job)
            error = Refusal("it was not this request's turn in time", status=504, code="timeout")
            news.append((job, Piece(error=error) if waited else job.end("timeout")))
        return news

    def _leave(self, job: Job) -> bool:
        """Take a job out; whether it was there."""
        if self._running.pop(job.text, None) is not None:
            self.batch.leave(job.text)
        elif job in self._waiting:
            self._waiting.remove(job)
        else:
            return False
        return True

    def _next(self) -> list[Job]:
        """Those that get a place now."""
        count = min(len(self._waiting), self.batch.size - len(self._running))
        joining = [self._waiting.popleft() for _ in range(count)]
        for job in joining:
            self._running[job.text] = job
        return joining

    def _join(self, job: Job) -> list[tuple[Job, Piece]]:
        try:
            job.reused = self.batch.join(job.text)
        except Exception as error:
            logger.exception("a text could not join the batch")
            self._running.pop(job.text)
            return [(job, Piece(error=error))]
        self.metrics.tokens.add(job.prompt_tokens, kind="prompt")
        self.metrics.reused.add(job.reused)
        return []

    def _step(self) -> list[tuple[Job, Piece]]:
        if not self._running:
            return []
        start = time.monotonic()
        try:
            decided = self.batch.step()
        except Exception as error:
            logger.exception("a step has failed; its texts end")
            failed = list(self._running.values())
            for job in failed:
                self._leave(job)
            return [(job, Piece(error=error)) for job in failed]
        news = []
        now = time.monotonic()
        for text, inference in decided:
            job = self._running[text]
            try:
                if isinstance(inference, Exception):
                    raise inference
                piece = job.take(inference)
            except Exception as error:
                logger.exception("a text has failed")
                piece = Piece(error=error)
            if job.count == 1:
                self.metrics.first_token.observe(now - job.started)
            if piece is None:
                continue
            news.append((job, piece))
            if piece.last:
                self._leave(job)
                self.metrics.request.observe(now - job.started)
        self.metrics.tokens.add(len(decided), kind="generated")
        self.metrics.steps.add()
        self.metrics.step.observe(now - start)
        return news

    def _tell(self, news: News) -> None:
        if news:
            self.post(news)

    def _give_up(self) -> None:
        error = Refusal("the server has stopped", status=503, code="shutting_down")
        self._tell([(job, Piece(error=error)) for job in (*self._waiting, *self._running.values())])
        for _, future in self._tasks:
            future.set_exception(error)


def _run(task: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(task())
    except Exception as error:
        future.set_exception(error)
