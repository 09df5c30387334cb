"""Individuals: the law of their noise, and that it depends on nothing but who and where."""

import subprocess
import sys

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen import Individual
from causal_qwen.cauchy import truncation_bound

D = 64


def path(individual, positions=400, size=D, floor=0.0, persistence=0.2):
    settings = {"density_floor": floor, "persistence": persistence}
    return torch.stack([individual.noise(position, size, **settings) for position in range(positions)])


@pytest.mark.parametrize("rho", [0.0, 0.2, 1.0])
def test_untruncated_noise_is_standard_cauchy_for_every_persistence(rho):
    """ρ + (1 − ρ) = 1: stability. Over many seeds at one position, so that the shared part varies too."""
    draws = torch.cat([path(Individual(seed, rho), 1) for seed in range(300)]).flatten()
    assert scipy.stats.kstest(draws.numpy(), "cauchy").pvalue > 1e-3
    quartiles = draws.quantile(torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quartiles, torch.tensor([-1.0, 0.0, 1.0]), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("floor", [0.01, 0.5])
@pytest.mark.parametrize("rho", [0.0, 0.2, 1.0])
def test_truncated_noise_keeps_the_bound(floor, rho):
    noise = path(Individual(5, rho), floor=floor)
    assert noise.abs().max() <= truncation_bound(floor) * (1 + 1e-6)


def test_persistence_is_what_positions_share():
    fresh, whole = path(Individual(3, 0.0)), path(Individual(3, 1.0))
    assert whole.eq(whole[0]).all()
    assert not fresh[0].eq(fresh[1]).any()
    mixed = path(Individual(3, 0.25))
    torch.testing.assert_close(mixed, 0.25 * whole + 0.75 * fresh)
    torch.testing.assert_close(path(Individual(3), persistence=0.25), mixed)


def test_positions_and_seeds_are_independent():
    noise = torch.cat([path(Individual(seed, 0.0), 200) for seed in (0, 1)])
    ranks = noise.argsort(0).argsort(0).float()
    correlation = torch.corrcoef(ranks[:, :8].T)
    assert (correlation - torch.eye(8)).abs().max() < 0.2
    assert not noise[:200].eq(noise[200:]).any()


def test_noise_does_not_depend_on_what_was_drawn_before():
    individual = Individual(11)
    later = individual.noise(7, D, density_floor=0.01, persistence=0.2)
    assert torch.equal(path(Individual(11), 8, floor=0.01)[7], later)
    assert torch.equal(Individual(11, start=7).noise(0, D, density_floor=0.01, persistence=0.2), later)


def test_noise_is_the_same_in_another_process():
    code = (
        "from causal_qwen import Individual; "
        f"print(Individual(2**64 - 1).noise(3, {D}, density_floor=0.01, persistence=0.2).tolist())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert eval(other) == path(Individual(2**64 - 1), 4, floor=0.01)[3].tolist()


def test_an_explicit_path_is_followed_then_continued():
    given_path = torch.randn(3, D + 1)
    individual = Individual(4, path=given_path)
    noise = path(individual, 5)
    assert torch.equal(noise[:3], given_path)
    assert torch.equal(noise[3:], path(Individual(4), 5)[3:])
    with pytest.raises(ValueError, match="causes of size 64, not 32"):
        individual.noise(0, 32, density_floor=0.0, persistence=0.2)


@given(
    st.integers(0, 2**64 - 1),
    st.none() | st.floats(0, 1),
    st.integers(0, 1000),
    st.none() | st.integers(1, 4),
)
def test_json_round_trip(seed, persistence, start, length):
    made = None if length is None else torch.randn(length, 5)
    individual = Individual(seed, persistence, start, made)
    back = Individual.from_json(individual.to_json())
    assert (back.seed, back.persistence, back.start) == (seed, persistence, start)
    assert (back.path is None) == (made is None)
    assert made is None or torch.equal(back.path, made)


def test_files(tmp_path):
    Individual(9, 0.5).save(tmp_path / "nine.json")
    assert Individual.load(tmp_path / "nine.json").persistence == 0.5
    assert [file.name for file in tmp_path.iterdir()] == ["nine.json"]
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="not an individual"):
        Individual.load(tmp_path / "bad.json")


def test_random_individuals_differ():
    assert Individual.random().seed != Individual.random().seed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": 1, "persistence": 1.5}, "persistence is 1.5"),
        ({"seed": 1, "start": -2}, "start is -2"),
        ({"seed": 1, "path": torch.zeros(3)}, r"shape \(3,\)"),
    ],
)
def test_mistakes_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Individual(**fields)
