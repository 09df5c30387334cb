"""The known world has the laws it states; the engine finds them; outliers do not move it."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from causal_qwen.cli import app
from causal_qwen.simulation import Mechanism, StructuralModel, simulate
from causal_qwen.simulation.experiments import OUTLIER_SHARES, TOLERANCES
from causal_qwen.simulation.plot import draw_simulation


@pytest.fixture(scope="module")
def truth():
    return StructuralModel(seed=3)


def test_individuals_follow_the_stated_laws(truth):
    """Frequency of <NUM> against P_<NUM>, and quartiles of the standardised numbers against ±1."""
    individuals = truth.draw(40_000, seed=0)
    is_num = individuals.labels == truth.num_token_id
    prob = truth.prob_num(individuals.features)
    error = 4 * math.sqrt(0.25 / len(prob))
    assert is_num.float().mean().item() == pytest.approx(prob.mean().item(), abs=error)
    likely = prob > prob.median()
    assert is_num[likely].float().mean().item() == pytest.approx(prob[likely].mean().item(), abs=2 * error)
    law = truth.Y(individuals.features[is_num])  # selected by <NUM>, which must say nothing about the number
    z = ((individuals.values[is_num] - law.loc) / law.scale).numpy()
    np.testing.assert_allclose(np.quantile(z, [0.25, 0.5, 0.75]), [-1, 0, 1], atol=0.06)


def test_nobody_is_better_than_the_best(truth):
    """The most frequent token of each feature, on fresh individuals, is right as often as stated."""
    features = torch.randn(300, truth.hidden_size, generator=torch.Generator().manual_seed(1))
    best = truth.best_accuracy(features, draws=400)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.stack([truth.act(truth.U(features).rsample(generator=generator))[0] for _ in range(400)])
    chosen = tokens[:200].mode(0).values
    reached = (tokens[200:] == chosen).float().mean().item()
    assert reached == pytest.approx(best, abs=0.03)
    assert reached <= best + 0.01


def test_the_engine_uses_the_models_own_heads(truth):
    engine = Mechanism(truth.hidden_size, truth.size, truth.vocab_size, seed=0)
    features = torch.randn(50, truth.hidden_size)
    _, _, Y = engine(features)
    torch.testing.assert_close(Y.loc, features @ engine.slope() + engine.intercept())
    U, U0, _ = engine(features)
    S = engine.action.scores(U, U0, engine.weight)
    torch.testing.assert_close(engine.prob_num(U, U0), S.sf(engine.action.threshold)[:, -1])


def test_squared_and_cauchy_heads_start_alike(truth):
    engines = [Mechanism(truth.hidden_size, truth.size, truth.vocab_size, seed=5) for _ in range(2)]
    for one, other in zip(*(engine.parameters() for engine in engines), strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def simulation():
    return simulate(seed=0)


@pytest.mark.slow
def test_the_truth_is_recovered(simulation):
    errors = simulation.convergence.parameter_errors
    assert set(errors) == set(TOLERANCES)
    assert {name: error for name, error in errors.items() if error > TOLERANCES[name]} == {}
    assert simulation.convergence.recovered


@pytest.mark.slow
def test_everything_converges(simulation):
    curves = simulation.convergence
    assert curves.loss[-1] < 0.5 * curves.loss[0]
    assert curves.accuracy[-1] > 0.9 * curves.best_accuracy
    assert curves.accuracy[-1] <= curves.best_accuracy + 0.03  # of 2,000 held-out individuals
    assert curves.number_error[-1] < 1.1 * curves.best_number_error < curves.number_error[0]
    assert curves.prob_num_at_numbers[-1] > 0.8
    assert curves.prob_num_elsewhere[-1] < 0.2


@pytest.mark.slow
def test_outliers_move_the_squared_error_head_alone(simulation):
    summary = simulation.summary()
    assert summary["cauchy_error_growth"] <= 1.2
    assert summary["squared_error_growth"] >= 2.0
    assert simulation.robustness.shares == list(OUTLIER_SHARES)
    # Without outliers the noise is normal and squared error is the best there is: the comparison is fair.
    assert simulation.robustness.squared[0] <= simulation.robustness.cauchy[0] * 1.02
    assert simulation.robustness.cauchy[-1] <= 1.2 * simulation.robustness.cauchy[0]


def test_the_picture_is_a_png(simulation, tmp_path):
    draw_simulation(simulation, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
    with pytest.raises(ValueError, match=r"is a \.png"):
        draw_simulation(simulation, tmp_path / "picture.svg")


def test_the_same_seed_gives_the_same_figures():
    one, other = (simulate(count=200, steps=20, seed=7).summary() for _ in range(2))
    del one["seconds"], other["seconds"]
    assert one == other


@pytest.mark.parametrize("options", [{"count": 10}, {"steps": 3}])
def test_too_little_is_named(options):
    with pytest.raises(ValueError, match="at least 100 and 20"):
        simulate(**options)


def test_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["simulate", "--count", "200", "--steps", "20"]
    result = CliRunner().invoke(app, [*small, "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert {"cauchy_error_growth", "squared_error_growth", "parameter_errors"} <= set(printed)
    assert printed["plot"] is None
    assert list(tmp_path.iterdir()) == []  # no picture that nobody asked for
    table = CliRunner().invoke(app, [*small, "--plot", "deep/mine.png"])
    assert (tmp_path / "deep" / "mine.png").exists()
    assert "number_slope" in table.stdout
    assert "growth at 30%" in table.stdout
