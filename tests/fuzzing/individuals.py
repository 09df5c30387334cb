"""Individuals: whoever is read from JSON is written as the same one, and has noise."""

import json

import torch
from hypothesis import strategies as st

from causal_qwen import Individual
from causal_qwen.individual import one_per_row
from fuzzing.inputs import ODD_VALUES, Drawn, Mutated, mutated_json
from fuzzing.places import written
from fuzzing.target import Target

__all__ = ["TARGETS", "check_file", "check_several"]


def files() -> list[bytes]:
    """People as `Individual.save` writes them."""
    path = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)
    people = (
        Individual(7),
        Individual(2**64 - 1, 0.25, 12),
        Individual(3, 1.0),
        Individual(4, None, 2, path),
        Individual(5, 0.5, 0, path, mirrored=True, world=3, world_path=-path),
    )
    return [person.to_json().encode() for person in people]


def check_file(data: bytes) -> None:
    """load → to_json → from_json is the same individual, whose noise is finite."""
    person = Individual.load(written(data, ".json"))
    again = Individual.from_json(person.to_json())
    assert (again.seed, again.persistence, again.start) == (person.seed, person.persistence, person.start)
    assert (again.mirrored, again.world) == (person.mirrored, person.world)
    assert (again.path is None) == (person.path is None)
    size = 3 if person.path is None else person.path.shape[1] - 1
    for position in (0, 5):
        noise, same = (
            one.noise(position, size, density_floor=0.01, persistence=0.2) for one in (person, again)
        )
        assert noise.shape == (size + 1,)
        assert noise.isfinite().all()
        assert torch.equal(noise, same)


def check_several(data: bytes) -> None:
    """One individual per row, whatever was given for them."""
    who, rows = json.loads(data)
    people = one_per_row(who, rows)
    assert len(people) == rows
    assert all(isinstance(person, Individual) for person in people)


SEEDS = st.integers(0, 2**64 - 1) | st.integers() | ODD_VALUES
TARGETS = (
    Target(name="individuals", source=Mutated(files, mutated_json), check=check_file, share=60),
    Target(
        name="seeds",
        source=Drawn(st.tuples(st.none() | SEEDS | st.lists(SEEDS, max_size=3), st.integers(0, 3))),
        check=check_several,
        share=20,
    ),
)
