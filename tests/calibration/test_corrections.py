"""Balance, common cause, γ and C: each correction does what it says."""

import pytest
import torch

from causal_qwen import convert
from causal_qwen.calibration import calibrate, text_features
from causal_qwen.cauchy import Cauchy
from causal_qwen.conversion import measure_parity
from conftest import TEXT


def test_balance_gives_every_token_the_same_scale_in_every_mode(conversion, ids):
    model = conversion.model
    outputs = model(ids, output_scores=True)
    torch.testing.assert_close(
        outputs.scale_S, outputs.scale_S[..., :1].expand_as(outputs.scale_S), rtol=1e-5, atol=0
    )
    U, U0 = Cauchy(outputs.loc_U, outputs.scale_U), Cauchy(outputs.loc_U0, outputs.scale_U0)
    moved = model.action.exogenous(U, do_sample=True, epsilon=torch.randn_like(U.loc))
    scale = model.action.scores(moved, U0, model.lm_head.weight).scale
    torch.testing.assert_close(scale, scale[..., :1].expand_as(scale), rtol=1e-5, atol=0)


def test_scale_and_threshold_are_at_a_minimum_of_the_loss(base, conversion):
    best = measure_parity(conversion.model, base, TEXT).ovr_loss
    model = convert(base, calibration_text=TEXT).model
    for change in ("wider", "narrower", "higher", "lower"):
        with torch.no_grad():
            if change in ("wider", "narrower"):
                factor = 4.0 if change == "wider" else 0.25
                model.abduction.scale.bias.add_(torch.tensor(factor).log())
                model.action.b_noise.mul_(factor)
                undo = 1 / factor
            else:
                model.action.threshold.add_(4.0 if change == "higher" else -4.0)
        assert measure_parity(model, base, TEXT).ovr_loss > best
        with torch.no_grad():
            if change in ("wider", "narrower"):
                model.abduction.scale.bias.add_(torch.tensor(undo).log())
                model.action.b_noise.mul_(undo)
            else:
                model.action.threshold.add_(-4.0 if change == "higher" else 4.0)


def test_gamma_and_noise_share_the_scale_evenly(conversion, ids):
    gamma = conversion.report["calibration"]["gamma"]
    scale = conversion.model(ids).scale_U
    torch.testing.assert_close(scale, torch.full_like(scale, gamma / 2), rtol=1e-5, atol=0)
    torch.testing.assert_close(conversion.model.action.b_noise.detach(), torch.full((32,), gamma / 2))


def test_recalibration_is_idempotent(base, conversion):
    """Calibrating a calibrated model chooses the same: nothing is read from what calibration itself
    writes.
    """
    model = convert(base, calibration_text=TEXT).model
    again = calibrate(model, text_features(model, base.tokenizer, TEXT))
    assert again.gamma == pytest.approx(conversion.report["calibration"]["gamma"])
    assert again.noise_gain == pytest.approx(conversion.report["calibration"]["noise_gain"])
