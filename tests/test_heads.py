"""The heads against the formulas of docs/theory, in float64."""

import math

import pytest
import scipy.stats
import torch

from causal_qwen.cauchy import Cauchy, standard_draw
from causal_qwen.heads import AbductionNetwork, ActionNetwork, NumericEmbedding

H, D, V = 10, 6, 37


@pytest.fixture
def action():
    torch.manual_seed(0)
    network = ActionNetwork(V, D)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    return network


@pytest.fixture
def causes():
    generator = torch.Generator().manual_seed(3)
    U = Cauchy(torch.randn(4, D, generator=generator), torch.rand(4, D, generator=generator) + 0.1)
    return U, Cauchy(torch.randn(4, generator=generator), torch.rand(4, generator=generator))


def test_scores_follow_the_linear_law(action, causes):
    U, U0 = causes
    W = torch.randn(V, D, generator=torch.Generator().manual_seed(4))
    S = action.scores(U, U0, W)
    loc, scale = U.loc.double(), U.scale.double()
    expected_loc = loc @ W.double().T + action.bias.double() + U0.loc.double()[:, None]
    expected_scale = (
        scale @ W.double().abs().T
        + action.balance.double().abs() * scale.mean(-1, keepdim=True)
        + U0.scale.double()[:, None]
    )
    torch.testing.assert_close(S.loc.double(), expected_loc, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(S.scale.double(), expected_scale, rtol=1e-5, atol=1e-5)
    rows = torch.tensor([5, 0, 36])
    some = action.scores(U, U0, W, rows)
    torch.testing.assert_close(some.loc, S.loc[:, rows])
    torch.testing.assert_close(some.scale, S.scale[:, rows])


def test_the_fused_scores_are_the_reference_and_carry_no_gradient(action, causes):
    U, U0 = causes
    W = torch.randn(V, D, generator=torch.Generator().manual_seed(4), requires_grad=True)
    with torch.no_grad():
        oracle, fused = (action.scores(U, U0, W, impl=impl) for impl in ("reference", "fused"))
    torch.testing.assert_close(fused.loc, oracle.loc, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.scale, oracle.scale, rtol=1e-5, atol=1e-5)
    with_gradient = action.scores(U, U0, W)
    assert torch.equal(with_gradient.loc, oracle.loc), "the oracle is the same with and without gradients"
    assert torch.equal(with_gradient.scale, oracle.scale)
    with pytest.raises(ValueError, match="impl='fused' gives no gradients"):
        action.scores(U, U0, W, impl="fused")


def test_z_scores_order_tokens_as_their_probability(action, causes):
    S = action.scores(*causes, torch.randn(V, D))
    prob = Cauchy(S.loc.double(), S.scale.double()).sf(action.threshold.double())
    assert torch.equal(action.z_scores(S).double().argsort(-1), prob.argsort(-1))


def test_numbers_follow_the_linear_law(action, causes):
    U, _ = causes
    Y = action.numbers(U)
    w = action.number.weight[0]
    torch.testing.assert_close(Y.loc, (U.loc * w).sum(-1) + action.number.bias)
    torch.testing.assert_close(Y.scale, (U.scale * w.abs()).sum(-1) + action.number_noise.abs())


def test_noise_widens_the_scale_or_moves_the_location(action, causes):
    U, _ = causes
    noise = action.b_noise.abs()
    for temperature in (0.3, 1.0, 7.0):
        widened = action.exogenous(U, temperature=temperature)
        assert torch.equal(widened.loc, U.loc)
        torch.testing.assert_close(widened.scale, U.scale + noise)
    epsilon = torch.randn(4, D)
    moved = action.exogenous(U, do_sample=True, temperature=0.5, noise_gain=3.0, epsilon=epsilon)
    torch.testing.assert_close(moved.loc, U.loc + 0.5 * 3.0 * noise * epsilon)
    assert torch.equal(moved.scale, U.scale)
    for do_sample in (False, True):
        assert action.exogenous(U, do_sample=do_sample, temperature=0.0, epsilon=epsilon) is U


def test_moved_and_drawn_scores_have_the_law_that_the_widened_ones_state(action, causes):
    """U ~ Cauchy(loc + |b|ε, scale) with ε standard Cauchy is Cauchy(loc, scale + |b|): the two readings
    of noise agree.
    """
    U = causes[0][:1]
    W = torch.randn(1, D)
    generator = torch.Generator().manual_seed(5)
    epsilon = standard_draw(torch.rand(40_000, D, generator=generator))
    moved = action.exogenous(U, do_sample=True, epsilon=epsilon)
    draws = moved.rsample(generator=generator) @ W.T
    law = Cauchy(*(t[:, :1] for t in (U.loc @ W.T, (U.scale + action.b_noise.abs()) @ W.abs().T)))
    result = scipy.stats.kstest(
        draws[:, 0].detach().numpy(), scipy.stats.cauchy(law.loc.item(), law.scale.item()).cdf
    )
    assert result.pvalue > 1e-3


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_bad_temperatures_are_named(action, causes, temperature):
    with pytest.raises(ValueError, match=f"temperature is {temperature}"):
        action.exogenous(causes[0], temperature=temperature)


def test_sampling_without_draws_is_refused(action, causes):
    with pytest.raises(ValueError, match="epsilon"):
        action.exogenous(causes[0], do_sample=True)


@pytest.mark.parametrize("activation", ["exp", "softplus", "abs"])
@pytest.mark.parametrize("gamma", [1e-5, 0.3, 10.0])
def test_abduction_starts_as_the_identity_with_scale_gamma(activation, gamma):
    network = AbductionNetwork(D, D, scale_activation=activation)
    network.reset_parameters(gamma=gamma)
    z = torch.randn(2, 5, D)
    U, U0 = network(z)
    assert torch.equal(U.loc, z)
    torch.testing.assert_close(U.scale, torch.full_like(z, gamma), rtol=1e-5, atol=0)
    assert U0.loc.eq(0).all()
    assert U0.scale.eq(0).all()
    assert U0.loc.shape == (2, 5)


@pytest.mark.parametrize("activation", ["exp", "softplus", "abs"])
def test_scale_neither_overflows_nor_reaches_zero(activation):
    network = AbductionNetwork(D, D, scale_activation=activation)
    scale = network.activation(torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e6]))
    assert (scale > 0).all()
    assert torch.isfinite(scale).all()


def test_common_scale_learns_from_zero():
    network = AbductionNetwork(H, D)
    network(torch.randn(3, H))[1].scale.sum().backward()
    assert network.common_scale.grad == 3


def test_heads_compute_in_float32_whatever_arrives():
    network = AbductionNetwork(H, D).bfloat16()
    U, _ = network(torch.randn(3, H, dtype=torch.bfloat16))
    assert U.loc.dtype == U.scale.dtype == torch.float32
    action = ActionNetwork(V, D).bfloat16()
    S = action.scores(U, Cauchy(U.loc[:, 0], U.scale[:, 0]), torch.randn(V, D, dtype=torch.bfloat16))
    assert S.loc.dtype == S.scale.dtype == torch.float32


def test_log_encoding_adds_phi_along_a_unit_direction():
    embedding = NumericEmbedding(H)
    embeds = torch.randn(1, 4, H)
    values = torch.tensor([[0.0, 99.9, -3.0, 5.0]], dtype=torch.float64)
    is_number = torch.tensor([[True, True, True, False]])
    added = (embedding(embeds, values, is_number) - embeds).detach()
    assert added[0, 0].eq(0).all(), "φ(0) = 0"
    assert added[0, 3].eq(0).all(), "a value without <NUM> is not read"
    torch.testing.assert_close(added[0, 1].norm().item(), math.log(100.9), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        added[0, 2] / math.log(4.0), -added[0, 1] / math.log(100.9), rtol=1e-4, atol=1e-5
    )


def test_sigmoid_encoding_scales_number_positions_only():
    embedding = NumericEmbedding(H, encoding="sigmoid")
    embeds = torch.randn(1, 3, H)
    out = embedding(embeds, torch.tensor([[0.0, 2.0, 2.0]]), torch.tensor([[True, True, False]]))
    torch.testing.assert_close(out[0, 0], embeds[0, 0] / 2)
    torch.testing.assert_close(out[0, 1], embeds[0, 1] * torch.sigmoid(torch.tensor(2.0)))
    assert torch.equal(out[0, 2], embeds[0, 2])


def test_numeric_direction_is_trained_only_on_request():
    assert not NumericEmbedding(H).direction.requires_grad
    assert NumericEmbedding(H, learn_direction=True).direction.requires_grad


def test_resized_rows_are_neither_favoured_nor_held_back():
    network = ActionNetwork(V, D, learn_threshold=False)
    W = torch.randn(V + 3, D)
    norms = W[:V].abs().sum(-1)
    with torch.no_grad():
        network.balance.copy_(norms.max() + 5 - norms)
        network.threshold.fill_(0.25)
    network.resize(W)
    total = W.abs().sum(-1) + network.balance
    torch.testing.assert_close(total, total[:1].expand(V + 3))
    assert network.threshold.eq(0.25).all()
    assert not network.threshold.requires_grad
    assert network.bias[V:].eq(0).all()
    network.resize(W[:7])
    assert network.bias.shape == network.balance.shape == network.threshold.shape == (7,)
