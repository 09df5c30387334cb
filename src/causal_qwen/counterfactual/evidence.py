"""The decisions that an individual has to explain, and the walk through the noise that explains them.

At each position the ε for which the observed token wins form a polyhedron. The walk starts at its point of
smallest norm and redraws coordinates from their conditional law. This module does not know prompts or texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.cauchy import standard_draw, truncation_bound
from causal_qwen.counterfactual.projection import Array, Projection, conditional_draw, interval
from causal_qwen.heads import exact

__all__ = ["AbductionError", "Evidence", "NumberEvidence", "Walk"]

# Where the margin cannot be had, smaller ones are tried before a token is refused.
MARGIN_SHARES = (1.0, 0.1, 0.01)
# Paths keep clear of the truncation bound by more than float32 rounds.
INSIDE = 1.0 - 1e-6
# Columns of W that one block of moves reads, rows of W that one product reads, scores that exist at one time.
BLOCK_COLUMNS, BLOCK_ROWS, LARGEST_SCORES = 8, 8192, 1 << 23
# Rivals that enter the projection in one round.
RIVALS = 32


class AbductionError(ValueError):
    """No individual says this text; the message names the token, its position and the reason."""


@dataclass
class Walk:
    """What `Evidence.walk` found: paths (n, D + 1) float32, one per draw, and figures per position."""

    paths: list[npt.NDArray[np.float32]]
    nearest: Array
    margins: Array
    rivals: npt.NDArray[np.int64]
    freedom: Array
    acceptance: float


@dataclass
class NumberEvidence:
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
class Evidence:
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
    numbers: dict[int, NumberEvidence]
    names: list[str]
    temperature: float
    _moves: int = field(default=0, init=False)
    _accepted: int = field(default=0, init=False)

    def walk(
        self, draws: int, sweeps: int, generator: np.random.Generator, *, margin: float, floor: float
    ) -> Walk:
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
        return Walk(
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
        leads = differences @ self.loc[index].double() + (self.bias[token] - self.bias[rivals]).double()
        return (differences * self.gain[index].double()).cpu().numpy(), (margin - leads).cpu().numpy()

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
        number: NumberEvidence | None,
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
