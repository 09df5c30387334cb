"""Abduction from observed text: whose noise would have made the model say this?

At position i a causal decision is argmax_k W_k·(loc_U + T·κ·s⊙ε_i) + b_k with s = scale_U + |b_noise|. The
ε_i for which the observed token wins form a polyhedron. `abduct` projects the origin onto it, walks through
it under the Cauchy prior, and accepts a path only after generate() has replayed it. This module knows
decisions and text, not interventions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.cauchy import magnitude, standard_draw, truncation_bound
from causal_qwen.heads import exact
from causal_qwen.individual import SEEDS, Individual

if TYPE_CHECKING:
    from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
    from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = [
    "Abduction",
    "AbductionError",
    "Prompt",
    "TokenDiagnostics",
    "abduct",
    "encode_prompt",
    "unprocessed",
]

Array = npt.NDArray[np.float64]
Prompt = str | Sequence[Mapping[str, Any]]

# The observed token wins by this share of the largest logit: far above what a cache changes by rounding.
MARGIN = 1e-3
# A text whose replay fails is abducted again with a margin this much larger, and at most so often.
MARGIN_GROWTH, ATTEMPTS = 4.0, 5
# Where the margin cannot be had, smaller ones are tried before a token is refused.
MARGIN_SHARES = (1.0, 0.1, 0.01)
# Paths keep clear of the truncation bound by more than float32 rounds.
INSIDE = 1.0 - 1e-6
# Columns of W that one block of moves reads, rows of W that one product reads, scores that exist at one time.
BLOCK_COLUMNS, BLOCK_ROWS, LARGEST_SCORES = 8, 8192, 1 << 23
# Rivals that enter the projection in one round.
RIVALS = 32
# What switches off the processors that a generation config may ask for.
NEUTRAL = {
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}


class AbductionError(ValueError):
    """No individual says this text; the message names the token, its position and the reason."""


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
    model: CausalQwen2ForCausalLM,
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
        processor: Reads prompt and continuation; a number in the continuation is a value where the
            processor's ``numbers`` is "value".
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

    Raises:
        AbductionError: If a token cannot be reached, or a replay does not give the observed text.
        ValueError: If an argument is out of range.
    """
    if draws < 1 or sweeps < 0:
        raise ValueError(f"draws is {draws!r}, sweeps {sweeps!r}; draw at least once, with 0 sweeps or more")
    began = time.perf_counter()
    settings = {
        "temperature": float(temperature),
        "noise_gain": _setting(model, "noise_gain", noise_gain),
        "density_floor": _setting(model, "density_floor", density_floor),
    }
    if not (0 < settings["temperature"] < math.inf and 0 < settings["noise_gain"] < math.inf):
        raise ValueError(
            f"temperature is {temperature!r}, noise_gain {settings['noise_gain']!r}; without noise there is "
            "nothing to abduct: both must be above 0"
        )
    inputs = encode_prompt(processor, prompt, model.device)
    tokens, numbers = _observed(model, processor, continuation, values)
    size = len(tokens)
    evidence = _evidence(model, processor, inputs, tokens, numbers, settings)

    individuals: list[Individual] = []
    statistics: list[_Walk] = []
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
            person = Individual((seed + len(individuals)) % SEEDS, path=torch.from_numpy(path))
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


def encode_prompt(processor: CausalQwen2Processor, prompt: Prompt, device: torch.device) -> dict[str, Tensor]:
    """input_ids, attention_mask and numeric_values, (1, T) each, of a text, or a chat awaiting its answer.

    Raises:
        ValueError: If the prompt has no token.
    """
    if isinstance(prompt, str):
        batch = processor(prompt, return_tensors="pt")
    else:
        batch = processor.apply_chat_template(
            list(prompt), tokenize=True, add_generation_prompt=True, return_tensors="pt"
        )
    if batch["input_ids"].shape[1] == 0:
        raise ValueError("the prompt is empty; give at least one token to continue")
    return {name: tensor.to(device) for name, tensor in batch.items()}


def unprocessed(model: CausalQwen2ForCausalLM) -> dict[str, Any]:
    """Options of generate() under which no logits processor runs, whatever the generation config asks for."""
    asked = {name: getattr(model.generation_config, name, None) for name in NEUTRAL}
    return {"do_sample": True, "top_k": 0} | {
        name: NEUTRAL[name] for name, value in asked.items() if value not in (None, NEUTRAL[name])
    }


class Projection:
    """argmin ‖ε‖² subject to n·ε ≥ h for every constraint, and |ε_j| ≤ bound.

    By the dual active-set method of Goldfarb and Idnani (1983).
    Constraints may come in rounds. Each round starts from the last optimum, and no step is wasted: the
    multipliers stay valid. It ends after finitely many steps, at the optimum or with the proof that there is
    none.

    Args:
        size: D.
        bound: Largest |ε_j|; ∞ for none.
    """

    def __init__(self, size: int, bound: float) -> None:
        self.point: Array = np.zeros(size)
        self.bound = bound
        self._rows: Array = np.zeros((0, size))
        self._floors: Array = np.zeros(0)
        self._active: Array = np.zeros((0, size))
        self._multipliers: Array = np.zeros(0)

    def add(self, rows: Array, floors: Array) -> bool:
        """Require rows·ε ≥ floors, (m, D) and (m,), besides what was required before; False if no ε does."""
        lengths = np.linalg.norm(rows, axis=1)
        empty = lengths < 1e-12
        if np.any(floors[empty] > 0):
            return False
        rows, floors, lengths = rows[~empty], floors[~empty], lengths[~empty]
        self._rows = np.concatenate([self._rows, rows / lengths[:, None]])
        self._floors = np.concatenate([self._floors, floors / lengths])
        tolerance = 1e-9 * (1 + np.abs(self._floors).max(initial=0.0))
        for _ in range(50 * (len(self.point) + len(self._rows))):
            violated = self._most_violated(tolerance)
            if violated is None:
                return True
            if not self._enforce(*violated):
                return False
        return False  # only rounding can bring a cycle: nothing that could be replayed

    def _most_violated(self, tolerance: float) -> tuple[Array, float] | None:
        lacks = self._floors - self._rows @ self.point
        worst = int(lacks.argmax()) if len(lacks) else -1
        outside = np.abs(self.point) - self.bound
        widest = int(outside.argmax())
        if worst >= 0 and lacks[worst] > max(tolerance, outside[widest]):
            return self._rows[worst], float(self._floors[worst])
        if outside[widest] > tolerance:
            row = np.zeros_like(self.point)
            row[widest] = -math.copysign(1.0, self.point[widest])
            return row, -self.bound
        return None

    def _enforce(self, row: Array, floor: float) -> bool:
        """Move to where row·ε = floor, dropping active constraints that no longer push; False if none can."""
        multiplier = 0.0
        while True:
            pull = (
                np.linalg.solve(self._active @ self._active.T, self._active @ row)
                if len(self._active)
                else self._multipliers
            )  # (q,)
            direction = row - self._active.T @ pull  # (D,), what the active constraints leave free
            slope = float(direction @ direction)
            yields = np.flatnonzero(pull > 1e-12)
            ratios = self._multipliers[yields] / pull[yields]
            until_drop = float(ratios.min()) if len(ratios) else math.inf
            until_met = (floor - float(row @ self.point)) / slope if slope > 1e-10 else math.inf
            length = min(until_drop, until_met)
            if length == math.inf:
                return False
            if until_met < math.inf:
                self.point = self.point + length * direction
            self._multipliers = self._multipliers - length * pull
            multiplier += length
            if until_met <= until_drop:
                self._active = np.concatenate([self._active, row[None]])
                self._multipliers = np.append(self._multipliers, multiplier)
                return True
            dropped = int(yields[ratios.argmin()])
            self._active = np.delete(self._active, dropped, axis=0)
            self._multipliers = np.delete(self._multipliers, dropped)


def interval(slopes: Array, gaps: Array) -> tuple[float, float]:
    """The t for which gaps + t·slopes ≥ 0, a segment around 0.

    Args:
        slopes: (m,).
        gaps: (m,) > 0. Then −gap/slope is largest (smallest) where slope/gap is, so two extremes of one
            quotient do.
    """
    if len(gaps) == 0:
        return -math.inf, math.inf
    quotients = slopes / gaps
    steepest, shallowest = float(quotients.max()), float(quotients.min())
    return (-1 / steepest if steepest > 0 else -math.inf), (-1 / shallowest if shallowest < 0 else math.inf)


def conditional_draw(low: float, high: float, uniform: float) -> tuple[float, float]:
    """ε ~ standard Cauchy given low ≤ ε ≤ high, by inversion in the angle; and that interval's prior mass.

    Args:
        low: May be −∞.
        high: May be ∞.
        uniform: In [0, 1).
    """
    first, last = math.atan(low), math.atan(high)
    return min(max(math.tan(first + uniform * (last - first)), low), high), (last - first) / math.pi


@dataclass
class _Walk:
    """What `_Evidence.walk` found: paths (n, D + 1) float32, one per draw, and figures per position."""

    paths: list[npt.NDArray[np.float32]]
    nearest: Array
    margins: Array
    rivals: npt.NDArray[np.int64]
    freedom: Array
    acceptance: float


@dataclass
class _Number:
    """At one <NUM>: ε_Y = target − row·ε must stay within the truncation."""

    row: Array  # (D,) s⊙w/|β_Y|
    target: float  # (g(v) − w·loc_U − b_Y)/(T·|β_Y|)

    def noise(self, epsilon: Array) -> float:
        """ε_Y that goes with ε (D,)."""
        return self.target - float(self.row @ epsilon)

    def interval(self, coordinate: int, noise: float, bound: float) -> tuple[float, float]:
        """The moves t of one coordinate of ε that keep |ε_Y| = |noise − row_j·t| within the bound."""
        slope = self.row[coordinate]
        return interval(np.array([slope, -slope]), np.array([bound - noise, bound + noise]).clip(min=1e-12))


@dataclass
class _Evidence:
    """The decisions to be explained: at each of n positions, token y wins at loc_U + gain⊙ε.

    Args:
        weight: (V, D) W.
        bias: (V,) b.
        loc: (n, D) loc_U.
        gain: (n, D) T·κ·s.
        tokens: (n,) y.
        numbers: What the numbers ask for, by position.
        names: Each token as an error message should show it.
    """

    weight: Tensor
    bias: Tensor
    loc: Tensor
    gain: Tensor
    tokens: Tensor
    numbers: dict[int, _Number]
    names: list[str]
    temperature: float
    _moves: int = field(default=0, init=False)
    _accepted: int = field(default=0, init=False)

    def walk(
        self, draws: int, sweeps: int, generator: np.random.Generator, *, margin: float, floor: float
    ) -> _Walk:
        """Start at the smallest noise, then ``sweeps`` rounds of conditional draws before each path."""
        size, dimension = self.loc.shape
        bound = truncation_bound(floor) * INSIDE
        self._moves = self._accepted = 0
        epsilons = np.zeros((draws, size, dimension))
        nearest, margins, freedom = np.zeros(size), np.zeros(size), np.zeros(size)
        rivals = np.zeros(size, dtype=np.int64)
        chunk = max(1, LARGEST_SCORES // len(self.weight))
        for begin in range(0, size, chunk):
            rows = slice(begin, min(begin + chunk, size))
            epsilon, margins[rows], rivals[rows] = self._start(rows, margin, bound)
            nearest[rows] = np.sqrt(np.square(epsilon).mean(-1))
            gaps = self._gaps(rows, epsilon, margins[rows] / 2)
            for draw in range(draws):
                for _ in range(sweeps):
                    freedom[rows] += self._sweep(rows, epsilon, gaps, bound, generator)
                if sweeps:
                    gaps = self._gaps(
                        rows, epsilon, margins[rows] / 2
                    )  # without what the updates have rounded
                epsilons[draw, rows] = epsilon
        own = standard_draw(torch.from_numpy(generator.random((draws, size))), density_floor=floor).numpy()
        for index, number in self.numbers.items():
            own[:, index] = [number.noise(path[index]) for path in epsilons]
        paths = np.concatenate([epsilons, own[..., None]], axis=-1).astype(np.float32)
        return _Walk(
            list(paths),
            nearest,
            margins,
            rivals,
            freedom / max(draws * sweeps, 1) if sweeps else np.full(size, math.nan),
            self._accepted / max(self._moves, 1) if self._moves else 1.0,
        )

    def _scores(self, rows: slice | list[int], epsilon: Array) -> Tensor:
        """W (loc_U + gain⊙ε) + b, (n, V), without a float32 copy of W."""
        u = self.loc[rows] + self.gain[rows] * torch.from_numpy(epsilon).to(self.loc)  # (n, D)
        products = [F.linear(u, exact(block)) for block in self.weight.split(BLOCK_ROWS)]
        return torch.cat(products, dim=-1).add_(self.bias)

    def _gaps(self, rows: slice | list[int], epsilon: Array, margins: Array) -> Tensor:
        """Score of the observed token − score of k − margin, (n, V); ∞ for itself."""
        scores = self._scores(rows, epsilon)
        winner = self.tokens[rows].unsqueeze(1)
        gaps = scores.gather(1, winner) - scores - torch.from_numpy(margins).to(scores)[:, None]
        return gaps.scatter_(1, winner, math.inf)

    def _start(self, rows: slice, margin: float, bound: float) -> tuple[Array, Array, npt.NDArray[np.int64]]:
        """The smallest ε (n, D) of each position, its margin, and the closest rival there.

        Rivals enter as they are found to win: each round scores all tokens at the optimum of the last one.
        """
        size, dimension = self.loc[rows].shape
        largest = self._scores(rows, np.zeros((size, dimension))).abs().amax(-1)  # (n,)
        margins = margin * largest.double().cpu().numpy()
        shares = np.zeros(size, dtype=np.int64)
        projections = [self._projection(rows.start + index, bound) for index in range(size)]
        rivals = np.zeros(size, dtype=np.int64)
        pending = list(range(size))
        while pending:
            epsilon = np.stack([projections[index].point for index in pending])
            gaps = self._gaps([rows.start + index for index in pending], epsilon, margins[pending])
            lowest, worst = gaps.topk(min(RIVALS, gaps.shape[1]), largest=False)  # (p, RIVALS)
            still = []
            for row, index in enumerate(pending):
                rivals[index] = int(worst[row, 0])
                if lowest[row, 0].item() >= -margins[index] / 4:
                    continue
                still.append(index)
                losing = worst[row][lowest[row] < 0]
                constraints = self._constraints(rows.start + index, losing, margins[index])
                if projections[index].add(*constraints) and (projections[index].point != epsilon[row]).any():
                    continue
                shares[index] += 1
                if shares[index] == len(MARGIN_SHARES):
                    self._refuse(rows.start + index, margin, bound)
                margins[index] *= MARGIN_SHARES[shares[index]] / MARGIN_SHARES[shares[index] - 1]
                projections[index] = self._projection(rows.start + index, bound)
            pending = still
        return np.stack([projection.point for projection in projections]), margins, rivals

    def _constraints(self, index: int, rivals: Tensor, margin: float) -> tuple[Array, Array]:
        """gain⊙(W_y − W_k)·ε ≥ logit_k − logit_y + margin for the rivals k: rows (m, D) and floors (m,)."""
        token = self.tokens[index]
        differences = (exact(self.weight[token]) - exact(self.weight[rivals])).double()  # (m, D)
        standing = differences @ self.loc[index].double() + (self.bias[token] - self.bias[rivals]).double()
        return (differences * self.gain[index].double()).cpu().numpy(), (margin - standing).cpu().numpy()

    def _projection(self, index: int, bound: float) -> Projection:
        """At the origin, or at a number where |ε_Y| = |target − row·ε| first keeps the bound."""
        projection = Projection(self.loc.shape[1], bound)
        number = self.numbers.get(index)
        if number is not None and bound < math.inf:
            rows = np.stack([number.row, -number.row])
            if not projection.add(rows, np.array([number.target - bound, -number.target - bound])):
                raise AbductionError(
                    f"{self.names[index]} cannot be reached: its value needs noise beyond the truncation; "
                    "density_floor=0 or a larger temperature would reach it"
                )
        return projection

    def _refuse(self, index: int, margin: float, bound: float) -> NoReturn:
        """Say why no ε within the bound lets the observed token win: too far, or never an argmax at all."""
        if bound == math.inf:
            raise AbductionError(
                f"{self.names[index]} cannot be reached: its score is never the largest, whatever the cause, "
                "because its row of W lies among the other tokens' rows (as <NUM> does before training)"
            )
        nearest, _, _ = self._start(slice(index, index + 1), margin, math.inf)  # or refused for good
        needed = float(np.abs(nearest).max())
        enough = math.ceil(101 * self.temperature * needed / bound) / 100
        raise AbductionError(
            f"{self.names[index]} cannot be reached: it needs noise up to |ε| = {needed:.1f}, and the "
            f"truncation ends at {bound:.2f}; density_floor=0 reaches it, and so does temperature={enough}"
        )

    def _sweep(
        self, rows: slice, epsilon: Array, gaps: Tensor, bound: float, generator: np.random.Generator
    ) -> Array:
        """Redraw every coordinate of every position once, in place; the mean share of prior mass kept, (n,).

        Columns of W are read in contiguous blocks, in random order. Within a block only the tokens that its
        moves could possibly lift above the winner matter: usually a few hundred of V.
        """
        size, dimension = epsilon.shape
        freedom: Array = np.zeros(size)
        offset = int(generator.integers(BLOCK_COLUMNS))
        edges = [0, *range(offset or BLOCK_COLUMNS, dimension, BLOCK_COLUMNS), dimension]
        for block in generator.permutation(len(edges) - 1):
            columns = slice(edges[block], edges[block + 1])
            part = exact(self.weight[:, columns])  # (V, b)
            gain = self.gain[rows, columns]  # (n, b)
            before = epsilon[:, columns].copy()
            own = part[self.tokens[rows]]  # (n, b)
            candidates = self._candidates(gaps, part, own, gain, before, bound)
            gains = gain.double().cpu().numpy()
            for index in range(size):
                chosen = candidates[index]
                slopes = (own[index] - part[chosen]).double().cpu().numpy() * gains[index]  # (m, b)
                gap = gaps[index, chosen].double().cpu().numpy().clip(min=1e-12)  # (m,)
                freedom[index] += self._move(
                    epsilon[index],
                    columns.start,
                    slopes,
                    gap,
                    bound,
                    self.numbers.get(rows.start + index),
                    generator,
                )
            shift = gain * torch.from_numpy(epsilon[:, columns] - before).to(gain)  # (n, b)
            gaps.addmm_(shift, part.T, alpha=-1.0)
            gaps += (shift * own).sum(-1, keepdim=True)
        freedom /= dimension
        return freedom

    def _candidates(
        self, gaps: Tensor, part: Tensor, own: Tensor, gain: Tensor, before: Array, bound: float
    ) -> list[Tensor]:
        """The tokens whose gap one block could close: gap < Σ_j gain_j·(|W_y| + |W_k|)_j·(|ε_j| + bound)."""
        if bound == math.inf:
            return [torch.isfinite(row).nonzero().squeeze(1) for row in gaps]
        span = gain * (torch.from_numpy(np.abs(before)).to(gain) + bound)  # (n, b)
        reach = F.linear(span, part.abs()) + (span * own.abs()).sum(-1, keepdim=True)  # (n, V)
        return [row.nonzero().squeeze(1) for row in gaps < reach]

    def _move(
        self,
        epsilon: Array,
        first: int,
        slopes: Array,
        gap: Array,
        bound: float,
        number: _Number | None,
        generator: np.random.Generator,
    ) -> float:
        """Redraw the coordinates from ``first`` on, in place; the sum of the shares of prior mass kept.

        Args:
            epsilon: (D,).
            first: Coordinate of the first column.
            slopes: (m, b) by how much each gap grows with each coordinate.
            gap: (m,) > 0, of the candidates; changed in place.
            bound: Largest |ε_j|.
            number: What the number at this position asks for, if there is one.
            generator: Of the draws.
        """
        mass = 0.0
        count = slopes.shape[1]
        uniforms = generator.random((count, 2)).tolist()
        total = 2 * math.atan(bound) / math.pi
        slopes = np.ascontiguousarray(slopes.T)  # (b, m)
        read_out = 0.0 if number is None else number.noise(epsilon)
        for column in generator.permutation(count).tolist():
            old = float(epsilon[first + column])
            low, high = interval(slopes[column], gap)
            low, high = max(old + low, -bound), min(old + high, bound)
            if number is not None and bound < math.inf:
                left, right = number.interval(first + column, read_out, bound)
                low, high = max(low, old + left), min(high, old + right)
            new, share = conditional_draw(low, high, uniforms[column][0])
            mass += share / total
            self._moves += 1
            if number is not None:  # ε_Y moves along, and its own density decides
                moved = read_out - float(number.row[first + column]) * (new - old)
                if uniforms[column][1] * (1 + moved * moved) > 1 + read_out * read_out:
                    continue
                read_out = moved
            self._accepted += 1
            gap += slopes[column] * (new - old)
            np.maximum(gap, 1e-12, out=gap)
            epsilon[first + column] = new
        return mass


def _evidence(
    model: CausalQwen2ForCausalLM,
    processor: CausalQwen2Processor,
    inputs: Mapping[str, Tensor],
    tokens: list[int],
    values: list[float],
    settings: Mapping[str, float],
) -> _Evidence:
    """One teacher-forced pass over prompt and continuation."""
    device = inputs["input_ids"].device
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens], device=device)], dim=1)  # (1, T + n)
    batch: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    is_number = ids == (-1 if model.config.num_token_id is None else model.config.num_token_id)
    if is_number.any():
        observed = torch.tensor([values], dtype=torch.float64, device=device)
        batch["numeric_values"] = torch.cat([inputs["numeric_values"].to(observed), observed], dim=1)
    outputs = model(**batch, logits_to_keep=len(tokens) + 1, output_logits=False)
    loc, scale = outputs.loc_U[0, :-1].float(), outputs.scale_U[0, :-1].float()  # (n, D)
    spread = settings["temperature"] * (scale + exact(magnitude(model.action.b_noise)).float())  # (n, D), T·s
    names = [
        f"token {index} of the continuation, {processor.tokenizer.decode([token])!r} (id {token}),"
        for index, token in enumerate(tokens)
    ]
    numbers: dict[int, _Number] = {}
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
        w = model.action.number.weight[0].double()  # (D,)
        rest = target - float(w @ loc[index].double()) - model.action.number.bias.item()
        numbers[index] = _Number((w * spread[index].double() / read_out).cpu().numpy(), rest / read_out)
    return _Evidence(
        model.lm_head.weight.detach(),
        exact(model.action.bias.detach()).float(),
        loc,
        settings["noise_gain"] * spread,
        torch.tensor(tokens, device=device),
        numbers,
        names,
        settings["temperature"],
    )


def _observed(
    model: CausalQwen2ForCausalLM,
    processor: CausalQwen2Processor,
    continuation: str | Sequence[int] | Tensor,
    values: Sequence[float] | Tensor | None,
) -> tuple[list[int], list[float]]:
    """Ids and values of the continuation, (n,) each."""
    if isinstance(continuation, str):
        batch = processor(continuation, add_special_tokens=False)
        tokens, numbers = list(batch["input_ids"]), list(batch["numeric_values"])
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


def _ends(model: CausalQwen2ForCausalLM) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def _replays(
    model: CausalQwen2ForCausalLM,
    inputs: Mapping[str, Tensor],
    tokens: list[int],
    values: list[float],
    person: Individual,
    settings: Mapping[str, float],
) -> bool:
    """Whether generate(), step by step, says the observed text."""
    options: dict[str, Any] = {**inputs, **unprocessed(model), **settings, "max_new_tokens": len(tokens)}
    output = model.generate(
        **options, inference_mode="causal", individual=person, return_dict_in_generate=True
    )
    start = inputs["input_ids"].shape[1]
    if output.sequences[0, start:].tolist() != tokens:
        return False
    if output.numeric_values is None:
        return True
    said = model.value_space.encode(output.numeric_values[0, start:].double())
    observed = model.value_space.encode(torch.tensor(values, dtype=torch.float64)).to(said)
    is_number = output.sequences[0, start:] == model.config.num_token_id
    return bool(((said - observed).abs() <= 1e-4 * (1 + observed.abs()))[is_number].all())


def _setting(model: CausalQwen2ForCausalLM, name: str, given: float | None) -> float:
    """The call's, else the generation config's, else the model's: the order of generate()."""
    for value in (given, getattr(model.generation_config, name, None), getattr(model.config, name)):
        if value is not None:
            return float(value)
    raise ValueError(f"{name} is set nowhere")


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
