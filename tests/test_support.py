"""What a solved number head has seen, and how well it knows a difference: against dense float64 algebra."""

import pytest
import torch

from causal_qwen.calibration.cauchy_regression import cauchy_regression
from causal_qwen.cauchy import Cauchy
from causal_qwen.support import NumberSupport

ROWS, SIZE, RIDGE = 40, 12, 3.0


@pytest.fixture(scope="module")
def features():
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(1, -1, SIZE, dtype=torch.float64)
    return torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64) * spread + 5


@pytest.mark.parametrize("noisy", [False, True])
def test_leverage_is_that_of_the_ridge_relative_to_the_largest_left_out(features, noisy):
    error = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    noise = ROWS * error.T @ error if noisy else None
    support, largest = NumberSupport.of(features, RIDGE, noise=noise)
    x = features - features.mean(0)
    matrix = x.T @ x + RIDGE * torch.eye(SIZE, dtype=torch.float64) + (noise if noisy else 0)
    leverage = (x * torch.linalg.solve(matrix, x.T).T).sum(1)
    left_out = (leverage + 1 / ROWS) / (1 - leverage - 1 / ROWS)
    # Directions with next to no variance are taken as having none.
    assert largest == pytest.approx(left_out.max().item(), rel=0.02)
    torch.testing.assert_close(support(features).double() * largest, leverage, rtol=0.02, atol=1e-4)


def test_distances_are_the_posterior_spread_of_differences(features):
    support, largest = NumberSupport.of(features, 0.01)  # below every eigenvalue: all directions are kept
    assert len(support.gains) == SIZE
    x = features - features.mean(0)
    matrix = x.T @ x / 2 + 0.01 * torch.eye(SIZE, dtype=torch.float64)
    one, other = features[:20], features[20:]
    variance = ((one - other) * torch.linalg.solve(matrix, (one - other).T).T).sum(1)
    ours = [support.coordinates(part, largest) for part in (one, other)]
    torch.testing.assert_close((ours[0] - ours[1]).square().sum(1).double(), variance, rtol=1e-3, atol=0)
    unseen = support.coordinates(torch.zeros(SIZE), largest)
    assert torch.equal(unseen, torch.zeros(SIZE))


def test_directions_beyond_those_kept_are_known_by_the_prior_alone():
    generator = torch.Generator().manual_seed(1)
    seen = torch.randn(30, 2, generator=generator, dtype=torch.float64) @ torch.eye(2, 8, dtype=torch.float64)
    support, largest = NumberSupport.of(seen, 0.5)
    step = torch.zeros(8, dtype=torch.float64)
    step[7] = 1.0  # where no row has been
    distance = support.coordinates(step, largest).square().sum().item()
    assert distance == pytest.approx(1 / 0.5, rel=1e-5)


@pytest.mark.parametrize("ridge", [1.0, 300.0])
def test_slopes_from_the_prior_lie_where_the_posterior_says(ridge):
    """w ~ N(0, β²/λ), Cauchy labels: the law that the distances are derived from."""
    generator = torch.Generator().manual_seed(2)
    held = []
    for _ in range(50):
        x = torch.randn(400, 8, generator=generator, dtype=torch.float64)
        slope = torch.randn(8, generator=generator, dtype=torch.float64) / ridge**0.5
        uniform = torch.rand(400, generator=generator, dtype=torch.float64)
        noise = Cauchy(torch.zeros(()), torch.ones(())).rsample(uniform=uniform)
        strength = ridge / float(torch.linalg.eigvalsh((x - x.mean(0)).T @ (x - x.mean(0)))[-1])
        fit = cauchy_regression(x, x @ slope + noise, strengths=(strength,), folds=0, doubt=False)
        support, largest = NumberSupport.of(x, ridge)
        asked = torch.randn(20, 8, generator=generator, dtype=torch.float64)
        error = (asked @ (fit.slope - slope)).abs()
        spread = fit.scale * support.coordinates(asked, largest).double().square().sum(1).sqrt()
        held.append((error < 1.645 * spread).double().mean())
    assert torch.stack(held).mean().item() == pytest.approx(0.9, abs=0.04)
