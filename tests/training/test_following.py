"""The number head follows the features: what is kept, what is solved, and what words leave alone."""

import dataclasses

import pytest
import torch

from causal_qwen.calibration import set_value_space
from causal_qwen.data import Collator, Encoded
from causal_qwen.data.batches import pack
from causal_qwen.training.following import FollowingHead, NumberFeatures, number_head
from conftest import tiny_causal

NUM = 258


@pytest.fixture
def model():
    model = tiny_causal(num_token_id=NUM)
    with torch.no_grad():  # causes so narrow that scale_Y is the read-out noise's
        model.abduction.scale.weight.zero_()
        model.abduction.scale.bias.fill_(-12)
    set_value_space(model, "linear", torch.arange(1.0, 100.0, dtype=torch.float64))
    return model


@pytest.fixture
def following(model):
    return FollowingHead(model, model, every=1)


def numbers(model, *, rows=80, shift=0.0, stretch=1.0, first=0):
    """Features of a few strong directions, and targets that are linear in them before they moved."""
    generator = torch.Generator().manual_seed(0)
    width = model.config.causal_size
    directions = torch.randn(3, width, generator=generator)
    factors = torch.randn(rows, 3, generator=generator)
    targets = (factors @ torch.tensor([1.0, -0.5, 0.3])).tolist()
    loc_U = stretch * (factors @ directions) + shift
    scale_U = torch.full((width,), 1e-6)
    return [NumberFeatures(bytes([first + row]), loc_U[row], scale_U, targets[row]) for row in range(rows)]


def error(model, entries):
    loc_U = torch.stack([entry.loc_U for entry in entries])
    targets = torch.tensor([entry.target for entry in entries])
    with torch.no_grad():
        loc_Y = torch.nn.functional.linear(loc_U, model.action.number.weight, model.action.number.bias)[:, 0]
    return float((loc_Y - targets).abs().median())


def batch_of(rows, **options):
    return Collator(0, **options)(rows)


def sentence(*ids, value):
    """Words, then a number, of which the number alone is learned."""
    count = len(ids)
    return Encoded([*ids, NUM], [0.0] * count + [value], [-100] * count + [NUM], [count + 1])


def keys(following, batch):
    forwarded = {name: tensor for name, tensor in batch.items() if name != "labels"}
    with torch.no_grad():
        outputs = following.model(**forwarded, use_cache=False)
    return {number.key: number for number in following.read(batch, outputs)}


def test_the_head_follows_features_that_have_moved(model, following):
    """Rows that come again replace what they were, so that a shift and a stretch leave no trace."""
    before, after = numbers(model), numbers(model, shift=3.0, stretch=0.5)
    following.add(before)
    following.solve()
    assert error(model, before) < 0.05
    assert error(model, after) > 0.3
    following.add(after)
    assert len(following) == 80
    following.solve()
    assert error(model, after) < 0.05


def test_only_the_latest_are_kept(model):
    following = FollowingHead(model, model, every=1, capacity=50)
    following.add(numbers(model, rows=40))
    following.add(numbers(model, rows=40, shift=3.0, first=100))
    assert len(following) == 50
    following.solve()
    assert error(model, numbers(model, rows=40, shift=3.0)) < 0.1


def test_the_latest_say_where_the_features_are_now(model, following):
    """All features have shrunk, and only some rows have come again since."""
    before, after = numbers(model, rows=200), numbers(model, rows=200, stretch=0.5)
    following.add(before)
    following.add(after[:70])
    following.solve()
    assert error(model, after[100:]) < 0.05
    assert error(model, before) > 0.3


def test_too_few_numbers_and_equal_ones_change_nothing(model, following):
    head = [parameter.clone() for parameter in number_head(model)]
    following.solve()
    following.add(numbers(model, rows=15))
    following.solve()
    following.add([entry._replace(target=1.0) for entry in numbers(model)])
    following.solve()
    assert all(map(torch.equal, head, number_head(model)))


def test_a_row_is_known_again_padded_or_packed(following):
    short, long = sentence(5, 6, value=40.0), sentence(5, 6, 7, 8, value=50.0)
    alone = keys(following, batch_of([short]))
    padded = keys(following, batch_of([long, short]))
    (joined,) = pack([long, short], 64)
    packed = keys(following, batch_of([joined], packed=True))
    assert len(padded) == 2
    assert alone.keys() < padded.keys()
    assert padded.keys() == packed.keys()
    for key, number in padded.items():
        assert packed[key].target == number.target
        torch.testing.assert_close(packed[key].loc_U, number.loc_U, rtol=1e-4, atol=1e-5)
    another = keys(following, batch_of([dataclasses.replace(short, numeric_values=[0.0, 0.0, 41.0])]))
    assert not another.keys() & alone.keys()


def test_rows_without_numbers_add_nothing(following):
    words = Encoded([5, 6, 7], [0.0] * 3, [-100, 6, 7], [3])
    assert keys(following, batch_of([words])) == {}


def test_a_checkpoint_holds_all_of_it(model, following):
    following.add(numbers(model))
    copy = FollowingHead(model, model, every=1)
    copy.load_state_dict(following.state_dict())
    following.solve()
    solved = [parameter.clone() for parameter in number_head(model)]
    with torch.no_grad():
        model.action.number.weight.zero_()
    copy.solve()
    assert all(map(torch.equal, solved, number_head(model)))
    empty = FollowingHead(model, model, every=1)
    copy.load_state_dict(empty.state_dict())
    assert len(copy) == 0


@pytest.mark.parametrize("moves", [True, False])
def test_words_move_the_features_before_a_number_only_if_they_may(model, moves):
    model.config.number_token_gradient = moves
    model.config.reg_loss_weight, model.config.softmax_loss_weight = 0.0, 1.0
    labels = torch.tensor([[-100, 6, NUM, 7]])
    values = torch.tensor([[0.0, 0.0, 5.0, 0.0]], dtype=torch.float64)
    features = []
    hook = model.abduction.register_forward_pre_hook(
        lambda module, inputs: features.append(inputs[0]) or inputs[0].retain_grad()
    )
    model(input_ids=torch.tensor([[5, 6, NUM, 7]]), numeric_values=values, labels=labels).loss.backward()
    hook.remove()
    pulls = features[0].grad[0].abs().sum(-1)  # (T,)
    assert (pulls[[0, 2]] > 0).all()
    assert (pulls[1] > 0) == moves
    assert model.action.bias.grad[NUM] != 0
