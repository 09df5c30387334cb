"""Abduction from observed text: whose noise would have made the model say this?

At position i a causal decision is argmax_k W_k·(loc_U + T·κ·s⊙ε_i) + b_k with s = scale_U + |b_noise|. The
ε_i for which the observed token wins form a polyhedron. `abduct` projects the origin onto it, walks through
it under the Cauchy prior, and accepts a path only after generate() has replayed it. Where the exogenous
noise is the world's, loc_U + T·κ·(scale_U⊙ε_i + |b_noise|⊙ε'_i) is the same in (ε_i, ε'_i), with W twice side
by side. This module knows decisions and text, not interventions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from causal_qwen.causal_lm import CausalLM
from causal_qwen.counterfactual.evidence import AbductionError, Evidence, NumberEvidence, Walk
from causal_qwen.data import Prompt, encode_text, prompt_batch
from causal_qwen.generation.inferencer import Inferencer
from causal_qwen.generation.settings import resolve
from causal_qwen.heads import exact
from causal_qwen.individual import SEEDS, Individual
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["Abduction", "Noise", "TokenDiagnostics", "abduct"]

# What a counterfactual keeps of an individual: everything, or all but the exogenous noise.
Noise = Literal["kept", "redrawn"]
# The observed token wins by this share of the largest logit: far above what a cache changes by rounding.
MARGIN = 1e-3
# A text whose replay fails is abducted again with a margin this much larger, and at most so often.
MARGIN_GROWTH, ATTEMPTS = 4.0, 5


@dataclass(frozen=True)
class TokenDiagnostics:
    """How much of an individual one observed token reveals.

    Args:
        token: The token's id.
        text: The token as text.
        nearest: Root mean square of the smallest noise that makes it win: 0 where the noise-free cause says
            it.
        margin: By how much its score must exceed every other.
        freedom: Mean share of the prior mass of one coordinate of ε that keeps the token: 1 reveals nothing.
        rival: The token that was closest to winning instead, at the smallest noise.
    """

    token: int
    text: str
    nearest: float
    margin: float
    freedom: float
    rival: int


@dataclass(frozen=True)
class Abduction:
    """Individuals who say the observed text: paths ε under the Cauchy prior, given that its tokens win.

    Args:
        individuals: One per draw, each with an explicit ``path`` (n, D + 1); generate() has replayed every
            one.
        tokens: The n observed ids.
        values: The number at each <NUM> among them, 0 elsewhere.
        settings: temperature, noise_gain and density_floor that a replay needs.
        diagnostics: One per token.
        acceptance: Share of accepted moves. Coordinates of words are drawn from their conditional law, where
            nothing is ever rejected; at a number the move must also suit the number's own noise.
        replayed: Share of replays that gave the observed text; the paths of the others were drawn again.
        effective_draws: draws·(1 − r)/(1 + r), r the lag-one correlation of atan(ε) pooled over all
            coordinates.
        seconds_per_token: Per draw, with start and replay.
    """

    individuals: list[Individual]
    tokens: list[int]
    values: list[float]
    settings: dict[str, float]
    diagnostics: list[TokenDiagnostics]
    acceptance: float
    replayed: float
    effective_draws: float
    seconds_per_token: float


@torch.no_grad()
def abduct(
    model: CausalLM,
    processor: CausalQwen2Processor,
    prompt: Prompt,
    continuation: str | Sequence[int] | Tensor,
    *,
    draws: int = 1,
    sweeps: int = 4,
    seed: int = 0,
    temperature: float = 1.0,
    noise_gain: float | None = None,
    density_floor: float | None = None,
    margin: float = MARGIN,
    values: Sequence[float] | Tensor | None = None,
    noise: Noise = "kept",
) -> Abduction:
    """ε_i ~ truncated Cauchy, given argmax_k W_k·(loc_U + T·κ·s⊙ε_i) + b_k = y_i for each observed y_i.

    One teacher-forced pass infers loc_U and s at every position. The start is the ε of smallest norm for
    which y_i wins; from there coordinates are redrawn one by one from their conditional law, a Cauchy
    truncated to an interval. At a number, ε_Y follows from ε: w·u₁ + b_Y + T·β_Y·ε_Y = g(value).

    The prior is independent per position, the law of an individual with persistence 0. Only ``causal``
    decisions without logits processors (top_k, repetition penalty, …) are inverted, so replay without them,
    and with the result's ``settings``; `counterfactual` does both.

    Args:
        model: Who would have said it.
        processor: Reads prompt and continuation; a number in the continuation is a value unless the
            processor's ``numbers`` is "text".
        prompt: Text or chat messages.
        continuation: The observed text (begin it with its space), or its token ids.
        draws: How many individuals; they are successive states of one walk.
        sweeps: How often each coordinate is redrawn before each draw.
        seed: Of the walk; draw i has the seed ``seed + i`` for what comes after its path.
        temperature: T > 0.
        noise_gain: κ; the model's by default.
        density_floor: Truncation, |ε_j| ≤ √(1/floor − 1); the model's by default.
        margin: By which share of the largest logit the observed token wins; raised where a replay fails.
        values: Numbers of a continuation that is given as ids, 0 where it has none.
        noise: "kept": one ε explains the text. "redrawn": ε of the individual and ε' of the world that it
            was in explain it together, two independent draws; then a counterfactual with redrawn noise keeps
            no more of the individual than the text reveals. Takes a second copy of W.

    Raises:
        AbductionError: If a token cannot be reached, or a replay does not give the observed text.
        ValueError: If an argument is out of range.
    """
    if draws < 1 or sweeps < 0:
        raise ValueError(f"draws is {draws!r}, sweeps {sweeps!r}; draw at least once, with 0 sweeps or more")
    if noise not in get_args(Noise):
        raise ValueError(f"noise is {noise!r:.80}; choose one of {', '.join(get_args(Noise))}")
    began = time.perf_counter()
    settings: dict[str, float] = {
        "temperature": float(temperature),
        **resolve(model, noise_gain=noise_gain, density_floor=density_floor),
    }
    if not (0 < settings["temperature"] < math.inf and 0 < settings["noise_gain"] < math.inf):
        raise ValueError(
            f"temperature is {temperature!r}, noise_gain {settings['noise_gain']!r}; without noise there is "
            "nothing to abduct: both must be above 0"
        )
    inputs = prompt_batch(processor, [prompt], model.device)
    tokens, numbers = _observed(model, processor, continuation, values)
    size = len(tokens)
    evidence = _evidence(model, processor, inputs, tokens, numbers, settings, noise)

    individuals: list[Individual] = []
    statistics: list[Walk] = []
    failures = 0
    for attempt in range(ATTEMPTS):
        missing = draws - len(individuals)
        generator = np.random.default_rng([seed, attempt])
        walk = evidence.walk(
            missing,
            sweeps,
            generator,
            margin=margin * MARGIN_GROWTH**attempt,
            floor=settings["density_floor"],
        )
        statistics.append(walk)
        for path in walk.paths:
            person = _person((seed + len(individuals)) % SEEDS, torch.from_numpy(path), noise)
            if _replays(model, inputs, tokens, numbers, person, settings):
                individuals.append(person)
            else:
                failures += 1
        if len(individuals) == draws:
            break
    else:
        raise AbductionError(
            f"{draws - len(individuals)} of {draws} paths do not replay even with a margin of "
            f"{margin * MARGIN_GROWTH ** (ATTEMPTS - 1):.2g}: the model's arithmetic is too coarse; "
            "try float32"
        )
    first = statistics[0]
    diagnostics = [
        TokenDiagnostics(
            token,
            processor.tokenizer.decode([token]),
            nearest=float(first.nearest[index]),
            margin=float(first.margins[index]),
            freedom=float(first.freedom[index]),
            rival=int(first.rivals[index]),
        )
        for index, token in enumerate(tokens)
    ]
    return Abduction(
        individuals,
        tokens,
        numbers,
        settings,
        diagnostics,
        acceptance=first.acceptance,
        replayed=draws / (draws + failures),
        effective_draws=_effective(np.stack([_path(person) for person in individuals])),
        seconds_per_token=(time.perf_counter() - began) / (size * draws),
    )


def _evidence(
    model: CausalLM,
    processor: CausalQwen2Processor,
    inputs: Mapping[str, Tensor],
    tokens: list[int],
    values: list[float],
    settings: Mapping[str, float],
    noise: Noise,
) -> Evidence:
    """One teacher-forced pass over prompt and continuation."""
    device = inputs["input_ids"].device
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens], device=device)], dim=1)  # (1, T + n)
    batch: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    is_number = ids == (-1 if model.config.num_token_id is None else model.config.num_token_id)
    if is_number.any():
        observed = torch.tensor([values], dtype=torch.float64, device=device)
        batch["numeric_values"] = torch.cat([inputs["numeric_values"].to(observed), observed], dim=1)
    outputs = model(**batch, logits_to_keep=len(tokens) + 1, output_logits=False)
    U = outputs.U[0, :-1].to(torch.float32)  # (n, D)
    loc, scale = U.loc, model.action.exogenous(U).scale
    weight, w = model.lm_head.weight.detach(), model.action.number.weight[0].detach()  # (V, D), (D,)
    if noise == "redrawn":  # scale_U⊙ε and |b_noise|⊙ε' side by side
        loc = torch.cat([loc, torch.zeros_like(loc)], dim=-1)  # (n, 2D)
        scale = torch.cat([U.scale, scale - U.scale], dim=-1)
        weight, w = weight.repeat(1, 2), w.repeat(2)
    spread = settings["temperature"] * scale  # (n, D) or (n, 2D), T·s
    names = [
        f"token {index} of the continuation, {processor.tokenizer.decode([token])!r} (id {token}),"
        for index, token in enumerate(tokens)
    ]
    numbers: dict[int, NumberEvidence] = {}
    read_out = abs(model.action.number_noise.item()) * settings["temperature"]
    for index, token in enumerate(tokens):
        if token != model.config.num_token_id:
            continue
        if not model.writes_numbers:
            continue  # <NUM> cannot win: refused for that, by its geometry
        if read_out == 0:
            raise AbductionError(
                f"{names[index]} is the number {values[index]!r}, and this model's numbers have no read-out "
                "noise (β_Y = 0) that could account for an exact value"
            )
        target = model.value_space.encode(torch.tensor(values[index], dtype=torch.float64)).item()
        rest = target - float(w.double() @ loc[index].double()) - model.action.number.bias.item()
        numbers[index] = NumberEvidence(
            (w.double() * spread[index].double() / read_out).cpu().numpy(), rest / read_out
        )
    return Evidence(
        weight,
        exact(model.action.bias.detach()).float(),
        loc,
        settings["noise_gain"] * spread,
        torch.tensor(tokens, device=device),
        numbers,
        names,
        settings["temperature"],
    )


def _person(seed: int, path: Tensor, noise: Noise) -> Individual:
    """Who has this path, (n, D + 1) with ε_Y last, or (n, 2D + 1) with the noise of a world beside it."""
    if noise == "kept":
        return Individual(seed, path=path)
    size = path.shape[1] // 2
    read_out = path[:, -1:]
    own, world = (torch.cat([part, read_out], dim=1) for part in path[:, :-1].split(size, dim=1))
    return Individual(seed, path=own, world=0, world_path=world)


def _observed(
    model: CausalLM,
    processor: CausalQwen2Processor,
    continuation: str | Sequence[int] | Tensor,
    values: Sequence[float] | Tensor | None,
) -> tuple[list[int], list[float]]:
    """Ids and values of the continuation, (n,) each."""
    if isinstance(continuation, str):
        tokens, numbers = encode_text(processor, continuation, begins=False, numbers=processor.written_as)
    else:
        tokens = [int(token) for token in continuation]
        numbers = [0.0] * len(tokens) if values is None else [float(value) for value in values]
    if not tokens:
        raise ValueError("the continuation is empty; observe at least one token")
    if len(numbers) != len(tokens):
        raise ValueError(f"{len(numbers)} values for {len(tokens)} tokens; they are aligned, one per token")
    outside = [token for token in tokens if not 0 <= token < model.config.vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {model.config.vocab_size}")
    ends = _ends(model)
    early = [index for index, token in enumerate(tokens[:-1]) if token in ends]
    if early:
        raise AbductionError(
            f"token {early[0]} of the continuation ends the text, where generation stops, yet "
            f"{len(tokens) - 1 - early[0]} more follow"
        )
    return tokens, numbers


def _ends(model: CausalLM) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def _replays(
    model: CausalLM,
    inputs: Mapping[str, Tensor],
    tokens: list[int],
    values: list[float],
    person: Individual,
    settings: Mapping[str, float],
) -> bool:
    """Whether the individual, decided step by step, says the observed text."""
    options: dict[str, Any] = {**settings, "individual": person}
    prompt = {name: inputs[name] for name in ("attention_mask", "numeric_values")}
    inferences = Inferencer(model, "causal", **options).steps(inputs["input_ids"], len(tokens), **prompt)
    for inference, token, value in zip(inferences, tokens, values, strict=True):
        if inference.tokens.item() != token:
            return False
        if token == model.config.num_token_id:
            pair = torch.stack([inference.choice.values[0].cpu(), torch.tensor(value, dtype=torch.float64)])
            spoken, observed = model.value_space.encode(pair).tolist()
            if abs(spoken - observed) > 1e-4 * (1 + abs(observed)):
                return False
    return True


def _path(person: Individual) -> npt.NDArray[np.float32]:
    assert person.path is not None
    return person.path.numpy()


def _effective(paths: npt.NDArray[np.float32]) -> float:
    """draws·(1 − r)/(1 + r) for paths (draws, n, D + 1), r the pooled lag-one correlation of their angles.

    Angles, because the noise itself has no variance; around 0, the prior's median, so that what the text
    fixes counts as correlation and the figure errs on the low side.
    """
    draws = len(paths)
    if draws == 1:
        return 1.0
    angles = np.arctan(paths[..., :-1].astype(np.float64))
    power = float(np.square(angles).mean())
    lagged = float((angles[1:] * angles[:-1]).mean())
    correlation = min(max(lagged / power, 0.0), 1.0) if power > 0 else 1.0
    return max(draws * (1 - correlation) / (1 + correlation), 1.0)
