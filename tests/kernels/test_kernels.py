"""The kernels beneath the loss and the decision head: exactness, choice of path, life without a compiler."""

import logging
import math
import subprocess
import sys
import threading

import pytest
import torch

from causal_qwen.cauchy import Cauchy, log_tail
from causal_qwen.decoder.packed import quantise
from causal_qwen.heads import ActionNetwork
from causal_qwen.kernels import decision, tail
from causal_qwen.kernels.compiled import CompiledKernel, compilation_enabled
from causal_qwen.kernels.decision import TokenScorer
from causal_qwen.kernels.native import runs_native
from causal_qwen.kernels.negatives import draw_candidates
from causal_qwen.kernels.ovr import choose_blocks
from causal_qwen.kernels.products import Matrix

# The tail block

NO_BOUND = torch.tensor([math.inf])


def tail_inputs(rows=32, columns=64, *, dtype=torch.float64):
    """d/s over 60 orders of magnitude in both tails, at sizes from 1e-12 to 1e12."""
    g = torch.Generator().manual_seed(0)
    size = 10 ** (torch.rand(rows, columns, generator=g, dtype=dtype) * 24 - 12)
    ratio = 10 ** (torch.rand(rows, columns, generator=g, dtype=dtype) * 60 - 30)
    sign = torch.randint(0, 2, (rows, columns), generator=g).to(dtype) * 2 - 1
    scale = torch.where(ratio > 1, size, size / ratio.clamp(min=1e-20))
    loc = sign * torch.where(ratio > 1, size * ratio.clamp(max=1e20), size)
    labels = torch.randint(-columns, 2 * columns, (rows,), generator=g, dtype=torch.int32)  # some outside
    return loc.float().to(dtype), scale.float().to(dtype), labels


def exact_tail(loc, scale, labels, importance):
    """The block by `log_tail` and its own gradients, in float64."""
    loc, scale = (t.to(torch.float64, copy=True).requires_grad_() for t in (loc, scale))
    is_label = torch.arange(loc.shape[1]) == labels[:, None]
    loss = -log_tail(torch.where(is_label, -loc, loc), scale) * importance
    return loss.detach(), *torch.autograd.grad(loss.sum(), (loc, scale))


@pytest.mark.parametrize("form", [tail._plain_tail, tail._fast_tail])
def test_tail_block_is_log_tail_with_its_gradients(form):
    """Elementwise, not in the norm: the fast form is within 1e-6 of float64 where float32 has the digits."""
    loc, scale, labels = tail_inputs()
    importance = torch.linspace(0.5, 3, 64)
    loss, by_loc, by_scale = exact_tail(loc, scale, labels, importance.double())
    G, H, out = loc.float(), scale.float(), torch.zeros(32, 64)
    form(G, H, out, labels, importance, NO_BOUND)
    smallest = torch.finfo(torch.float32).tiny
    torch.testing.assert_close(out.double(), loss, rtol=1e-6, atol=smallest)
    torch.testing.assert_close(G.double(), by_loc, rtol=1e-6, atol=smallest)
    torch.testing.assert_close(H.double(), by_scale, rtol=1e-6, atol=smallest)


@pytest.mark.parametrize("form", [tail._plain_tail, tail._fast_tail])
def test_a_bound_cuts_the_slope_in_loc_and_nothing_else(form):
    loc, scale, labels = tail_inputs()
    importance = torch.linspace(0.5, 3, 64)
    free, bound = ([t.float().clone() for t in (loc, scale, torch.zeros_like(loc))] for _ in range(2))
    steepest = importance * 0.3
    form(*free, labels, importance, NO_BOUND)
    form(*bound, labels, importance, steepest)
    assert torch.equal(bound[0], free[0].clamp(-steepest, steepest))
    assert not torch.equal(bound[0], free[0])
    assert torch.equal(bound[1], free[1])
    assert torch.equal(bound[2], free[2])


def test_tail_block_adds_to_the_running_loss():
    loc, scale, labels = tail_inputs(5, 7)
    loss = torch.full_like(loc, 2.0)
    expected = exact_tail(loc, scale, labels, torch.ones(7))[0] + 2
    tail.tail_block_(loc, scale, loss, labels, torch.ones(7, dtype=loc.dtype), NO_BOUND)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("distance", [3e38, 1e30, 1e-30, 0.0, -1e-30, -1e30, -3e38])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("form", [tail._plain_tail, tail._fast_tail])
def test_tail_block_is_finite_at_the_ends_of_float32(form, distance, scale):
    G, H, out = torch.full((1, 2), distance), torch.full((1, 2), scale), torch.zeros(1, 2)
    form(G, H, out, torch.tensor([1], dtype=torch.int32), torch.ones(2), NO_BOUND)
    assert torch.isfinite(G).all()
    assert torch.isfinite(H).all()
    representable = scale >= abs(distance) * torch.finfo(torch.float32).tiny
    assert torch.isfinite(out).all() or not representable, "a probability that float32 holds has a logarithm"


@pytest.mark.slow
def test_compiled_tail_block_equals_the_plain_one():
    kernel = CompiledKernel(tail._fast_tail, tail._plain_tail)
    for rows, columns in [(37, 129), (64, 256)]:
        loc, scale, labels = tail_inputs(rows, columns)
        importance = torch.linspace(0.5, 3, columns)
        loss, by_loc, by_scale = exact_tail(loc, scale, labels, importance.double())
        G, H, out = loc.float(), scale.float(), torch.zeros(rows, columns)
        kernel(G, H, out, labels, importance, NO_BOUND.expand(columns).clone())
        for ours, exact in ((out, loss), (G, by_loc), (H, by_scale)):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=torch.finfo(torch.float32).tiny)
        free = G.clone()
        G, H, out = loc.float(), scale.float(), torch.zeros(rows, columns)
        kernel(G, H, out, labels, importance, importance * 0.3)
        assert torch.equal(G, free.clamp(-importance * 0.3, importance * 0.3))
    assert not kernel.failed


def test_small_blocks_and_float64_never_compile(monkeypatch):
    monkeypatch.setattr(tail, "_tail", pytest.fail)
    for shape, dtype in (
        ((8, 64), torch.float32),
        ((512, 512), torch.float64),
        ((1, 1 << 17), torch.float32),
    ):
        block = [torch.ones(shape, dtype=dtype) for _ in range(3)]
        labels = torch.zeros(shape[0], dtype=torch.int32)
        tail.tail_block_(*block, labels, torch.ones(shape[1], dtype=dtype), NO_BOUND)


@pytest.mark.parametrize("tokens", [0, 1, 100, 2048, 10**6])
@pytest.mark.parametrize("width", [1, 896, 10**7])
def test_blocks_fit_the_cache_and_the_vocabulary(tokens, width):
    for device in (torch.device("cpu"), torch.device("cuda")):
        n, v = choose_blocks(tokens, 151_936, width, block_size=None, device=device)
        limit = 1 << (21 if device.type == "cpu" else 25)
        assert 1 <= n <= max(tokens, 1)
        assert 1 <= v <= 151_936
        assert n * v <= limit
        assert v * width <= max(limit, 64 * width)
    assert choose_blocks(tokens, 50, width, block_size=1000, device=torch.device("cpu"))[1] == 50


# The compiled kernel


def test_a_broken_compiler_is_reported_once_and_replaced(caplog, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no C++ compiler found\nsearched in vain")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    kernel = CompiledKernel(lambda x: x * 2, lambda x: x + x)
    with caplog.at_level(logging.WARNING):
        assert [kernel(i) for i in (1, 2, 3)] == [2, 4, 6]
    assert kernel.failed
    (record,) = caplog.records
    assert "no C++ compiler found" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(("name", "value"), [("CAUSAL_QWEN_COMPILE", "0"), ("TORCHDYNAMO_DISABLE", "1")])
def test_the_environment_switches_compilation_off(monkeypatch, name, value):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    assert compilation_enabled()
    monkeypatch.setenv(name, value)
    assert not compilation_enabled()
    monkeypatch.setattr(torch, "compile", pytest.fail)
    assert CompiledKernel(pytest.fail, lambda x: x + 1)(1) == 2


def test_threads_share_one_compilation(monkeypatch):
    built = []
    monkeypatch.setattr(torch, "compile", lambda fast, **_: built.append(fast) or fast)
    kernel = CompiledKernel(lambda x: x * 2, pytest.fail)
    results = []
    threads = [threading.Thread(target=lambda i=i: results.append(kernel(i))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert len(built) == 1


def test_importing_compiles_nothing():
    code = (
        "import torch; torch.compile = None; import causal_qwen.losses, causal_qwen.heads, sys;"
        "assert 'torch._inductor.codecache' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The decision head


def causes(*leading, width=24, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    return torch.randn(*leading, width, generator=g, dtype=dtype), torch.rand(
        *leading, width, generator=g, dtype=dtype
    ) + 0.01


def exact_scores(loc_U, scale_U, weight, bias, balance, loc_U0, scale_U0):
    W = weight.double()
    loc = loc_U.double() @ W.T + bias + loc_U0[..., None]
    scale = scale_U.double() @ W.abs().T + balance * scale_U.double().mean(-1, keepdim=True)
    return loc, scale + scale_U0[..., None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (0,), (40,)])
def test_token_scores_are_the_linear_law(monkeypatch, leading, dtype):
    monkeypatch.setattr(decision, "BLOCK_ROWS", 17)
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(101, 24, generator=g, dtype=torch.float64).to(dtype)
    bias, balance = torch.randn(101, generator=g), torch.rand(101, generator=g)
    loc_U, scale_U = causes(*leading, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    loc_U0, scale_U0 = torch.full(leading, -0.5), torch.full(leading, 0.25)
    loc, scale = TokenScorer(weight, bias=bias, balance=balance).scores(loc_U, scale_U, loc_U0, scale_U0)
    exact_loc, exact_scale = exact_scores(loc_U, scale_U, weight, bias, balance, loc_U0, scale_U0)
    assert loc.shape == scale.shape == (*leading, 101)
    torch.testing.assert_close(loc.double(), exact_loc, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scale.double(), exact_scale, rtol=1e-5, atol=1e-6)
    bare_loc, bare_scale = TokenScorer(weight).scores(loc_U, scale_U)
    torch.testing.assert_close(bare_loc + bias + loc_U0[..., None], loc, rtol=1e-5, atol=1e-5)
    assert (bare_scale <= scale).all()


@pytest.mark.parametrize(
    ("kind", "columns", "count"),
    [
        (kind, columns, count)
        for kind in ("float32", "bfloat16", "float16", "bytes", "bytes with a shift", "4 bits")
        for columns, count in ((64, 1), (96, 2), (32, 3), (64, 7), (45, 1), (45, 3))
        if columns % {"b": 1, "f": 1, "4": 64}[kind[0]] == 0 and (columns % 32 == 0 or "by" not in kind)
    ],
)
def test_the_native_pass_is_the_linear_law(kind, columns, count):
    weight = torch.randn(203, columns, generator=torch.Generator().manual_seed(0))
    if kind.startswith("bytes"):
        whole = (weight * 40).round().clamp(-127, 127)
        whole[:, ::32] = 127
        matrix = quantise(weight + 2 if "shift" in kind else whole / 100)
        assert (matrix.shift is None) == (kind == "bytes")
    elif kind == "4 bits":
        matrix = quantise(weight, 4)
    else:
        matrix = Matrix(weight.to(getattr(torch, kind)))
    loc_U, scale_U = torch.randn(count, columns), torch.rand(count, columns) + 0.1
    assert runs_native(matrix.weight, matrix.scale)
    loc, scale = TokenScorer(matrix).scores(loc_U, scale_U)
    W = matrix.dense().double()
    # Bytes without a shift meet the causes in 16 bits: half a level of the largest, for each column of W.
    half = W.abs().sum(-1).max().item() / 32767 / 2 if kind == "bytes" else 0.0
    for got, U, weights in ((loc, loc_U, W), (scale, scale_U, W.abs())):
        error = 1e-4 + half * U.abs().max().item()
        torch.testing.assert_close(got.double(), U.double() @ weights.T, rtol=1e-5, atol=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 49])
def test_scores_are_the_same_without_a_compiler(monkeypatch, dtype, count):
    """On any machine, at any number of positions, and whatever mode the causes were made in."""
    weight = torch.randn(203, 24, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    threshold = torch.linspace(-1, 1, 203)
    with torch.inference_mode():
        loc_U, scale_U = causes(count)
        expected = TokenScorer(weight, threshold=threshold).z_scores(loc_U, scale_U)
    monkeypatch.setenv("CAUSAL_QWEN_COMPILE", "0")
    z_scores, best = TokenScorer(weight, threshold=threshold).z_scores(loc_U, scale_U)
    torch.testing.assert_close(z_scores, expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(best, expected[1])
    assert not z_scores.requires_grad


@pytest.mark.parametrize("compiler", ["0", "1"])
def test_absolute_values_of_the_whole_matrix_are_never_stored(compiler):
    """|W| would be 64 MB; the scores of 49 positions (more than native code takes) and one block are 4 MB."""
    code = f"""
import os, resource
os.environ["CAUSAL_QWEN_COMPILE"] = "{compiler}"
import torch
from causal_qwen.kernels.decision import TokenScorer

torch.set_num_threads(1)
weight, loc, scale = torch.randn(8192, 2048), torch.randn(49, 2048), torch.rand(49, 2048)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
TokenScorer(weight[:2048]).scores(loc, scale)  # what libraries need for themselves
TokenScorer(weight[:2048]).scores(loc[:1], scale[:1])
before = peak()
TokenScorer(weight).scores(loc, scale)
TokenScorer(weight).scores(loc[:1], scale[:1])
assert peak() - before < 32 * 1024, peak() - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_choice_is_the_argmax_of_probability_without_its_ties():
    """With W = 1 a cause is its own score."""
    loc = torch.tensor([[1e8, 3e8, -2.0], [5.0, 1.0, 2.0]])  # both of the first two are certain in float32
    scale = torch.tensor([[1.0, 1.0, 1.0], [10.0, 0.1, 1.0]])
    scorer = TokenScorer(torch.eye(3), threshold=torch.tensor([0.5, 0.0, 1.0]))
    assert scorer.z_scores(loc, scale)[1].tolist() == [1, 1]
    generator = torch.Generator().manual_seed(0)
    S = Cauchy(torch.randn(50, 9, generator=generator), torch.rand(50, 9, generator=generator) + 0.1)
    for rows in (slice(0, 40), slice(0, 50)):  # natively, and in torch
        _, best = TokenScorer(torch.eye(9)).z_scores(S.loc[rows], S.scale[rows])
        assert torch.equal(best, S.sf(torch.zeros(9)).argmax(-1)[rows])


def test_the_action_network_scores_alike_with_and_without_gradients():
    action = ActionNetwork(101, 24)
    weight = torch.nn.Parameter(torch.randn(101, 24))
    with torch.no_grad():
        for parameter in (action.bias, action.balance):
            parameter.normal_()
    U, U0 = Cauchy(*causes(2, 3)), Cauchy(torch.ones(2, 3), torch.ones(2, 3))
    dense = action.scores(U, U0, weight)
    assert dense.loc.requires_grad
    with torch.no_grad():
        fast = action.scores(U, U0, weight)
    torch.testing.assert_close(fast.loc, dense.loc.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast.scale, dense.scale.detach(), rtol=1e-5, atol=1e-5)


# The negatives


def test_every_token_stands_for_itself_in_expectation():
    certain = torch.tensor([3, 17])
    generator = torch.Generator().manual_seed(0)
    total, square = torch.zeros(30, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
    for _ in range(4000):
        ids, importance = draw_candidates(certain, 30, 8, generator=generator)
        assert ids.tolist()[:2] == [3, 17]
        assert len(ids) == len(set(ids.tolist()))
        total[ids] += importance
        square[ids] += importance**2
    mean = total / 4000
    error = ((square / 4000 - mean**2).clamp(min=0) / 4000).sqrt()
    varies = error > 1e-9
    assert ((mean - 1)[varies] / error[varies]).abs().max() < 4.5
    torch.testing.assert_close(mean[~varies], torch.ones(30, dtype=torch.float64)[~varies])
    assert not varies[certain].any()


def test_stratification_beats_independent_draws():
    """Over a smooth function of the token, as losses are of frequency rank, variance is far lower."""
    values = torch.linspace(0, 1, 1000, dtype=torch.float64) ** 2
    generator = torch.Generator().manual_seed(0)
    estimates = []
    for _ in range(300):
        ids, importance = draw_candidates(torch.tensor([], dtype=torch.int64), 1000, 50, generator=generator)
        estimates.append((values[ids] * importance).sum())
    independent = 1000**2 * values.var() / 50
    assert torch.stack(estimates).var() < 0.05 * independent
    assert torch.stack(estimates).mean().item() == pytest.approx(values.sum().item(), rel=0.01)


@pytest.mark.parametrize("number", [1, 28, 29, 1000])
def test_enough_negatives_leave_nothing_to_chance(number):
    ids, importance = draw_candidates(torch.tensor([4]), 30, number)
    if number >= 29:
        assert sorted(ids.tolist()) == list(range(30))
        assert importance.eq(1).all()
    else:
        assert importance[1:].sum().item() == pytest.approx(29)
