"""Sets of individuals: who to ask, when an average over several is wanted.

Independent individuals are the plain choice. A stratified set is chosen from a pool of them, so that first
tokens come up as often as they are likely to. Every scheme is fair: anybody of the law is as likely to be in
the set as anybody else, so averages estimate the same. This module knows how a first token is decided, not
what is done with a set.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy
from causal_qwen.causal_lm import CausalLM
from causal_qwen.data import Prompt, prompt_batch
from causal_qwen.generation.readout import ReadOut
from causal_qwen.generation.settings import resolve
from causal_qwen.heads import exact
from causal_qwen.individual import SEEDS, Individual
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["Scheme", "by_first_token", "individuals", "stratified"]

Scheme = Literal["independent", "antithetic", "stratified"]
POOL = 32  # candidates per individual of a stratified set
TOKENS = 256  # favourites of the prompt among which a candidate's first token is looked for


def individuals(
    count: int,
    scheme: Scheme = "independent",
    *,
    seed: int = 0,
    persistence: float | None = None,
    model: CausalLM | None = None,
    processor: CausalQwen2Processor | None = None,
    prompt: Prompt | None = None,
    temperature: float = 1.0,
) -> list[Individual]:
    """A set of individuals; the same arguments give the same set.

    Args:
        count: How many.
        scheme: "independent"; "antithetic": pairs of an individual and its mirror image; or "stratified": one
            of each of ``count`` equal parts of a pool, which is ordered by what its members would say first.
        seed: Of the first candidate; the others follow it.
        persistence: ρ; None leaves it to the model.
        model: Who will be asked; only for "stratified".
        processor: Its processor; only for "stratified".
        prompt: What they will be asked: the set is balanced for this one; only for "stratified".
        temperature: At which they will be asked; only for "stratified".

    Raises:
        ValueError: If there is no such scheme or set, or what "stratified" needs is missing.
    """
    if count < 1:
        raise ValueError(f"count is {count!r}; ask at least one individual")
    Individual(seed, persistence)  # or it says what is wrong
    if scheme not in get_args(Scheme):
        raise ValueError(f"scheme is {scheme!r:.80}; choose one of {', '.join(get_args(Scheme))}")
    if scheme == "independent":
        return _following(seed, count, persistence)
    if scheme == "antithetic":
        pairs = [(one, one.antithetic()) for one in _following(seed, (count + 1) // 2, persistence)]
        return [one for pair in pairs for one in pair][:count]
    if model is None or processor is None or prompt is None:
        raise ValueError(
            "scheme='stratified' balances what is said first: pass model=, processor= and prompt="
        )
    inputs = prompt_batch(processor, [prompt], model.device)
    with torch.no_grad():
        outputs = model(**inputs, logits_to_keep=1, output_logits=False)
    U = outputs.U[0, -1:].to(torch.float32)  # (1, D)
    settings = resolve(model, noise_gain=None, density_floor=None, persistence=None)
    gain = temperature * settings.pop("noise_gain")
    pool = _following(seed, count * POOL, persistence)
    noise = torch.stack([one.noise(0, U.loc.shape[-1], **settings)[:-1] for one in pool])  # (N, D)
    return [pool[index] for index in stratified(by_first_token(model, U, noise, gain=gain), count, seed)]


def stratified(order: list[int], count: int, seed: int) -> list[int]:
    """One of each of ``count`` equal parts of ``order``, in random order: all are equally likely.

    Args:
        order: A multiple of ``count`` of candidates, neighbours alike.
        count: How many to choose.
        seed: Of the choice.
    """
    generator = np.random.default_rng(seed)
    size = len(order) // count
    places = np.arange(count) * size + generator.integers(size, size=count)
    return [order[place] for place in generator.permutation(places)]


def _following(seed: int, count: int, persistence: float | None) -> list[Individual]:
    return [Individual((seed + index) % SEEDS, persistence) for index in range(count)]


@torch.no_grad()
def by_first_token(model: CausalLM, U: Cauchy, noise: Tensor, *, gain: float) -> list[int]:
    """Indices of candidates by what they would say first, then by what would be second, then by its distance.

    Args:
        model: Who decides.
        U: The law behind the first token, (1, D).
        noise: ε of each candidate there, (N, D).
        gain: T·κ.
    """
    readout = ReadOut(model)
    logits, tokens = readout.logits(U.loc)[0].topk(min(TOKENS, model.config.vocab_size))  # (K,)
    moves = (U.scale + readout.noise) * noise.to(U.loc.device)  # (N, D)
    scores = torch.addmm(logits, moves, exact(model.lm_head.weight[tokens]).T, alpha=gain)  # (N, K)
    (first, second), best = (part.T.cpu().numpy() for part in scores.topk(2))
    order: list[int] = np.lexsort((second - first, best[1], best[0])).tolist()
    return order
