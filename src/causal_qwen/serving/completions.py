"""Texts in OpenAI's shapes, whole or as they grow."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from causal_qwen.individual import Individual
from causal_qwen.serving.jobs import Job, Piece, Token, number_body

__all__ = ["Reply", "individual_body", "usage_body"]


def individual_body(person: Individual | None) -> dict[str, Any] | None:
    """Who spoke, without a path: the client that gave one has it."""
    if person is None:
        return None
    return {"seed": person.seed, "persistence": person.persistence, "start": person.start}


def usage_body(prompt_tokens: int, jobs: Sequence[Job]) -> dict[str, int]:
    """How many tokens were read and generated."""
    generated = sum(job.count for job in jobs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
    }


@dataclass
class Reply:
    """The answer to a request, choice by choice.

    Args:
        model: Its name.
        fingerprint: Of the model.
        mode: Of inference.
        chat: Whether it answers messages.
        people: Who speaks each choice; None where nothing is sampled.
        logprobs: Whether they were asked for.
    """

    model: str
    fingerprint: str
    mode: str
    chat: bool
    people: Sequence[Individual | None]
    logprobs: bool
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: dict[str, int]) -> dict[str, Any]:
        """All choices, of all their pieces."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._choice(index, own) for index, own in enumerate(pieces)]
        return self._head(kind) | {"choices": choices, "usage": usage}

    def opening(self, index: int) -> dict[str, Any]:
        """The first event of a choice: who speaks."""
        said: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}} if self.chat else {"text": ""}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": None, "numbers": []}
        return self._chunk([choice | {"individual": individual_body(self.people[index])}])

    def event(self, index: int, piece: Piece) -> dict[str, Any]:
        """What a piece adds."""
        said: dict[str, Any] = {"text": piece.text}
        if self.chat:
            said = {"delta": {"content": piece.text} if piece.text else {}}
        choice = {
            "index": index,
            **said,
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": piece.finish,
            "numbers": [number_body(number) for number in piece.numbers],
        }
        return self._chunk([choice])

    def usage_event(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last event, where it is asked for."""
        return self._chunk([]) | {"usage": usage}

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        said: dict[str, Any] = {"text": text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {
            "index": index,
            **said,
            "logprobs": self._logprobs([token for piece in pieces for token in piece.tokens]),
            "finish_reason": pieces[-1].finish,
            "numbers": [number_body(number) for piece in pieces for number in piece.numbers],
            "individual": individual_body(self.people[index]),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "inference_mode": self.mode,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else "text_completion") | {"choices": choices}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.logprobs or not tokens:
            return None
        if self.chat:
            content = [
                _entry(token.text, token.logprob) | {"top_logprobs": [_entry(*one) for one in token.top]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [max(token.logprob, -9999.0) for token in tokens],
            # Of tokens with the same text, such as halves of characters, the likeliest is told.
            "top_logprobs": [dict(reversed(token.top)) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": [*text.encode("utf-8", "replace")]}
