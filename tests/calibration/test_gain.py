"""κ is the gain at which causal sampling is as decided as softmax sampling."""

import pytest
import torch

from causal_qwen.calibration.gain import DRAWS, match_gain, recalibrate_gain
from causal_qwen.cauchy import standard_draw
from conftest import TINY, tiny_causal

POSITIONS = 200


def features():
    return 3 * torch.randn(POSITIONS, TINY["hidden_size"], generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def sampled_rate(model, hidden_states, gain, *, seed):
    """How often argmax W(loc_U + κ(scale_U + |b_noise|)ε) + b is the favourite, over the same draws."""
    generator = torch.Generator().manual_seed(seed)
    U = model.action.exogenous(model.abduction(hidden_states)[0])
    favourite = model.token_logits(U.loc).argmax(-1)
    uniform = torch.rand(DRAWS, *U.loc.shape, generator=generator)
    causes = U.loc + gain * U.scale * standard_draw(uniform, density_floor=model.config.density_floor)
    return (model.token_logits(causes).argmax(-1) == favourite).double().mean().item()


def test_the_rate_at_the_gain_is_that_of_softmax():
    model = tiny_causal()
    gain = match_gain(model, features(), torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits = model.token_logits(model.abduction(features())[0].loc)
    assert gain.softmax_rate == pytest.approx(logits.softmax(-1).amax(-1).mean().item(), rel=1e-5)
    step = 2 / (DRAWS * POSITIONS)
    assert gain.causal_rate == pytest.approx(gain.softmax_rate, abs=step)
    half, same, double = (
        sampled_rate(model, features(), factor * gain.noise_gain, seed=5) for factor in (0.5, 1.0, 2.0)
    )
    assert same == pytest.approx(gain.causal_rate, abs=step)
    assert half > same + step > double + 2 * step  # the rate falls with the gain


def test_wider_causes_need_less_gain():
    """κ multiplies the scale: the same draws with twice the scale match at half the gain."""
    model = tiny_causal()
    with torch.no_grad():
        model.abduction.scale.weight.zero_()
        model.abduction.scale.bias.fill_(-2)
        model.action.b_noise.fill_(0.1)
    before = match_gain(model, features(), torch.Generator().manual_seed(5)).noise_gain
    with torch.no_grad():
        model.abduction.scale.bias.add_(torch.tensor(2.0).log())
        model.action.b_noise.mul_(2)
    after = match_gain(model, features(), torch.Generator().manual_seed(5)).noise_gain
    assert after == pytest.approx(before / 2, rel=1e-4)


def test_a_favourite_that_is_rarely_overtaken_gets_a_finite_gain():
    """With equal logits softmax is as undecided as can be, and many draws never change the favourite."""
    model = tiny_causal()
    with torch.no_grad():
        model.action.bias.zero_()
        model.lm_head.weight[2:].copy_(model.lm_head.weight[1])
        model.lm_head.weight[:2].zero_()
    gain = match_gain(model, 1e-6 * features(), torch.Generator().manual_seed(5))
    assert 0 <= gain.noise_gain < float("inf")


def test_rows_set_the_gain_again(ids):
    model = tiny_causal()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    batch["numeric_values"] = torch.zeros(ids.shape, dtype=torch.float64)
    assert recalibrate_gain(model, [batch], seed=1) == model.config.noise_gain != 1.0
    padded = {name: tensor.clone() for name, tensor in batch.items()}
    padded["attention_mask"][:, :4] = 0
    assert recalibrate_gain(model, [padded], seed=1) is None  # 24 positions are too few
    assert recalibrate_gain(model, [], seed=1) is None
