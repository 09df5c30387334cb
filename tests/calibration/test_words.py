"""The width of scale_S and the thresholds, solved once more after training."""

import logging
import math

import pytest
import torch

from causal_qwen.calibration import refit_words
from causal_qwen.calibration.positions import labelled_positions
from causal_qwen.losses import ovr_terms
from conftest import tiny_causal


def batches(count=3):
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 250, (count, 4, 24), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


@torch.no_grad()
def scores(model):
    """Heights above the threshold and scales of every token at every position, and the labels."""
    parts = list(labelled_positions(model, batches()))
    laws = [model.action.scores(part.U_noisy, part.U0, model.lm_head.weight) for part in parts]
    heights = torch.cat([law.loc - model.action.threshold for law in laws])
    return heights, torch.cat([law.scale for law in laws]), torch.cat([part.labels for part in parts])


@torch.no_grad()
def loss(model):
    parts = labelled_positions(model, batches())
    terms = [
        ovr_terms(
            model.action.scores(p.U_noisy, p.U0, model.lm_head.weight), model.action.threshold, p.labels
        )
        for p in parts
    ]
    return torch.cat(terms).double().mean().item()


def test_every_scale_has_the_factor_and_every_threshold_the_shift():
    model = tiny_causal()
    heights, scales, _ = scores(model)
    number_head = [p.clone() for p in model.action.number.parameters()]
    fit = refit_words(model, batches(), seed=0)
    after_heights, after_scales, _ = scores(model)
    torch.testing.assert_close(after_scales, scales * fit.scale_factor, rtol=1e-4, atol=0)
    torch.testing.assert_close(after_heights, heights - fit.threshold_shift, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(number_head, model.action.number.parameters(), strict=True))


@pytest.mark.parametrize(("factor", "shift"), [(50.0, 0.0), (0.02, 0.0), (20.0, -2.0)])
def test_a_disturbed_model_comes_back_to_the_least_loss(factor, shift):
    model = tiny_causal()
    refit_words(model, batches(), seed=0)
    best = loss(model)
    with torch.no_grad():
        model.abduction.scale.bias.add_(math.log(factor))
        model.abduction.common_scale.mul_(factor)
        model.action.b_noise.mul_(factor)
        model.action.threshold.add_(shift)
    disturbed = loss(model)
    fit = refit_words(model, batches(), seed=0)
    assert loss(model) == pytest.approx(fit.loss, rel=0.05)  # 256 of 276 positions
    assert loss(model) <= min(best * 1.02, disturbed)


def test_the_same_seed_takes_the_same_positions():
    first, second = (refit_words(tiny_causal(), batches(), seed=7) for _ in range(2))
    assert first == second


def test_too_few_positions_and_other_activations_change_nothing(caplog):
    few = [{name: ids[:1, :20] for name, ids in batches()[0].items()}]
    for model, rows, reason in (
        (tiny_causal(), few, "19 positions are too few"),
        (tiny_causal(), [], "0 positions are too few"),
        (tiny_causal(scale_activation="softplus"), batches(), "scale_activation is 'softplus'"),
    ):
        before = {name: p.clone() for name, p in model.named_parameters()}
        with caplog.at_level(logging.WARNING):
            assert refit_words(model, rows, seed=0) is None
        assert reason in caplog.records[-1].getMessage()
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
