"""One-vs-Rest against scipy and float64, by every implementation, in value and in every gradient."""

import math

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ovr_problems import NAMES, assert_same, call, evaluate, problem, relative


def test_reference_is_the_equation():
    inputs, labels = problem(tokens=3, vocab=5)
    x = {name: value.numpy() for name, value in inputs.items()}
    total = 0.0
    for i, label in enumerate(labels.tolist()):
        for k in range(5):
            loc = x["weight"][k] @ x["loc_U"][i] + x["bias"][k] + x["loc_U0"][i]
            scale = abs(x["weight"][k]) @ x["scale_U"][i] + x["scale_U0"][i]
            law = scipy.stats.cauchy(loc, scale + abs(x["balance"][k]) * x["scale_U"][i].mean())
            total -= law.logsf(x["threshold"][k]) if k == label else law.logcdf(x["threshold"][k])
    assert call(inputs, labels, "reference").item() == pytest.approx(total / 3, rel=1e-12)


@pytest.mark.parametrize("impl", ["fused", "sampled"])
def test_exact_in_value_and_every_gradient(impl):
    # "sampled" draws nothing when it may take the whole vocabulary.
    inputs, labels = problem(tokens=40, vocab=900, width=32)
    exact = evaluate(inputs, labels, "reference", dtype=torch.float64)
    assert_same(evaluate(inputs, labels, impl), exact)
    assert_same(evaluate(inputs, labels, impl, dtype=torch.float64), exact, tolerance=1e-12)


def test_sharp_scores_are_no_less_exact_than_the_reference():
    """Calibration makes scales of 1e-3 against scores of 10: float32 rounds d/scale in every version."""
    inputs, labels = problem(tokens=40, vocab=900, width=32, sharp=1e3)
    exact = evaluate(inputs, labels, "reference", dtype=torch.float64)
    dense = evaluate(inputs, labels, "reference")
    fused = evaluate(inputs, labels, "fused")
    assert relative(fused[0], exact[0]) <= 1e-6
    for name in NAMES:
        error = relative(fused[1][name], exact[1][name])
        assert error <= max(1e-5, 1.5 * relative(dense[1][name], exact[1][name])), name


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(1, 40),
    width=st.integers(1, 7),
    block=st.none() | st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_fused_is_exact_on_any_shape_and_block(tokens, vocab, width, block, seed):
    inputs, labels = problem(tokens, vocab, width, seed=seed)
    exact = evaluate(inputs, labels, "reference", dtype=torch.float64)
    fused = evaluate(inputs, labels, "fused", dtype=torch.float64, block_size=block)
    assert fused[0].item() == pytest.approx(exact[0].item(), rel=1e-12)
    for name in NAMES:
        # A gradient may cancel to nothing: what is left is measured against the loss.
        torch.testing.assert_close(fused[1][name], exact[1][name], rtol=1e-9, atol=1e-12 * exact[0].item())


def test_tokens_are_cut_into_blocks_too(monkeypatch):
    monkeypatch.setattr("causal_qwen.kernels.ovr.CPU_BLOCK_ELEMENTS", 64)
    monkeypatch.setattr("causal_qwen.kernels.ovr.ROWS_FOR_MANY_TOKENS", 16)
    inputs, labels = problem(tokens=11, vocab=37)  # 3 blocks of tokens, the last one short
    exact = evaluate(inputs, labels, "reference", dtype=torch.float64)
    assert_same(evaluate(inputs, labels, "fused", dtype=torch.float64, block_size=16), exact, tolerance=1e-12)


def test_gradcheck():
    inputs, labels = problem(tokens=3, vocab=7, width=2)
    leaves = [inputs[name].requires_grad_() for name in NAMES]

    def loss(*values):
        return call(dict(zip(NAMES, values, strict=True)), labels, "fused", block_size=3)

    assert torch.autograd.gradcheck(loss, leaves)
    (first,) = torch.autograd.grad(loss(*leaves), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()


@pytest.mark.parametrize("shift", [-1e12, -1e6, -30.0, 30.0, 1e6, 1e12])
def test_both_tails(shift):
    """Every token far below its threshold, or far above: neither loss nor gradient may vanish or overflow."""
    inputs, labels = problem()
    inputs["loc_U0"] += shift
    exact = evaluate(inputs, labels, "reference", dtype=torch.float64)
    fused = evaluate(inputs, labels, "fused")
    assert all(torch.isfinite(gradient).all() for gradient in fused[1].values())
    assert_same(fused, exact, tolerance=1e-5)


def test_weights_at_zero_have_no_slope_and_balance_at_zero_has_one():
    inputs, labels = problem()
    inputs["weight"][:, 0] = 0
    inputs["balance"][:] = 0
    exact = evaluate(inputs, labels, "reference", dtype=torch.float64)
    assert_same(evaluate(inputs, labels, "fused"), exact)
    assert exact[1]["balance"].abs().min() > 0


@pytest.mark.parametrize("impl", ["reference", "fused", "sampled"])
def test_ignored_labels_cost_nothing(impl):
    inputs, labels = problem()
    keep = torch.tensor([True, False, True] * 4)
    expected = call({k: v[keep] if v.shape[0] == 12 else v for k, v in inputs.items()}, labels[keep], impl)
    labels = torch.where(keep, labels, -100)
    for name in ("loc_U", "scale_U", "loc_U0", "scale_U0"):
        inputs[name][~keep] = math.nan  # what is not looked at cannot do harm
    loss, grads = evaluate(inputs, labels, impl, dtype=torch.float64)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert grads["loc_U"][~keep].eq(0).all()
    assert torch.isfinite(grads["weight"]).all()


@pytest.mark.parametrize("impl", ["reference", "fused", "sampled"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_no_valid_label_is_zero_with_zero_gradients(impl, tokens):
    inputs, _ = problem(tokens=5)
    inputs = {k: v[:tokens] if v.shape[0] == 5 else v for k, v in inputs.items()}
    loss, grads = evaluate(inputs, torch.full((tokens,), -100), impl)
    assert loss == 0
    assert all(gradient.eq(0).all() for gradient in grads.values())


@pytest.mark.parametrize("num_items", [7, torch.tensor(7)])
@pytest.mark.parametrize("impl", ["reference", "fused"])
def test_num_items_is_the_divisor(impl, num_items):
    inputs, labels = problem()
    mean, grads = evaluate(inputs, labels, impl)
    total, total_grads = evaluate(inputs, labels, impl, num_items=num_items)
    assert total.item() == pytest.approx(mean.item() * 12 / 7, rel=1e-6)
    torch.testing.assert_close(total_grads["weight"], grads["weight"] * 12 / 7, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("impl", ["reference", "fused"])
def test_eight_batches_of_one_are_one_batch_of_eight(impl):
    inputs, labels = problem(tokens=8)
    labels[3] = -100
    expected = evaluate(inputs, labels, impl)
    leaves = {k: v.float().requires_grad_() for k, v in inputs.items()}
    total = 0.0
    for i in range(8):
        one = {k: v[i : i + 1] if v.shape[0] == 8 else v for k, v in leaves.items()}
        loss = call(one, labels[i : i + 1], impl, num_items=7)
        loss.backward()
        total += loss.detach().double()
    assert_same((total, {k: v.grad.double() for k, v in leaves.items()}), expected, tolerance=2e-6)


def test_bfloat16_weight_is_read_exactly_and_accumulated_in_float32():
    inputs, labels = problem(tokens=40, vocab=300, width=32)
    inputs["weight"] = inputs["weight"].bfloat16().double()
    exact = evaluate(inputs, labels, "reference", dtype=torch.float64)
    leaves = {k: v.to(torch.bfloat16 if k == "weight" else torch.float32) for k, v in inputs.items()}
    leaves = {k: v.requires_grad_() for k, v in leaves.items()}
    loss = call(leaves, labels, "fused", block_size=64)
    loss.backward()
    assert leaves["weight"].grad.dtype == torch.bfloat16
    # One rounding at the end: half a unit in the last of bfloat16's 8 bits.
    torch.testing.assert_close(leaves["weight"].grad.double(), exact[1]["weight"], rtol=2**-8, atol=1e-9)
    grads = {k: v.grad.double() for k, v in leaves.items() if k != "weight"}
    assert_same((loss.detach().double(), grads), (exact[0], {k: exact[1][k] for k in grads}))


@pytest.mark.parametrize("impl", ["reference", "fused"])
def test_autocast_changes_nothing(impl):
    inputs, labels = problem()
    expected, grads = evaluate(inputs, labels, impl)
    leaves = {k: v.float().requires_grad_() for k, v in inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = call(leaves, labels, impl)
    loss.backward()
    assert loss.item() == expected.item()
    assert all(torch.equal(leaves[name].grad.double(), grads[name]) for name in NAMES)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    inputs, labels = problem()
    expected = evaluate(inputs, labels, "fused")
    leaves = {k: v.float().requires_grad_() for k, v in inputs.items()}

    def loss(*values):
        # Not leaves any more, and recomputed in backward.
        return call(dict(zip(NAMES, (v * 1 for v in values), strict=True)), labels, "fused")

    value = checkpoint(loss, *leaves.values(), use_reentrant=reentrant)
    value.backward()
    assert_same((value.detach().double(), {k: v.grad.double() for k, v in leaves.items()}), expected, 1e-7)


@pytest.mark.parametrize("frozen", [("weight",), NAMES[2:], ("loc_U", "scale_U", "loc_U0", "scale_U0")])
def test_frozen_inputs_leave_the_other_gradients_alone(frozen):
    inputs, labels = problem()
    _, expected = evaluate(inputs, labels, "fused")
    _, grads = evaluate(inputs, labels, "fused", frozen=frozen)
    assert grads.keys() == set(NAMES) - set(frozen)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in grads.items())


def test_tied_weight_gets_both_gradients():
    inputs, labels = problem()
    expected = evaluate(inputs, labels, "fused")[1]
    weight = inputs["weight"].float().requires_grad_()
    embedded = torch.nn.functional.embedding(labels, weight)  # (12, 6)
    call({k: v.float() for k, v in inputs.items()} | {"weight": weight}, labels, "fused").backward(
        retain_graph=True
    )
    head_only = weight.grad.clone()
    embedded.sum().backward()
    torch.testing.assert_close(head_only.double(), expected["weight"])
    counts = torch.bincount(labels, minlength=50)[:, None].expand(-1, 6).float()
    torch.testing.assert_close(weight.grad - head_only, counts, atol=1e-5, rtol=1e-5)


def test_a_retained_graph_can_be_walked_twice():
    inputs, labels = problem()
    leaves = {k: v.float().requires_grad_() for k, v in inputs.items()}
    loss = call(leaves, labels, "fused")
    loss.backward(retain_graph=True)
    once = {k: v.grad.clone() for k, v in leaves.items()}
    loss.backward()
    for name, value in leaves.items():
        torch.testing.assert_close(value.grad, 2 * once[name])


def test_the_weight_gradient_is_handed_over_not_copied():
    """With a copy, training would hold two more matrices of the size of W instead of one."""
    inputs, labels = problem(tokens=4, vocab=2000, width=8)
    inputs = {k: v.float() for k, v in inputs.items()}
    inputs["weight"].requires_grad_()
    seen = []
    with _Largest() as largest:
        loss = call(inputs, labels, "fused", block_size=64)
        inputs["weight"].register_hook(lambda gradient: seen.append(gradient.data_ptr()))
        loss.backward()
    assert inputs["weight"].grad.data_ptr() == seen[0]
    assert largest.count[(2000, 8)] == 1


class _Largest(TorchDispatchMode):
    """Counts the tensors of each shape that new storage is made for."""

    def __init__(self):
        super().__init__()
        self.count = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default):
            self.count[tuple(out.shape)] = self.count.get(tuple(out.shape), 0) + 1
        if isinstance(out, torch.Tensor):
            self.numel = max(getattr(self, "numel", 0), out.numel())
        return out


def test_no_tensor_over_tokens_and_vocabulary_exists():
    inputs, labels = problem(tokens=200, vocab=3000, width=4)
    leaves = {k: v.float().requires_grad_() for k, v in inputs.items()}
    with _Largest() as largest:
        call(leaves, labels, "fused", block_size=100).backward()
    assert largest.numel <= 3 * 200 * 100 < 200 * 3000


def test_nothing_is_kept_without_gradients():
    inputs, labels = problem()
    leaves = {k: v.float().requires_grad_() for k, v in inputs.items()}
    with torch.no_grad():
        loss = call(leaves, labels, "fused")
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(call(leaves, labels, "reference").item(), rel=1e-6)


def test_views_and_expanded_inputs():
    inputs, labels = problem()
    inputs["scale_U0"] = torch.tensor(0.3, dtype=torch.float64).expand(12)
    inputs["weight"] = inputs["weight"].T.contiguous().T
    inputs["loc_U"] = torch.stack([inputs["loc_U"]] * 2, -1)[..., 0]
    exact = evaluate(inputs, labels, "reference", dtype=torch.float64)
    for block in (None, 7):
        assert_same(evaluate(inputs, labels, "fused", block_size=block), exact)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_inside_torch_compile():
    inputs, labels = problem(tokens=16, vocab=300)
    labels[2] = -100
    expected = evaluate(inputs, labels, "fused")
    leaves = {k: v.float().requires_grad_() for k, v in inputs.items()}

    @torch.compile
    def loss(values):
        return 2 * call({k: v * 1 for k, v in values.items()}, labels, "fused")

    value = loss(leaves) / 2
    value.backward()
    assert_same((value.detach().double(), {k: v.grad.double() for k, v in leaves.items()}), expected, 1e-6)
