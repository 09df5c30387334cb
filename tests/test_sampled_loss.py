"""Sampled negatives are unbiased; the number's loss is its gated density."""

import math

import pytest
import scipy.stats
import torch

from causal_qwen.cauchy import Cauchy
from causal_qwen.losses import number_gate, number_loss
from ovr_problems import NAMES, call, evaluate, problem

# Sampled negatives


def test_sampled_loss_and_gradients_are_unbiased():
    """z = (mean of the draws − exact)/standard error is standard normal for each of ~500 numbers: |z| < 5."""
    inputs, labels = problem(tokens=4, vocab=40, width=3)
    exact = evaluate(inputs, labels, "reference", dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    draws = []
    for _ in range(600):
        loss, grads = evaluate(
            inputs,
            labels,
            "sampled",
            dtype=torch.float64,
            num_negatives=9,
            generator=generator,
        )
        draws.append(torch.cat([loss.reshape(1), *(grads[name].flatten() for name in NAMES)]))
    draws = torch.stack(draws)  # (600, numbers)
    expected = torch.cat([exact[0].reshape(1), *(exact[1][name].flatten() for name in NAMES)])
    error = draws.std(0) / math.sqrt(len(draws))
    varies = error > 1e-12
    z = (draws.mean(0) - expected)[varies] / error[varies]
    assert z.abs().max() < 5
    assert 0.7 < z.std() < 1.3, "the draws vary as much as they say"
    torch.testing.assert_close(draws.mean(0)[~varies], expected[~varies], rtol=1e-9, atol=1e-12)
    assert varies.sum() > 200


def test_sampled_follows_its_generator():
    inputs, labels = problem(vocab=400)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return call(inputs, labels, "sampled", num_negatives=20, generator=generator).item()

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    torch.manual_seed(5)
    first = call(inputs, labels, "sampled", num_negatives=20).item()
    torch.manual_seed(5)
    assert call(inputs, labels, "sampled", num_negatives=20).item() == first


def test_sampled_always_holds_the_labels_and_the_number_token():
    inputs, labels = problem(tokens=3, vocab=400)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        _, grads = evaluate(inputs, labels, "sampled", num_negatives=5, num_token_id=399, generator=generator)
        touched = grads["weight"].abs().sum(1).nonzero().squeeze(1)
        assert {*labels.tolist(), 399} <= set(touched.tolist())
        assert len(touched) <= 3 + 1 + 5


def test_options_without_meaning_are_named():
    inputs, labels = problem(vocab=50)
    for match, options in {
        "impl is 'dense'": {"impl": "dense"},
        "block_size is 0": {"impl": "fused", "block_size": 0},
        "num_negatives is 0": {"impl": "sampled", "num_negatives": 0},
        "num_token_id is 50": {"impl": "sampled", "num_token_id": 50},
    }.items():
        with pytest.raises(ValueError, match=match):
            call(inputs, labels, **options)
    for wrong in (50, -1):
        for impl in ("reference", "fused", "sampled"):
            with pytest.raises(ValueError, match=f"a label is {wrong}; W has 50 rows"):
                call(inputs, torch.full_like(labels, wrong), impl)


# The number


def test_number_loss_is_the_gated_density():
    loc = torch.tensor([0.5, -1.0], requires_grad=True)
    law = Cauchy(loc, torch.tensor([2.0, 0.1]))
    target, gate = torch.tensor([3.0, -1.2]), torch.tensor([0.25, 1.0])
    loss = number_loss(law, target, gate)
    expected = -gate.numpy() * scipy.stats.cauchy.logpdf(target, loc.detach(), law.scale)
    assert loss.item() == pytest.approx(expected.sum() / 2, rel=1e-5)
    assert number_loss(law, target, gate, num_items=8).item() == pytest.approx(expected.sum() / 8, rel=1e-5)
    loss.backward()
    assert torch.isfinite(loc.grad).all()


def test_number_loss_of_no_numbers_is_zero_with_zero_gradients():
    loc = torch.zeros(0, requires_grad=True)
    loss = number_loss(Cauchy(loc, torch.ones(0)), torch.zeros(0), torch.ones(0))
    loss.backward()
    assert loss == 0
    assert loc.grad.shape == (0,)


def test_gate_runs_from_expectation_to_one():
    prob = torch.tensor([0.0, 0.3, 1.0], requires_grad=True)
    assert number_gate(prob, alpha=0.0).tolist() == prob.tolist()
    assert number_gate(prob, alpha=1.0).tolist() == [1.0, 1.0, 1.0]
    assert number_gate(prob, alpha=0.5)[1].item() == pytest.approx(0.65)
    assert not number_gate(prob, alpha=0.5, gradient=False).requires_grad
