"""Many texts at a time, of which each begins and ends when it likes: continuous batching.

A `Text` is what generate() would continue alone: prompt, decision, processors. It joins a batch, gets its
next token at most steps, and leaves. In a `NativeBatch` texts share each read of the weights, and yet what is
said in one depends on nothing in the others, bit for bit. `SingleBatch` continues one text by the model
itself, where our engine does not run. This module knows neither words nor when a text ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from causal_qwen.context import check_context
from causal_qwen.decoder.cache import KVCache
from causal_qwen.decoder.engine import Engine
from causal_qwen.generation.decisions import Choice, Decision, choose_together
from causal_qwen.generation.loop import Inference, Texts, steps
from causal_qwen.generation.native import NativeCauses, NativeFeatures
from causal_qwen.generation.protocol import CausalModel, Processors
from causal_qwen.generation.readout import Answer, Question, ReadOut
from causal_qwen.generation.stepping import Causes, TransformersStepper
from causal_qwen.kernels.native import LARGEST_NATIVE

__all__ = ["Batch", "NativeBatch", "SingleBatch", "Text", "prepared"]

# Tokens of prompts that a step reads at least while others wait for their next token.
LEAST_OF_PROMPTS = 16
# Prompts that have left whose beginnings may be used again: how many, and how long they may be.
KEPT, LONGEST_KEPT = 8, 1024
# Beginnings shorter than this are not worth a copy.
SHORTEST_SHARED = 8


@dataclass(eq=False)
class Text:
    """One text to be continued, as generate() has prepared it.

    Args:
        texts: The prompt, one row; it grows.
        decision: With an individual, where noise is drawn.
        processors: Of its own: some remember.
        max_new_tokens: Room that is kept for it.
        keeps_logits: Whether every `Choice` of it must have its logits.
        position: How many tokens have been decided.
    """

    texts: Texts
    decision: Decision
    processors: Processors
    max_new_tokens: int
    keeps_logits: bool = False
    position: int = field(default=0, init=False)


def prepared(
    model: CausalModel, inputs: dict[str, Tensor], options: dict[str, Any], *, max_new_tokens: int
) -> Text:
    """The text that ``model.generate(**inputs, **options)`` would continue; nothing is computed yet.

    Args:
        model: Its generate() prepares: settings, processors and checks are those of a call.
        inputs: ``input_ids`` and ``numeric_values``, (1, T), without padding.
        options: For generate().
        max_new_tokens: Room that is kept.

    Raises:
        ValueError: If an option is wrong, or the context has no room.
    """

    def keep(
        _: CausalModel,
        input_ids: Tensor,
        processors: Processors,
        *rest: Any,
        decision: Decision,
        **model_kwargs: Any,
    ) -> Text:
        texts = Texts(input_ids, model_kwargs.get("numeric_values"), num_token_id=model.config.num_token_id)
        return Text(texts, decision, processors, max_new_tokens)

    check_context(model.config.max_position_embeddings, inputs["input_ids"].shape[1], max_new_tokens)
    # Their ends are the caller's to watch, who asks for one more token at a time.
    text: Text = model.generate(
        **inputs, **options, max_new_tokens=max_new_tokens, return_dict_in_generate=True, loop=keep
    )
    return text


class Batch(Protocol):
    """Texts that are continued together."""

    size: int

    def join(self, text: Text) -> int:
        """Take one more; how many tokens of its prompt need not be read again."""
        ...

    def leave(self, text: Text) -> None:
        """Let one go, whether it is done or not."""
        ...

    def step(self) -> list[tuple[Text, Inference | Exception]]:
        """One step: what was decided, for those that got a token; or why one cannot go on."""
        ...


class _Beginning(NamedTuple):
    """Tokens and values (T,) whose keys and values are in a cache."""

    ids: Tensor
    values: Tensor
    cache: KVCache


class _Row:
    """A text in a `NativeBatch`, its cache, and what its next step reads, (T, H)."""

    def __init__(self, text: Text, cache: KVCache, unread: Tensor) -> None:
        self.text, self.cache, self.unread = text, cache, unread

    def beginning(self) -> _Beginning:
        """What the cache holds."""
        ids, values = self.text.texts.ids[0], self.text.texts.numbers[0]
        values = torch.zeros(len(ids), dtype=torch.float64) if values is None else values[0]
        return _Beginning(ids[: self.cache.length], values[: self.cache.length], self.cache)


class NativeBatch:
    """Texts on the native engine: a step reads the next token of each, and some tokens of new prompts.

    Args:
        model: Whose heads decide.
        engine: Made from it.
        size: Most texts at a time.

    Raises:
        ValueError: If the engine was made from another model, or the size is not in reach of native code.
    """

    def __init__(self, model: CausalModel, engine: Engine, size: int = 16) -> None:
        if not 1 <= size <= LARGEST_NATIVE:
            raise ValueError(f"the batch has {size} texts; choose 1 to {LARGEST_NATIVE}")
        self.size = size
        self._features, self._engine = NativeFeatures(model, engine), engine
        self._causes, self._readout = NativeCauses(model), ReadOut(model, engine.weights.head)
        self._rows: dict[Text, _Row] = {}
        self._kept: deque[_Beginning] = deque(maxlen=KEPT)

    @torch.no_grad()
    def join(self, text: Text) -> int:
        """As in `Batch`."""
        ids, values = text.texts.ids, text.texts.numbers[0]
        cache = self._engine.new_cache(1, ids.shape[1] + max(text.max_new_tokens, 1) - 1)
        shared = self._begin(cache, ids[0], values)
        self._rows[text] = _Row(text, cache, self._features.embed(ids, values)[0, shared:])
        return shared

    def leave(self, text: Text) -> None:
        """As in `Batch`."""
        row = self._rows.pop(text, None)
        if row is not None and SHORTEST_SHARED <= row.cache.length <= LONGEST_KEPT:
            self._kept.append(row.beginning())

    @torch.no_grad()
    def step(self) -> list[tuple[Text, Inference | Exception]]:
        """As in `Batch`."""
        portions = self._portions()
        if not portions:
            return []
        pieces = [row.unread[:count] for row, count in portions]
        counts = [count for _, count in portions]
        features = self._engine.extend(torch.cat(pieces), [row.cache for row, _ in portions], counts)
        ready, last = [], []
        for (row, count), own in zip(portions, features.split(counts), strict=True):
            row.unread = row.unread[count:]
            if not len(row.unread):
                ready.append(row)
                last.append(own[-1])
        return self._decided(ready, torch.stack(last)) if ready else []

    def _portions(self) -> list[tuple[_Row, int]]:
        """How many tokens each row reads: a running text its one, prompts what is left, first come first."""
        running = sum(len(row.unread) == 1 for row in self._rows.values())
        room = max(LARGEST_NATIVE - running, LEAST_OF_PROMPTS)
        portions = []
        for row in self._rows.values():
            count = 1 if len(row.unread) == 1 else min(len(row.unread), room)
            room -= count if len(row.unread) > 1 else 0
            if count:
                portions.append((row, count))
        return portions

    def _decided(self, rows: Sequence[_Row], features: Tensor) -> list[tuple[Text, Inference | Exception]]:
        causes, texts = self._causes.each(features), [row.text for row in rows]
        choices = choose_together(
            self._readout,
            [self._deciding(text, own) for text, own in zip(texts, causes, strict=True)],
        )
        return [
            (row.text, self._appended(row, own, choice))
            for row, own, choice in zip(rows, causes, choices, strict=True)
        ]

    def _deciding(self, text: Text, causes: Causes) -> Generator[Question, Answer, Choice | Exception]:
        """The decision of one text; what goes wrong in it ends it, and no other."""
        try:
            choice = yield from text.decision.deciding(
                self._readout, causes, text.texts.ids, text.position, text.processors
            )
            if text.keeps_logits and choice.logits is None:
                (logits,) = yield Question("logits", (causes.U.loc,))
                choice = replace(choice, logits=logits)
        except Exception as error:
            return error
        return choice

    def _appended(self, row: _Row, causes: Causes, choice: Choice | Exception) -> Inference | Exception:
        """The text with its new token, which the next step reads."""
        if isinstance(choice, Exception):
            return choice
        try:
            tokens = row.text.texts.append(choice)
        except Exception as error:
            return error
        row.text.position += 1
        values = row.text.texts.numbers[0]
        row.unread = self._features.embed(tokens[None], None if values is None else values[:, -1:])[0]
        return Inference(causes.U, causes.U0, choice, tokens, self._readout)

    def _begin(self, cache: KVCache, ids: Tensor, values: Tensor | None) -> int:
        """Fill the cache with the longest beginning that another text shares; its length.

        The last token is always read: what follows is decided by its features.
        """
        own = torch.zeros(len(ids), dtype=torch.float64) if values is None else values[0]
        longest, source = SHORTEST_SHARED - 1, None
        for other in [*(row.beginning() for row in self._rows.values()), *self._kept]:
            most = min(len(ids) - 1, len(other.ids))
            same = (ids[:most] == other.ids[:most]) & (own[:most] == other.values[:most].to(own))
            length = most if bool(same.all()) else int(same.to(torch.int8).argmin())
            if length > longest:
                longest, source = length, other
        if source is None:
            return 0
        cache.repeat(source.cache, longest)
        return longest


class SingleBatch:
    """One text at a time, by the model itself.

    Args:
        model: On any device.
    """

    size = 1

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._text: Text | None = None

    def join(self, text: Text) -> int:
        """As in `Batch`."""
        stepper = TransformersStepper(self._model, attention_mask=torch.ones_like(text.texts.ids))
        self._text = text
        self._steps: Iterator[Inference] = steps(stepper, text.decision, text.texts, text.processors)
        return 0

    def leave(self, text: Text) -> None:
        """As in `Batch`."""
        if text is self._text:
            self._text = None
            del self._steps

    @torch.no_grad()
    def step(self) -> list[tuple[Text, Inference | Exception]]:
        """As in `Batch`."""
        if self._text is None:
            return []
        inference = next(self._steps)
        self._text.position += 1
        if self._text.keeps_logits and inference.choice.logits is None:
            logits = inference.readout.logits(inference.U.loc)
            inference = replace(inference, choice=replace(inference.choice, logits=logits))
        return [(self._text, inference)]
