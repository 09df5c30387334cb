"""The number head in closed form, where training starts and ends."""

import pytest
import torch

from causal_qwen.calibration import refit_numbers, set_value_space, wake_numbers
from causal_qwen.cauchy import Cauchy
from conftest import tiny_causal

NUM = 258
ROWS = 80


@pytest.fixture
def model():
    model = tiny_causal(num_token_id=NUM)
    with torch.no_grad():  # causes so narrow that scale_Y is the read-out noise's
        model.abduction.scale.weight.zero_()
        model.abduction.scale.bias.fill_(-12)
        model.action.b_noise.fill_(1e-6)
    set_value_space(model, "linear", torch.arange(1.0, 100.0, dtype=torch.float64))
    return model


def rows(model, *, noise=0.0):
    """A random token, then a number that is linear in what the model infers from it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(256, generator=generator)[:ROWS], torch.full((ROWS,), NUM)], dim=1)
    with torch.no_grad():
        loc_U = model(input_ids=ids[:, :1]).loc_U[:, 0].double()  # (N, D)
    slope = torch.randn(loc_U.shape[1], dtype=torch.float64, generator=generator)
    target = loc_U @ slope / 10 + noise * torch.randn(ROWS, dtype=torch.float64, generator=generator)
    values = torch.zeros(ids.shape, dtype=torch.float64)
    values[:, 1] = model.value_space.decode(target)
    labels = torch.where(ids == NUM, ids, -100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "numeric_values": values}
    return batch | {"labels": labels}, target, slope / 10


def read(model, batch):
    with torch.no_grad():
        outputs = model(input_ids=batch["input_ids"][:, :1])
    return Cauchy(outputs.loc_Y[:, 0], outputs.scale_Y[:, 0])


def test_a_plain_start_says_nothing_yet(model):
    batch, _, _ = rows(model)
    wake_numbers(model, [batch], method="plain")
    Y = read(model, batch)
    assert model.writes_numbers
    assert Y.loc.eq(0).all()
    torch.testing.assert_close(Y.scale, torch.ones(ROWS))


def test_a_fitted_start_reads_what_is_linear_in_the_cause(model):
    batch, target, _ = rows(model)
    wake_numbers(model, [batch], method="fit")
    error = (read(model, batch).loc.double() - target).abs().median()
    assert error < 0.15 * (target - target.median()).abs().median()


def test_the_refit_replaces_a_head_that_has_not_learned(model):
    batch, target, _ = rows(model, noise=0.05)
    wake_numbers(model, [batch], method="plain")
    assert refit_numbers(model, [batch])
    Y = read(model, batch)
    assert (Y.loc.double() - target).abs().median() < 0.3 * target.abs().median()
    inside = (
        ((target - Y.loc).abs() <= Y.scale).double().mean()
    )  # quartiles hold half, by leave-one-out errors
    assert 0.3 < inside < 0.9


def test_the_refit_leaves_a_better_head_alone(model):
    """No regression on 80 rows beats the slope that made them."""
    batch, _, slope = rows(model, noise=0.05)
    wake_numbers(model, [batch], method="plain")
    with torch.no_grad():
        model.action.number.weight.copy_(slope[None])
    before = [
        p.clone() for p in (model.action.number.weight, model.action.number.bias, model.action.number_noise)
    ]
    assert not refit_numbers(model, [batch])
    now = [model.action.number.weight, model.action.number.bias, model.action.number_noise]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_few_numbers_change_nothing(model):
    batch, _, _ = rows(model)
    few = {name: tensor[:5] for name, tensor in batch.items()}
    wake_numbers(model, [few], method="plain")
    assert not refit_numbers(model, [few])
    assert not refit_numbers(model, [])
