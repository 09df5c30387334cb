"""The law against float64, scipy, numerical integration and its own samples."""

import math

import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.cauchy import Cauchy, log_tail, magnitude, standard_draw, truncation_bound

STANDARDISED = torch.tensor([0.0, 1e-30, 1e-6, 0.1, 0.5, 1.0, 3.0, 1e2, 1e5, 1e8, 1e20, 1e30])
BOTH_TAILS = torch.cat([-STANDARDISED.flip(0), STANDARDISED])
FLOAT32 = {"rtol": 1e-6, "atol": 0.0}


def standard(value):
    return Cauchy(torch.zeros_like(value), torch.ones_like(value))


def log_tail_gradients(value, dtype):
    """(value, d/d value, d/d scale) of log_sf at loc 0, scale 1."""
    value = value.detach().to(dtype, copy=True).requires_grad_()
    scale = torch.ones_like(value, requires_grad=True)
    out = Cauchy(torch.zeros_like(value), scale).log_sf(value)
    return out.detach(), *torch.autograd.grad(out.sum(), (value, scale))


def test_log_tails_keep_every_digit_from_0_to_1e30():
    # scipy's survival function is exact in its own tail; log1p of the opposite tail is exact in the other
    # one.
    x = BOTH_TAILS.double().numpy()
    far = scipy.stats.cauchy.sf(abs(x))
    exact = torch.tensor([math.log(p) if v > 0 else math.log1p(-p) for v, p in zip(x, far, strict=True)])
    torch.testing.assert_close(standard(BOTH_TAILS).log_sf(BOTH_TAILS).double(), exact.double(), **FLOAT32)
    torch.testing.assert_close(standard(BOTH_TAILS).log_cdf(-BOTH_TAILS).double(), exact.double(), **FLOAT32)


def test_probabilities_match_scipy_and_do_not_vanish_at_1e8_scales():
    x = BOTH_TAILS.double()
    torch.testing.assert_close(
        standard(BOTH_TAILS).sf(BOTH_TAILS).double(), torch.tensor(scipy.stats.cauchy.sf(x)), **FLOAT32
    )
    torch.testing.assert_close(
        standard(BOTH_TAILS).cdf(BOTH_TAILS).double(), torch.tensor(scipy.stats.cauchy.cdf(x)), **FLOAT32
    )
    assert standard(torch.tensor(1e8)).sf(torch.tensor(1e8)) > 0


def test_log_tail_gradients_match_float64_and_none_is_lost():
    value, by_value, by_scale = log_tail_gradients(BOTH_TAILS, torch.float32)
    _, exact_by_value, exact_by_scale = log_tail_gradients(BOTH_TAILS, torch.float64)
    smallest = torch.finfo(torch.float32).tiny  # gradients below it (1e-60) are 0 in float32, rightly
    torch.testing.assert_close(by_value.double(), exact_by_value, rtol=2e-6, atol=smallest)
    torch.testing.assert_close(by_scale.double(), exact_by_scale, rtol=2e-6, atol=smallest)
    assert torch.isfinite(value).all()
    assert by_value[BOTH_TAILS == 0].eq(-2 / math.pi).all(), "at the median the slope is −2/π, not 0"
    assert (by_value[BOTH_TAILS >= 0] < 0).all(), "a gradient vanished in the upper tail"


def test_log_tail_gradient_in_float64_is_the_hazard_rate():
    x = torch.tensor([-50.0, -2.0, 0.0, 0.3, 40.0], dtype=torch.float64)
    _, by_value, _ = log_tail_gradients(x, torch.float64)
    hazard = scipy.stats.cauchy.pdf(x) / scipy.stats.cauchy.sf(x)
    torch.testing.assert_close(by_value, -torch.tensor(hazard), rtol=1e-12, atol=0)


def test_log_tail_survives_extreme_scales():
    distance = torch.tensor([1e30, -1e30, 1e-30, 0.0, 3e38], requires_grad=True)
    scale = torch.tensor([1e-10, 1e-10, 1e30, 1e-30, 1e-6], requires_grad=True)
    out = log_tail(distance, scale)
    out.sum().backward()
    for tensor in (out, distance.grad, scale.grad):
        assert torch.isfinite(tensor).all()
    torch.testing.assert_close(distance.grad[0], torch.tensor(-1e-30), rtol=1e-4, atol=0)


def test_a_point_mass_is_finite_and_has_no_slope():
    distance = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
    scale = torch.zeros(3, requires_grad=True)
    out = log_tail(distance, scale)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert out[2] < -80
    assert distance.grad.eq(0).all()
    assert scale.grad.eq(0).all()


def test_second_derivatives_and_vmap():
    x = torch.tensor([-3.0, -0.1, 0.0, 0.4, 9.0], dtype=torch.float64, requires_grad=True)
    s = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_tail, (x, s))
    assert torch.autograd.gradgradcheck(log_tail, (x, s))
    torch.testing.assert_close(torch.vmap(log_tail)(x, s), log_tail(x, s))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_log_prob_matches_scipy_with_its_gradient(scale):
    value = BOTH_TAILS.double().requires_grad_()
    law = Cauchy(torch.full_like(value, 0.25), torch.full_like(value, scale))
    expected = torch.tensor(scipy.stats.cauchy.logpdf(value.detach(), 0.25, scale))
    finite = expected.isfinite()  # scipy squares 1e30 / 1e-6
    out = law.log_prob(value)
    torch.testing.assert_close(out[finite], expected[finite], rtol=1e-12, atol=1e-12)
    (slope,) = torch.autograd.grad(out.sum(), value)
    z = (value.detach() - 0.25) / scale
    torch.testing.assert_close(
        slope, -2 / scale / (z + 1 / torch.where(z == 0, math.inf, z)) * (z != 0), rtol=1e-9, atol=1e-300
    )
    assert torch.isfinite(standard(BOTH_TAILS).log_prob(BOTH_TAILS)).all()


def test_log_prob_slope_is_right_at_the_seam():
    z = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(standard(z.detach()).log_prob(z).sum(), z)
    torch.testing.assert_close(slope, torch.tensor([1.0, -1.0], dtype=torch.float64))


def test_quantile_inverts_the_cdf_to_the_ends():
    prob = torch.tensor([1e-30, 1e-8, 1e-3, 0.2, 0.25, 0.5, 0.75, 0.8, 1 - 2**-24])
    expected = torch.tensor(scipy.stats.cauchy.ppf(prob.double())).double()
    torch.testing.assert_close(standard(prob).quantile(prob).double(), expected, rtol=2e-6, atol=1e-7)


def test_interval_holds_its_level():
    law = Cauchy(torch.tensor(3.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64))
    for level in (0.5, 0.9, 0.999):
        lower, upper = law.interval(level)
        torch.testing.assert_close(law.cdf(upper) - law.cdf(lower), torch.tensor(level, dtype=torch.float64))
    for level in (0.0, 1.0, -0.1, 1.5):
        with pytest.raises(ValueError, match="level is"):
            law.interval(level)


@pytest.mark.parametrize("value", [-30.0, -1.0, 0.0, 0.7, 12.0])
def test_crps_matches_numerical_integration(value):
    loc, scale = 0.5, 2.0
    law = scipy.stats.cauchy(loc, scale)
    below = scipy.integrate.quad(lambda x: law.cdf(x) ** 2, -math.inf, value)[0]
    above = scipy.integrate.quad(lambda x: law.sf(x) ** 2, value, math.inf)[0]
    ours = Cauchy(torch.tensor(loc).double(), torch.tensor(scale).double()).crps(torch.tensor(value).double())
    assert ours.item() == pytest.approx(below + above, rel=1e-6)


def test_linear_map_is_the_law_of_the_sum():
    generator = torch.Generator().manual_seed(0)
    loc, scale = torch.randn(6, generator=generator), torch.rand(6, generator=generator) + 0.1
    weight, bias = torch.randn(3, 6, generator=generator), torch.randn(3, generator=generator)
    law = Cauchy(loc, scale).linear(weight, bias)
    draws = Cauchy(loc.expand(40_000, 6), scale).rsample(generator=generator) @ weight.T + bias
    for k in range(3):
        statistic = scipy.stats.kstest(draws[:, k].numpy(), scipy.stats.cauchy(law.loc[k], law.scale[k]).cdf)
        assert statistic.pvalue > 1e-3


@pytest.mark.parametrize("floor", [0.0, 0.01, 0.5])
def test_draws_follow_the_truncated_law(floor):
    generator = torch.Generator().manual_seed(1)
    draws = standard(torch.zeros(50_000)).rsample(generator=generator, density_floor=floor)
    inside = math.atan(truncation_bound(floor)) / math.pi  # half the mass kept

    def cdf(x):
        return (scipy.stats.cauchy.cdf(x) - 0.5) / (2 * inside) + 0.5

    assert scipy.stats.kstest(draws.numpy(), cdf).pvalue > 1e-3
    assert draws.abs().max() <= truncation_bound(floor)


def test_draws_carry_gradients_to_loc_and_scale():
    loc, scale = torch.zeros(5, requires_grad=True), torch.ones(5, requires_grad=True)
    uniform = torch.tensor([0.0, 0.1, 0.5, 0.9, 1 - 2**-24])
    Cauchy(loc, scale).rsample(uniform=uniform).sum().backward()
    assert loc.grad.eq(1).all()
    torch.testing.assert_close(scale.grad, standard_draw(uniform))
    assert torch.isfinite(scale.grad).all()


@given(st.floats(0, 1, exclude_max=True, width=32), st.sampled_from([0.0, 1e-6, 0.01, 0.9]))
def test_draws_are_finite_monotone_and_bounded(uniform, floor):
    epsilon = standard_draw(torch.tensor([uniform, min(uniform + 0.01, 1 - 2**-24)]), density_floor=floor)
    assert torch.isfinite(epsilon).all()
    assert epsilon[1] >= epsilon[0] or uniform + 0.01 >= 1
    assert epsilon.abs().max() <= truncation_bound(floor)


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.floats(2.0**-33, 2.0**33, width=32))
def test_the_two_tails_sum_to_one(value, scale):
    law = Cauchy(torch.tensor(0.0), torch.tensor(scale))
    x = torch.tensor(value)
    assert (law.sf(x) + law.cdf(x)).item() == pytest.approx(1.0, abs=3e-7)
    assert law.log_sf(x).exp().item() == pytest.approx(law.sf(x).item(), rel=2e-5)


def test_magnitude_moves_away_from_zero():
    parameter = torch.tensor([-2.0, 0.0, 3.0], requires_grad=True)
    out = magnitude(parameter)
    out.sum().backward()
    assert out.tolist() == [2.0, 0.0, 3.0]
    assert parameter.grad.tolist() == [-1.0, 1.0, 1.0]


def test_half_precision_and_bad_floors_are_refused():
    with pytest.raises(TypeError, match=r"bfloat16.*float\(\)"):
        Cauchy(torch.zeros(2, dtype=torch.bfloat16), torch.ones(2))
    for floor in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="density_floor"):
            truncation_bound(floor)
