"""Value space: monotone, invertible, finite."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.value_space import ValueSpace, signed_log1p

values = st.floats(-1e300, 1e300, allow_nan=False)
spaces = st.builds(
    ValueSpace, st.sampled_from(["log", "linear"]), center=st.floats(-50, 50), spread=st.floats(1e-3, 1e3)
)


@given(values, st.sampled_from(["log", "linear"]))
def test_decode_inverts_encode(value, kind):
    space = ValueSpace(kind, center=0.5, spread=2.0)
    back = space.decode(space.encode(torch.tensor(value, dtype=torch.float64))).item()
    # log1p(1e300) ≈ 690 carries 690·2⁻⁵² of absolute, hence relative, error; near 0 the shift by 0.5 is what
    # remains.
    assert back == pytest.approx(value, rel=1e-12, abs=1e-15)


@given(values, values, spaces)
def test_g_is_monotone(a, b, space):
    low, high = space.encode(torch.tensor([min(a, b), max(a, b)], dtype=torch.float64))
    assert low <= high


@given(values, spaces, st.sampled_from([torch.float32, torch.float64]))
def test_everything_stays_finite(value, space, dtype):
    encoded = space.encode(torch.tensor(value, dtype=torch.float64)).to(dtype)
    assert torch.isfinite(space.decode(encoded.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)))


def test_g_is_odd_and_keeps_the_sign_of_zero():
    v = torch.tensor([0.0, -0.0, 1e-300, -1e-300, 5.0, -5.0], dtype=torch.float64)
    torch.testing.assert_close(signed_log1p(-v), -signed_log1p(v), rtol=0, atol=0)
    assert math.copysign(1, signed_log1p(v)[1]) == -1
    assert signed_log1p(v)[2] == 1e-300


def test_fit_takes_median_and_half_the_interquartile_range():
    space = ValueSpace.fit("linear", torch.tensor([1.0, 2.0, 3.0, 4.0, 1000.0]))
    assert (space.center, space.spread) == (3.0, 1.0)
    assert ValueSpace.fit("linear", torch.full((9,), 7.0)).spread == 1.0
    assert ValueSpace.fit("linear", torch.tensor([7.0] * 9 + [9.0])).spread == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ValueSpace("cubic"), "'cubic'"),
        (lambda: ValueSpace(spread=0.0), "value_spread is 0.0"),
        (lambda: ValueSpace(center=math.inf), "value_center is inf"),
        (lambda: ValueSpace.fit("log", torch.tensor([])), "no values"),
        (lambda: ValueSpace.fit("log", torch.tensor([1.0, math.nan])), "nan among the values"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
