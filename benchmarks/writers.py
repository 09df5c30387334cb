"""Texts by many writers, for benchmarks that ask what individuals are good for.

A writer is a setting (softmax, Gumbel noise tied to positions, or individuals) and a seed. All of them write
on the native engine, in 4 bits, which the embedded base loses nothing by; special tokens are never written,
so that every text has its full length. This module does not know what is asked of the texts.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from causal_qwen import Cauchy, Engine, Individual
from causal_qwen.conversion import load_model
from causal_qwen.decoder import KVCache
from causal_qwen.generation import Causes, Decision, NativeStepper, Texts, steps
from causal_qwen.kernels.native import LARGEST_NATIVE

NEVER = -1e4  # bias of special tokens
PROMPTS = (
    "The old man walked slowly down to the harbour and",
    "In order to bake a good loaf of bread, you",
    "Scientists have discovered that the surface of the planet",
    "My sister called me yesterday because",
    "The main advantage of public transport is",
    "When the first railway reached the town,",
    "Dear neighbours, we would like to",
    "A good friend is someone who",
    "The recipe for happiness, according to the author,",
    "During the long winter nights, the children",
    "Water freezes at zero degrees, but",
    "The teacher opened the window and said:",
    "There are three reasons why",
    "On the morning of the race,",
    "Most people do not know that bees",
    "The bridge was closed for repairs, so",
    "If you ever visit the mountains in autumn,",
    "The museum has a small room where",
    "After the storm had passed, the farmer",
    "Learning to play an instrument",
    "The letter that arrived on Monday",
    "A city without trees",
    "Before you buy a used car,",
    "The doctor looked at the results and",
    "In the middle of the forest there was",
    "What surprised me most about the book was",
    "The history of glass begins",
    "Every evening at six o'clock,",
    "It is often said that money",
    "The captain of the team explained that",
    "Our cat has a strange habit:",
    "To keep a garden healthy in summer,",
    "The first time I saw the sea,",
    "Engineers who build bridges",
    "At the end of the street stands",
    "The internet has changed the way",
    "She had never told anyone about",
    "The market opens early, and",
    "Sleep is important because",
    "Many languages have a word for",
)


@dataclass(frozen=True)
class Setting:
    """How texts are written.

    Args:
        family: "softmax" (a draw per token), "gumbel" (one Gumbel vector per seed and position), "arithmetic"
            (a code per text) or "individual".
        temperature: T.
        persistence: ρ of individuals.
        codes: Of arithmetic sampling, one in [0, 1) per text.
    """

    family: str
    temperature: float = 1.0
    persistence: float | None = None
    codes: tuple[float, ...] = ()

    def __str__(self) -> str:
        persistence = "" if self.persistence is None else f", ρ = {self.persistence:g}"
        return f"{self.family}, T = {self.temperature:.2g}{persistence}"


class Written(NamedTuple):
    """Texts (N, T) as token ids, and the nats of each token under the base, (N, T), or (N, 0) unscored."""

    ids: Tensor
    nats: Tensor


class GumbelNoise(LogitsProcessor):
    """logits/T + G, whose argmax is a draw from softmax(logits/T): one G per (seed, position, token).

    Args:
        seeds: One per row.
        temperature: T.
        start: Length of the prompts, behind which positions are counted.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, start: int) -> None:
        self.seeds, self.temperature, self.start = list(seeds), temperature, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V), of the position behind ``input_ids`` (B, T)."""
        position = input_ids.shape[1] - self.start
        noise = {seed: gumbel(seed, position, scores.shape[1]) for seed in set(self.seeds)}
        return scores / self.temperature + torch.stack([noise[seed] for seed in self.seeds])


class ArithmeticCodes(LogitsProcessor):
    """Only the token in whose part of softmax(logits/T) a text's code lies; where in that part decides the
    next one.

    Args:
        codes: (B,) in [0, 1), float64.
        temperature: T.
    """

    def __init__(self, codes: Tensor, temperature: float) -> None:
        self.codes, self.temperature = codes[:, None], temperature  # (B, 1)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V): 0 at the token, −inf elsewhere."""
        prob = (scores.double() / self.temperature).softmax(-1)
        ends = prob.cumsum(-1)
        tokens = torch.searchsorted(ends, self.codes, right=True).clamp(max=prob.shape[1] - 1)  # (B, 1)
        width = prob.gather(1, tokens)
        self.codes = ((self.codes - ends.gather(1, tokens) + width) / width).clamp(0, 1 - 2.0**-53)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def gumbel(seed: int, position: int, size: int) -> Tensor:
    """−log(−log r), (size,), from a counter-based generator."""
    bits = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=[0, position, 0, 0])
    uniform = np.random.Generator(bits).random(size) + 2.0**-54  # neither 0 nor 1
    return torch.from_numpy(-np.log(-np.log(uniform))).float()


class _Reread(NativeStepper):
    """Reads its prompts once, however many writers continue them."""

    _start: tuple[Causes, KVCache] | None = None

    def prefill(self, input_ids: Tensor, numeric_values: Tensor | None) -> Causes:
        """As in `Stepper`."""
        if self._start is None:
            self._start = super().prefill(input_ids, numeric_values), self._cache
        causes, cache = self._start
        self._cache = copy.deepcopy(cache)
        return causes


class Writers:
    """The base as a causal model on the engine.

    Args:
        base: Embedded base, directory or hub id.
        prompts: Continued by every writer.
    """

    def __init__(self, base: str, prompts: Sequence[str] = PROMPTS) -> None:
        self.model, processor = load_model(base)
        self.tokenizer = processor.tokenizer
        with torch.no_grad():
            self.model.action.bias[self.tokenizer.all_special_ids] = NEVER
        self.engine = Engine.from_model(self.model, precision="int4")
        self.prompts = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
        self._steppers: dict[tuple[tuple[int, ...], int], tuple[_Reread, Tensor]] = {}

    def write(
        self,
        setting: Setting,
        rows: Sequence[tuple[int, Individual | int]],
        tokens: int,
        *,
        scored: bool = True,
    ) -> Written:
        """One text per row: a prompt's index, and who writes, an individual or a seed; ``scored`` by nats."""
        batches = [slice(first, first + LARGEST_NATIVE) for first in range(0, len(rows), LARGEST_NATIVE)]
        parts = [
            self._batch(replace(setting, codes=setting.codes[batch]), rows[batch], tokens, scored)
            for batch in batches
        ]
        return Written(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    @torch.no_grad()
    def _batch(
        self, setting: Setting, rows: Sequence[tuple[int, Individual | int]], tokens: int, scored: bool
    ) -> Written:
        stepper, ids = self._read(tuple(prompt for prompt, _ in rows), tokens)
        decision, processors = self._decision(setting, [writer for _, writer in rows], ids.shape[1])
        texts = Texts(ids, num_token_id=self.model.config.num_token_id)
        nats = [torch.zeros(len(rows), 0)]
        for inference in itertools.islice(steps(stepper, decision, texts, processors), tokens):
            if not scored:
                continue
            logits = inference.choice.logits
            logits = inference.readout.logits(inference.U.loc) if logits is None else logits  # (B, V)
            chosen = logits.gather(1, inference.tokens[:, None])
            nats.append(logits.logsumexp(-1, keepdim=True) - chosen)
        return Written(texts.ids[:, ids.shape[1] :], torch.cat(nats, dim=1))

    def _read(self, prompts: tuple[int, ...], tokens: int) -> tuple[_Reread, Tensor]:
        """A stepper for these prompts, and their ids (B, T), padded on the left."""
        if (prompts, tokens) not in self._steppers:
            texts = [self.prompts[prompt] for prompt in prompts]
            start = max(map(len, texts))
            ids = torch.tensor([[0] * (start - len(text)) + text for text in texts])  # (B, T)
            lengths = torch.tensor([len(text) for text in texts])
            mask = (torch.arange(start) >= start - lengths[:, None]).long()  # (B, T)
            stepper = _Reread(self.model, self.engine, mask, max_length=start + tokens)
            self._steppers = {(prompts, tokens): (stepper, ids)}
        return self._steppers[prompts, tokens]

    def _decision(
        self, setting: Setting, who: Sequence[Individual | int], start: int
    ) -> tuple[Decision, LogitsProcessorList]:
        config = self.model.config
        if setting.family == "individual":
            people = functools.cache(Individual)
            noise: dict[str, Any] = {
                "noise_gain": config.noise_gain, "density_floor": config.density_floor,
                "persistence": config.persistence if setting.persistence is None else setting.persistence,
                "individuals": [one if isinstance(one, Individual) else people(one) for one in who],
            }  # fmt: skip
            decision = Decision("causal", do_sample=True, temperature=setting.temperature, **noise)
            return decision, LogitsProcessorList()
        seeds = [one.seed if isinstance(one, Individual) else one for one in who]
        if setting.family == "gumbel":
            processors = [GumbelNoise(seeds, setting.temperature, start)]
            return Decision("compatible", hide_num=True), LogitsProcessorList(processors)
        if setting.family == "arithmetic":
            codes = torch.tensor(setting.codes, dtype=torch.float64)
            processors = [ArithmeticCodes(codes, setting.temperature)]
            return Decision("compatible", hide_num=True), LogitsProcessorList(processors)
        torch.manual_seed(seeds[0])
        temperature = LogitsProcessorList([TemperatureLogitsWarper(setting.temperature)])
        return Decision("compatible", do_sample=True, hide_num=True), temperature

    @torch.no_grad()
    def causes(self) -> Causes:
        """The laws behind each prompt: U (P, D) and U₀ (P,)."""
        count = len(self.prompts)
        batches = [range(i, min(i + LARGEST_NATIVE, count)) for i in range(0, count, LARGEST_NATIVE)]
        parts = [stepper.prefill(ids, None) for stepper, ids in (self._read(tuple(b), 1) for b in batches)]
        return Causes(*(Cauchy.cat(laws) for laws in zip(*parts, strict=True)))

    def texts(self, ids: Tensor) -> list[str]:
        """As a reader sees them."""
        return self.tokenizer.batch_decode(ids)
