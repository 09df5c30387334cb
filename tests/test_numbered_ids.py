"""Ids that keep the values of their numbers, where a program hands on nothing else."""

import copy
import pickle

import pytest
import torch

from causal_qwen.numbered_ids import NumberedIds


@pytest.fixture
def ids():
    return NumberedIds.of(
        torch.tensor([[5, 258, 7], [8, 9, 258]]), torch.tensor([[0.0, 12.5, 0.0], [0.0, 0.0, 3.0]])
    )


@pytest.mark.parametrize(
    ("part", "values"),
    [
        (lambda ids: ids[:, 1:], [[12.5, 0.0], [0.0, 3.0]]),
        (lambda ids: ids[0], [0.0, 12.5, 0.0]),
        (lambda ids: ids[1, 1:], [0.0, 3.0]),
        (lambda ids: ids[0][1:], [12.5, 0.0]),
        (lambda ids: list(ids)[1], [0.0, 0.0, 3.0]),
        (lambda ids: ids.to("cpu")[1], [0.0, 0.0, 3.0]),
        (lambda ids: ids.cpu()[1], [0.0, 0.0, 3.0]),
        (lambda ids: copy.deepcopy(ids)[1], [0.0, 0.0, 3.0]),
        (lambda ids: pickle.loads(pickle.dumps(ids))[1], [0.0, 0.0, 3.0]),
    ],
)
def test_parts_and_copies_keep_their_values(ids, part, values):
    assert part(ids).numeric_values.tolist() == values


@pytest.mark.parametrize(
    "what", [lambda ids: ids + 1, lambda ids: ids == 258, lambda ids: torch.cat([ids, ids])]
)
def test_what_is_computed_is_a_plain_tensor(ids, what):
    assert type(what(ids)) is torch.Tensor


def test_it_compiles_as_a_tensor_does(ids):
    table = torch.nn.Embedding(300, 4)
    compiled = torch.compile(table, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ids), table(ids.as_subclass(torch.Tensor)))
