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


# --- worlds: exogenous noise that is not the individual's


def worlds(individual, count, *, positions=1, floor=0.0, persistence=0.2):
    settings = {"density_floor": floor, "persistence": persistence}
    return torch.stack(
        [
            individual.redrawn(world).world_noise(position, D, **settings)
            for world in range(count)
            for position in range(positions)
        ]
    )


def test_outside_of_any_world_the_exogenous_noise_is_the_individuals_own():
    settings = {"density_floor": 0.01, "persistence": 0.2}
    for individual in (Individual(3), Individual(3, path=torch.randn(2, D + 1))):
        for position in (0, 5):
            own = individual.noise(position, D, **settings)
            assert torch.equal(individual.world_noise(position, D, **settings), own)


@pytest.mark.parametrize("rho", [0.0, 0.2, 1.0])
def test_the_noise_of_a_world_is_standard_cauchy_and_of_nobody_else(rho):
    """Over the worlds of one individual; independent of its own noise and among each other."""
    individual = Individual(3, rho)
    drawn = worlds(individual, 300)
    assert scipy.stats.kstest(drawn.flatten().numpy(), "cauchy").pvalue > 1e-3
    own = path(individual, 1)[0]
    assert torch.equal(path(individual.redrawn(7), 1)[0], own), "the individual is who it was"
    for other in (own, drawn[1], worlds(Individual(4, rho), 1)[0]):
        assert abs(scipy.stats.spearmanr(drawn[0], other).statistic) < 0.4
        assert not drawn[0].eq(other).any()


@pytest.mark.parametrize("rho", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_what_is_kept_and_what_is_redrawn_add_up_to_the_law_of_one_noise(rho, share):
    """s·ε + b·ε' ~ Cauchy(s + b): stability, untruncated. With the same s at two positions so does their
    difference, whose scale is 2(1 − ρ) for one noise: the law of the path is the same, too.
    """
    people = [Individual(seed, rho, world=2) for seed in range(150)]
    own = torch.stack([path(one, 2) for one in people])  # (n, 2, D + 1)
    settings = {"density_floor": 0.0, "persistence": 0.2}
    world = torch.stack([torch.stack([one.world_noise(i, D, **settings) for i in (0, 1)]) for one in people])
    total = share * own + (1 - share) * world
    assert scipy.stats.kstest(total[:, 0].flatten().numpy(), "cauchy").pvalue > 1e-3
    if rho < 1:
        difference = (total[:, 0] - total[:, 1]).flatten() / (2 * (1 - rho))
        assert scipy.stats.kstest(difference.numpy(), "cauchy").pvalue > 1e-3


def test_truncated_parts_add_up_within_the_bound_to_a_law_with_lighter_tails():
    """What holds of stability under truncation: the bound and the symmetry; not the tails."""
    people = [Individual(seed, 0.0, world=0) for seed in range(200)]
    settings = {"density_floor": 0.01, "persistence": 0.0}
    one = torch.cat([person.noise(0, D, **settings) for person in people])
    other = torch.cat([person.world_noise(0, D, **settings) for person in people])
    total = (one + other) / 2
    assert total.abs().max() <= truncation_bound(0.01) * (1 + 1e-6)
    assert abs(total.median().item()) < 0.05
    quartile = [part.abs().median().item() for part in (one, total)]
    assert 0.85 * quartile[0] < quartile[1] < quartile[0]
    beyond = [(part.abs() > 5).double().mean().item() for part in (one, total)]
    assert beyond[1] < 0.3 * beyond[0]


def test_a_path_of_the_world_is_followed_until_the_world_is_another():
    settings = {"density_floor": 0.0, "persistence": 0.2}
    own, world = torch.randn(2, D + 1), torch.randn(2, D + 1)
    individual = Individual(4, path=own, world=0, world_path=world)
    assert torch.equal(individual.noise(1, D, **settings), own[1])
    assert torch.equal(individual.world_noise(1, D, **settings), world[1])
    assert torch.equal(individual.world_noise(2, D, **settings), worlds(Individual(4), 1, positions=3)[2])
    another = individual.redrawn()
    assert another.world == 1
    assert torch.equal(another.noise(1, D, **settings), own[1])
    assert torch.equal(another.world_noise(1, D, **settings), worlds(Individual(4), 2, positions=2)[3])


# --- mirrors


@pytest.mark.parametrize("made", [None, torch.randn(2, D + 1)], ids=["drawn", "path"])
def test_the_antithetic_individual_has_the_opposite_noise_and_its_mirror_is_oneself(made):
    world_path = None if made is None else 2 * made
    individual = Individual(5, 0.3, 2, made, world=1, world_path=world_path)
    mirror = individual.antithetic()
    again = Individual.from_json(mirror.to_json())
    settings = {"density_floor": 0.01, "persistence": 0.2}
    for position in (0, 40):
        for draw in (Individual.noise, Individual.world_noise):
            noise = draw(individual, position, D, **settings)
            assert torch.equal(draw(mirror, position, D, **settings), -noise)
            assert torch.equal(draw(again, position, D, **settings), -noise)
            assert torch.equal(draw(mirror.antithetic(), position, D, **settings), noise)
    assert mirror.antithetic().to_json() == individual.to_json()


# --- files


@given(
    st.integers(0, 2**64 - 1),
    st.none() | st.floats(0, 1),
    st.integers(0, 1000),
    st.none() | st.integers(1, 4),
    st.booleans(),
    st.none() | st.integers(0, 2**48 - 1),
)
def test_json_round_trip(seed, persistence, start, length, mirrored, world):
    made = None if length is None else torch.randn(length, 5)
    world_path = None if world is None or made is None else -made
    individual = Individual(seed, persistence, start, made, mirrored, world, world_path)
    back = Individual.from_json(individual.to_json())
    assert (back.seed, back.persistence, back.start) == (seed, persistence, start)
    assert (back.mirrored, back.world) == (mirrored, world)
    for one, other in ((back.path, made), (back.world_path, world_path)):
        assert (one is None) == (other is None)
        assert other is None or torch.equal(one, other)


def test_individuals_of_older_files_are_outside_of_any_world():
    back = Individual.from_json('{"seed": 3, "persistence": null, "start": 0}')
    assert (back.mirrored, back.world, back.world_path) == (False, None, None)


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
        ({"seed": 1, "world": -1}, "world is -1"),
        ({"seed": 1, "world": 2**48}, "world is 281474976710656"),
        ({"seed": 1, "mirrored": 1}, "mirrored is 1"),
        ({"seed": 1, "world_path": torch.zeros(3, 4)}, "without a world"),
    ],
)
def test_mistakes_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Individual(**fields)
