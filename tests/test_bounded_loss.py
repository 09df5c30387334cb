"""One-vs-Rest with ∂L/∂loc_S cut off at a bound: the loss as it is, and exactly that gradient, by every
implementation.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from causal_qwen.cauchy import Cauchy
from causal_qwen.heads import token_scores
from causal_qwen.losses import ovr_terms
from conftest import tiny_causal
from ovr_problems import NAMES, assert_same, call, evaluate, problem

IMPLEMENTATIONS = ["reference", "fused", "sampled"]  # "sampled" takes the whole of so small a vocabulary


def stated(inputs, labels, bound, num_items=None):
    """The loss and the stated gradient: ∂/∂loc_S by autograd, cut off, then the chain rule."""
    leaves = {k: v.detach().requires_grad_() for k, v in inputs.items()}
    U, U0 = (Cauchy(leaves[f"loc_{name}"], leaves[f"scale_{name}"]) for name in ("U", "U0"))
    S = token_scores(U, U0, leaves["weight"], bias=leaves["bias"], balance=leaves["balance"].abs())
    height = S.loc - leaves["threshold"]
    law = Cauchy(height.detach().requires_grad_(), S.scale.detach().requires_grad_())
    loss = ovr_terms(law, torch.zeros_like(height), labels).sum()
    by_loc, by_scale = torch.autograd.grad(loss, (law.loc, law.scale))
    num_items = len(labels) if num_items is None else num_items
    slopes = by_loc.clamp(-bound, bound) / num_items, by_scale / num_items
    torch.autograd.backward((height, S.scale), slopes)
    share = (by_loc.abs() > bound).double().mean().item()
    return (loss.detach() / num_items, {k: v.grad for k, v in leaves.items()}), share


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("bound", [1e-6, 0.05, 1.0, 30.0])
def test_loss_is_exact_and_its_gradient_is_the_stated_one(impl, bound):
    inputs, labels = problem(tokens=20, vocab=200, width=8, sharp=100.0)
    expected, share = stated(inputs, labels, bound)
    assert 0 < share <= 1, "the bound binds somewhere"
    assert_same(evaluate(inputs, labels, impl, dtype=torch.float64, gradient_bound=bound), expected, 1e-11)
    assert_same(evaluate(inputs, labels, impl, gradient_bound=bound), expected, 1e-4)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(1, 40),
    width=st.integers(1, 7),
    block=st.none() | st.integers(1, 50),
    bound=st.floats(1e-6, 1e6),
    seed=st.integers(0, 1000),
)
def test_the_walk_bounds_as_the_reference_on_any_shape(tokens, vocab, width, block, bound, seed):
    inputs, labels = problem(tokens, vocab, width, seed=seed, sharp=30.0)
    options = {"dtype": torch.float64, "gradient_bound": bound}
    loss, expected = evaluate(inputs, labels, "reference", **options)
    fused = evaluate(inputs, labels, "fused", block_size=block, **options)
    assert fused[0].item() == pytest.approx(loss.item(), rel=1e-12)
    for name in NAMES:
        torch.testing.assert_close(fused[1][name], expected[name], rtol=1e-9, atol=1e-11 * loss.item())


@pytest.mark.parametrize("impl", ["fused", "sampled"])
def test_a_bound_that_binds_nowhere_changes_no_bit(impl):
    inputs, labels = problem(tokens=20, vocab=200, width=8)
    free, bounded = (evaluate(inputs, labels, impl, gradient_bound=bound) for bound in (None, 1e30))
    assert bounded[0] == free[0]
    assert all(torch.equal(bounded[1][name], free[1][name]) for name in NAMES)


def test_a_bound_that_binds_nowhere_leaves_the_reference():
    inputs, labels = problem(tokens=20, vocab=200, width=8)
    free, bounded = (
        evaluate(inputs, labels, "reference", dtype=torch.float64, gradient_bound=bound)
        for bound in (None, 1e30)
    )
    assert_same(bounded, free, 1e-12)


def test_one_score_is_steep_and_bounded_in_its_own_unit():
    """The slope in loc_S is 2/(π·scale_S) at the threshold; the one in log scale_S is at most 1 anyway."""
    distance = torch.linspace(-30, 30, 6001, dtype=torch.float64).requires_grad_()
    scale = torch.full_like(distance, 1e-3).detach().requires_grad_()
    S = Cauchy(distance[:, None], scale[:, None])
    labels = torch.zeros(6001, dtype=torch.long)
    for bound, steepest in ((None, 100.0), (1.0, 1.0), (0.1, 0.1)):
        terms = ovr_terms(S, torch.zeros(1, dtype=torch.float64), labels, gradient_bound=bound)
        by_loc, by_scale = torch.autograd.grad(terms.sum(), (distance, scale))
        assert by_loc.abs().max() >= steepest
        assert bound is None or by_loc.abs().max() == bound
        assert (scale * by_scale).abs().max() <= 1


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_bound_is_of_a_positions_own_sum(impl):
    """Before it is divided, and before a weight of the loss multiplies it."""
    inputs, labels = problem(sharp=100.0)
    expected, _ = stated(inputs, labels, 0.2, num_items=7)
    leaves = {k: v.detach().requires_grad_() for k, v in inputs.items()}
    (5 * call(leaves, labels, impl, gradient_bound=0.2, num_items=7)).backward()
    for name in NAMES:
        torch.testing.assert_close(leaves[name].grad, 5 * expected[1][name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_ignored_labels_have_no_gradient_and_do_not_count(impl):
    inputs, labels = problem(sharp=100.0)
    keep = torch.tensor([True, False, True] * 4)
    kept = {k: v[keep] if v.shape[0] == 12 else v for k, v in inputs.items()}
    expected, _ = stated(kept, labels[keep], 0.2)
    for name in ("loc_U", "scale_U", "loc_U0", "scale_U0"):
        inputs[name][~keep] = math.nan
    labels = torch.where(keep, labels, -100)
    loss, grads = evaluate(inputs, labels, impl, dtype=torch.float64, gradient_bound=0.2)
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-12)
    assert grads["loc_U"][~keep].eq(0).all()
    torch.testing.assert_close(grads["loc_U"][keep], expected[1]["loc_U"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(grads["weight"], expected[1]["weight"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("impl", ["reference", "fused"])
def test_autocast_does_not_touch_a_bounded_loss(impl):
    inputs, labels = problem(sharp=100.0)
    expected, grads = evaluate(inputs, labels, impl, gradient_bound=0.2)
    leaves = {k: v.float().requires_grad_() for k, v in inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = call(leaves, labels, impl, gradient_bound=0.2)
    loss.backward()
    assert loss.item() == expected.item()
    assert all(torch.equal(leaves[name].grad.double(), grads[name]) for name in NAMES)


def test_drawn_negatives_estimate_the_bounded_gradient():
    """z = (mean of the draws − stated)/standard error is standard normal for each number: |z| < 5."""
    inputs, labels = problem(tokens=4, vocab=40, width=3, sharp=30.0)
    expected, _ = stated(inputs, labels, 0.1)
    generator = torch.Generator().manual_seed(3)
    draws = []
    for _ in range(400):
        options = {"num_negatives": 9, "generator": generator, "gradient_bound": 0.1}
        _, grads = evaluate(inputs, labels, "sampled", dtype=torch.float64, **options)
        draws.append(torch.cat([grads[name].flatten() for name in NAMES]))
    draws = torch.stack(draws)  # (400, numbers)
    error = draws.std(0) / math.sqrt(len(draws))
    varies = error > 1e-12
    stated_gradient = torch.cat([expected[1][name].flatten() for name in NAMES])
    assert ((draws.mean(0) - stated_gradient)[varies] / error[varies]).abs().max() < 5


def test_a_second_backward_is_bounded_too():
    inputs, labels = problem(sharp=100.0)
    leaves = {k: v.detach().requires_grad_() for k, v in inputs.items()}
    loss = call(leaves, labels, "fused", gradient_bound=0.2)
    loss.backward(retain_graph=True)
    once = {k: v.grad.clone() for k, v in leaves.items()}
    loss.backward()
    for name in NAMES:
        torch.testing.assert_close(leaves[name].grad, 2 * once[name])


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_without_meaning_is_refused(bound):
    inputs, labels = problem()
    with pytest.raises(ValueError, match=r"gradient_bound is .*; it must be above 0, or None"):
        call(inputs, labels, "fused", gradient_bound=bound)


def test_the_configuration_bounds_the_loss_of_a_model():
    ids = torch.tensor([[3, 7, 9, 4, 11]])
    grads = {}
    for bound in (None, 1e-3):
        torch.manual_seed(0)
        model = tiny_causal(ovr_gradient_bound=bound)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads[bound] = loss.item(), model.action.threshold.grad
    assert grads[None][0] == grads[1e-3][0]
    # Four positions, each with |∂/∂C| ≤ bound, averaged.
    assert grads[1e-3][1].abs().max() <= 1e-3 * (1 + 1e-5) < grads[None][1].abs().max()
