"""One-vs-Rest between a label and its rivals: who they are, where they balance, and exactly that gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from causal_qwen.kernels import rivals as search
from causal_qwen.kernels.rivals import rivals_of
from causal_qwen.losses import balanced_cause
from conftest import tiny_causal
from ovr_problems import NAMES, assert_same, call, evaluate, problem

UNUSED = ("scale_U", "balance", "scale_U0")


def tail_slope(distance, scale, bound):
    """∂(−log P)/∂d, P = atan2(scale, d)/π, of one score."""
    theta = math.atan2(scale, distance)
    return min(scale / ((scale**2 + distance**2) * theta), bound)


def pull(heights, cause, scale, bound):
    """∂L/∂loc_S of the label, which is first, and of its rivals."""
    rivals = [tail_slope(height + cause, scale, bound) for height in heights[1:]]
    return [-tail_slope(-(heights[0] + cause), scale, bound), *rivals]


def stated(inputs, labels, *, rivals, scale, bound):
    """The loss and the stated gradient, score by score."""
    leaves = {k: v.detach().requires_grad_() for k, v in inputs.items()}
    height = leaves["loc_U"] @ leaves["weight"].T + leaves["bias"] - leaves["threshold"]
    loss, slopes, common = 0.0, torch.zeros_like(height), torch.zeros(len(labels), dtype=torch.float64)
    for row, label in enumerate(labels.tolist()):
        others = [k for k in height[row].argsort(descending=True).tolist() if k != label]
        words = [label, *others[:rivals]]
        heights = height[row, words].tolist()
        balance = balanced_cause(
            torch.tensor([heights], dtype=torch.float64), scale=scale, gradient_bound=bound
        ).item()
        limit = math.inf if bound is None else bound
        slopes[row, words] = torch.tensor(pull(heights, balance, scale, limit), dtype=torch.float64)
        foreseen = leaves["loc_U0"][row].item()
        common[row] = 0.1 * max(-limit, min(limit, sum(pull(heights, foreseen, scale, limit))))
        distances = [-(heights[0] + foreseen), *(above + foreseen for above in heights[1:])]
        loss -= sum(math.log(math.atan2(scale, d) / math.pi) for d in distances)
    torch.autograd.backward((height, leaves["loc_U0"]), (slopes / len(labels), common / len(labels)))
    gradients = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}
    return torch.tensor(loss / len(labels), dtype=torch.float64), gradients


@pytest.mark.parametrize("impl", ["reference", "fused", "sampled"])
@pytest.mark.parametrize(("scale", "bound"), [(0.1, 0.1), (0.1, None), (0.02, 0.5), (2.0, 0.01)])
def test_loss_and_gradient_are_the_stated_ones(impl, scale, bound):
    inputs, labels = problem(tokens=20, vocab=200, width=8)
    options = {"rivals": 16, "rival_scale": scale, "gradient_bound": bound}
    expected = stated(inputs, labels, rivals=16, scale=scale, bound=bound)
    assert_same(evaluate(inputs, labels, impl, dtype=torch.float64, **options), expected, 1e-9)
    loss, gradients = evaluate(inputs, labels, impl, **options)
    assert_same((loss, gradients), expected, 2e-3 if bound is None else 1e-4)
    assert all(gradients[name].eq(0).all() for name in UNUSED)


def test_without_a_bound_it_is_the_gradient_of_the_least_loss_over_common_causes():
    """A balanced cause is a stationary point, so that its own movement costs nothing."""
    inputs, labels = problem(tokens=6, vocab=30, width=4, seed=3)
    _, gradients = evaluate(inputs, labels, "fused", dtype=torch.float64, rivals=29)

    def least(weight):
        height = inputs["loc_U"] @ weight.T + inputs["bias"] - inputs["threshold"]
        words = rivals_of(
            inputs["loc_U"], weight, labels, offset=inputs["bias"] - inputs["threshold"], count=29
        )
        cause = balanced_cause(height.gather(1, words), scale=0.05)
        balanced = inputs | {"weight": weight, "loc_U0": cause}
        return call(balanced, labels, "fused", rivals=29).item()

    for row, column in ((0, 0), (7, 2), (int(labels[0]), 1)):
        step = torch.zeros_like(inputs["weight"])
        step[row, column] = 1e-5
        numeric = (least(inputs["weight"] + step) - least(inputs["weight"] - step)) / 2e-5
        assert numeric == pytest.approx(gradients["weight"][row, column].item(), rel=1e-4, abs=1e-7)


def test_order_and_height_learn_apart():
    inputs, labels = problem(tokens=20, vocab=200, width=8)
    options = {"dtype": torch.float64, "rivals": 16, "gradient_bound": 0.1}
    _, gradients = evaluate(inputs, labels, "fused", **options)
    assert abs(gradients["bias"].sum()) < 1e-12 < gradients["bias"].abs().max()
    # Another common cause changes its own gradient, and nothing of the words'.
    _, elsewhere = evaluate(inputs | {"loc_U0": inputs["loc_U0"] - 30}, labels, "fused", **options)
    for name in ("loc_U", "weight", "bias", "threshold"):
        torch.testing.assert_close(elsewhere[name], gradients[name], rtol=0, atol=0)
    assert (elsewhere["loc_U0"] < 0).all(), "far below, every label pulls"
    assert (gradients["loc_U0"] > 0).any()


@settings(deadline=None, max_examples=60)
@given(
    heights=st.lists(st.floats(-30, 30), min_size=2, max_size=12),
    scale=st.floats(1e-3, 3),
    bound=st.none() | st.floats(1e-3, 10),
)
def test_a_label_and_its_rivals_balance(heights, scale, bound):
    limit = math.inf if bound is None else bound
    cause = balanced_cause(
        torch.tensor([heights], dtype=torch.float64), scale=scale, gradient_bound=bound
    ).item()
    slopes = pull(heights, cause, scale, limit)
    assert abs(sum(slopes)) <= 1e-6 * max(map(abs, slopes))
    # Where the root is the only one, so does another solver find it.
    grid = [cause + 0.5 * scale * step for step in range(-40, 41) if step]
    if all((sum(pull(heights, u, scale, limit)) > 0) == (u > cause) for u in grid):
        other = brentq(lambda u: sum(pull(heights, u, scale, limit)), grid[0], grid[-1], xtol=1e-12)
        assert sum(pull(heights, other, scale, limit)) == pytest.approx(0, abs=1e-6 * max(map(abs, slopes)))


def test_float32_balances_as_float64():
    height = 8 * torch.randn(400, 65, generator=torch.Generator().manual_seed(0))
    narrow, wide = (balanced_cause(h, scale=0.1, gradient_bound=0.1) for h in (height, height.double()))
    torch.testing.assert_close(narrow.double(), wide, rtol=0, atol=2e-3)


@pytest.mark.parametrize("elements", [1, 130, 1 << 21])
def test_rivals_are_the_highest_others(elements, monkeypatch):
    monkeypatch.setattr(search, "BLOCK_ELEMENTS", elements)
    inputs, labels = problem(tokens=11, vocab=60, width=5)
    words = rivals_of(inputs["loc_U"], inputs["weight"], labels, offset=inputs["bias"], count=7)
    height = inputs["loc_U"] @ inputs["weight"].T + inputs["bias"]
    for row, label in enumerate(labels.tolist()):
        others = [k for k in height[row].argsort(descending=True).tolist() if k != label]
        assert words[row].tolist() == [label, *others[:7]]


def test_a_small_vocabulary_has_fewer_rivals():
    inputs, labels = problem(tokens=4, vocab=3, width=2)
    few, many = (evaluate(inputs, labels, "fused", rivals=count) for count in (2, 64))
    assert_same(many, few, 0)


def test_ignored_labels_have_no_gradient_and_do_not_count():
    inputs, labels = problem()
    keep = torch.tensor([True, False, True] * 4)
    kept = {k: v[keep] if v.shape[0] == 12 else v for k, v in inputs.items()}
    options = {"dtype": torch.float64, "rivals": 5, "gradient_bound": 0.1}
    expected, expected_gradients = evaluate(kept, labels[keep], "fused", **options)
    loss, gradients = evaluate(inputs, torch.where(keep, labels, -100), "fused", **options)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert gradients["loc_U"][~keep].eq(0).all()
    torch.testing.assert_close(gradients["weight"], expected_gradients["weight"], rtol=1e-12, atol=1e-14)
    nothing, zero = evaluate(inputs, torch.full_like(labels, -100), "fused", **options)
    assert nothing == 0
    assert all(zero[name].eq(0).all() for name in NAMES)


def test_autocast_and_narrow_weights_keep_float32():
    inputs, labels = problem()
    inputs["weight"] = inputs["weight"].bfloat16().double()
    expected, gradients = evaluate(inputs, labels, "fused", rivals=5, gradient_bound=0.1)
    leaves = {k: v.float().requires_grad_() for k, v in inputs.items()}
    leaves["weight"] = inputs["weight"].bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = call(leaves, labels, "fused", rivals=5, gradient_bound=0.1)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(leaves["loc_U"].grad.double(), gradients["loc_U"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rivals": 0}, "rivals is 0; at least 1 word stands against a label, or None for all"),
        ({"rivals": 4, "rival_scale": 0.0}, "rival_scale is 0.0; it must be above 0"),
        ({"rivals": 4, "rival_scale": math.nan}, "rival_scale is nan; it must be above 0"),
    ],
)
def test_rivals_without_meaning_are_refused(options, message):
    inputs, labels = problem()
    with pytest.raises(ValueError, match=message):
        call(inputs, labels, "fused", **options)


def test_the_configuration_chooses_the_rivals_of_a_model():
    ids = torch.tensor([[3, 7, 9, 4, 11]])
    moved = {}
    for rivals in (None, 3):
        torch.manual_seed(0)
        model = tiny_causal(ovr_rivals=rivals, ovr_rival_scale=0.5, ovr_gradient_bound=0.1)
        model(input_ids=ids, labels=ids).loss.backward()
        moved[rivals] = int(model.action.threshold.grad.ne(0).sum())
        assert model.abduction.scale.bias.grad.ne(0).any() == (rivals is None)
    # Four positions, each with a label and three others.
    assert moved[3] <= 16 < moved[None]
