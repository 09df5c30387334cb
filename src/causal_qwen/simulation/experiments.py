"""What the simulation asks: does the engine converge, to the truth, and what do outliers do to it?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from causal_qwen.simulation.mechanism import Mechanism, NumberLoss
from causal_qwen.simulation.structure import Individuals, StructuralModel

__all__ = ["OUTLIER_SHARES", "TOLERANCES", "Convergence", "Robustness", "Simulation", "simulate"]

OUTLIER_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4)
# Outliers lie this many noise scales above the truth, on average.
OUTLIER_DISTANCE = 30.0
# What "recovered" means, for 8,000 individuals: see docs/howto/simulate.md.
TOLERANCES = {"number_slope": 0.02, "number_intercept": 0.02, "number_scale": 0.15, "prob_num": 0.02}


@dataclass(frozen=True)
class Convergence:
    """Curves of training, on individuals that it does not see."""

    steps: list[int]  # where the curves are measured
    loss: list[float]  # L_cls + L_reg
    accuracy: list[float]  # of the next token
    prob_num_at_numbers: list[float]  # median P_<NUM> where a number comes
    prob_num_elsewhere: list[float]  # median P_<NUM> where none comes
    number_error: list[float]  # median |g⁻¹(loc_Y) − v|
    best_accuracy: float  # of whoever knows the structure
    best_number_error: float  # the same for the number
    # Relative distance from the truth of the slope of loc_Y (as a vector), of its intercept and of scale_Y
    # (median over the numbers), and the median distance of P_<NUM>.
    parameter_errors: dict[str, float]

    @property
    def recovered(self) -> bool:
        """Whether every parameter error is within its tolerance."""
        return all(self.parameter_errors[name] <= bound for name, bound in TOLERANCES.items())


@dataclass(frozen=True)
class Robustness:
    """Median error on clean numbers after training on numbers of which a share are outliers."""

    shares: list[float]  # of outliers
    cauchy: list[float]  # median |error| of the Cauchy head
    squared: list[float]  # median |error| of the same head, trained by squared error

    def growth(self, errors: list[float], share: float = 0.3) -> float:
        """Error at ``share`` over the error without outliers."""
        return errors[self.shares.index(share)] / errors[self.shares.index(0.0)]


@dataclass(frozen=True)
class Simulation:
    """Both answers, and the seconds that they took."""

    convergence: Convergence  # of the whole engine
    robustness: Robustness  # of the number head
    seconds: float

    def summary(self) -> dict[str, Any]:
        """The figures, ready for JSON."""
        return {
            "cauchy_error_growth": self.robustness.growth(self.robustness.cauchy),
            "squared_error_growth": self.robustness.growth(self.robustness.squared),
            "parameter_errors": self.convergence.parameter_errors,
            "tolerances": TOLERANCES,
            "recovered": self.convergence.recovered,
            "accuracy": self.convergence.accuracy[-1],
            "best_accuracy": self.convergence.best_accuracy,
            "number_error": self.convergence.number_error[-1],
            "best_number_error": self.convergence.best_number_error,
            "robustness": asdict(self.robustness),
            "seconds": self.seconds,
        }


def simulate(
    *,
    count: int = 8000,
    steps: int = 400,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> Simulation:
    """Train the causal engine on synthetic individuals and compare it with the truth.

    Args:
        count: Individuals to train on, ≥ 100; a quarter as many are held out.
        steps: Of training, ≥ 20.
        seed: Of truth, data and starting point.
        progress: Told what is being done.

    Raises:
        ValueError: If ``count`` or ``steps`` is too small.
    """
    if count < 100 or steps < 20:
        raise ValueError(f"count is {count} and steps {steps}; use at least 100 and 20")
    start = time.perf_counter()
    truth = StructuralModel(seed=seed)
    progress(f"training the engine on {count} individuals, {steps} steps")
    convergence = _converge(truth, count, steps, seed)
    progress("training number heads on 0 to 40% outliers")
    robustness = _withstand(truth, count // 2, 3 * steps // 4, seed)
    return Simulation(convergence, robustness, time.perf_counter() - start)


def _converge(truth: StructuralModel, count: int, steps: int, seed: int) -> Convergence:
    individuals = truth.draw(count, seed=seed + 1)
    held_out = truth.draw(count // 4, seed=seed + 2)
    engine = Mechanism(truth.hidden_size, truth.size, truth.vocab_size, seed=seed)
    measured: list[tuple[int, dict[str, float]]] = []

    def watch(step: int) -> None:
        if step % max(steps // 40, 1) == 0 or step == steps:
            measured.append((step, _measure(engine, held_out)))

    _train(engine, lambda: engine.loss(individuals), steps, watch)
    is_num = held_out.labels == truth.num_token_id
    best = truth.Y(held_out.features[is_num]).loc - held_out.values[is_num]
    curves = {name: [facts[name] for _, facts in measured] for name in measured[0][1]}
    return Convergence(
        steps=[step for step, _ in measured],
        best_accuracy=truth.best_accuracy(held_out.features),
        best_number_error=float(best.abs().median()),
        parameter_errors=_parameter_errors(engine, truth, held_out),
        **curves,
    )


@torch.no_grad()
def _measure(engine: Mechanism, held_out: Individuals) -> dict[str, float]:
    U, U0, Y = engine(held_out.features)
    is_num = held_out.labels == engine.weight.shape[0] - 1
    prob_num = engine.prob_num(U, U0)
    return {
        "loss": float(engine.loss(held_out)),
        "accuracy": float((engine.choose(U, U0) == held_out.labels).float().mean()),
        "prob_num_at_numbers": float(prob_num[is_num].median()),
        "prob_num_elsewhere": float(prob_num[~is_num].median()),
        "number_error": float((Y.loc - held_out.values)[is_num].abs().median()),
    }


@torch.no_grad()
def _parameter_errors(engine: Mechanism, truth: StructuralModel, held_out: Individuals) -> dict[str, float]:
    U, U0, Y = engine(held_out.features)
    slope = truth.M.T @ truth.w
    # Where no number comes, nothing says how uncertain one would be.
    is_num = held_out.labels == truth.num_token_id
    scale_ratio = Y.scale[is_num] / truth.Y(held_out.features[is_num]).scale
    prob_error = engine.prob_num(U, U0) - truth.prob_num(held_out.features)
    return {
        "number_slope": float((engine.slope() - slope).norm() / slope.norm()),
        "number_intercept": float((engine.intercept() - truth.b_Y).abs() / truth.b_Y),
        "number_scale": float((scale_ratio - 1).abs().median()),
        "prob_num": float(prob_error.abs().median()),
    }


def _withstand(truth: StructuralModel, count: int, steps: int, seed: int) -> Robustness:
    """Numbers with normal noise, for which squared error is the best choice; then outliers."""
    generator = torch.Generator().manual_seed(seed + 3)
    features = torch.randn(2 * count, truth.hidden_size, generator=generator)
    noise = truth.Y(features).scale.median()
    values = truth.Y(features).loc + noise * torch.randn(2 * count, generator=generator)
    jump = noise * OUTLIER_DISTANCE * 2 * torch.rand(count, generator=generator)
    rank = torch.rand(count, generator=generator)  # the outliers of a smaller share are among a larger one's
    errors: dict[NumberLoss, list[float]] = {"cauchy": [], "squared": []}
    for share in OUTLIER_SHARES:
        recorded = values[:count] + torch.where(rank < share, jump, 0.0)
        for kind, medians in errors.items():
            engine = Mechanism(truth.hidden_size, truth.size, truth.vocab_size, seed=seed)
            loss = partial(engine.regression_loss, features[:count], recorded, kind)
            _train(engine, loss, steps, lambda step: None)
            with torch.no_grad():
                Y = engine(features[count:])[2]
            medians.append(float((Y.loc - values[count:]).abs().median()))
    return Robustness(list(OUTLIER_SHARES), errors["cauchy"], errors["squared"])


def _train(engine: Mechanism, loss: Callable[[], Tensor], steps: int, watch: Callable[[int], None]) -> None:
    """Adam with a cosine to zero, all individuals at every step."""
    optimizer = torch.optim.Adam(engine.parameters(), lr=0.03)
    for step in range(steps):
        watch(step)
        optimizer.param_groups[0]["lr"] = 0.03 * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    watch(steps)
