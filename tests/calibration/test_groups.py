"""Intervals by group: each group of predictions has the residuals of its own."""

import logging

import crepes
import numpy as np
import pytest
import torch

from causal_qwen import Cauchy, CausalQwen2Config
from causal_qwen.calibration.conformal import FEWEST_SCORES, give_up_where_moved, keep_scores
from causal_qwen.intervals import interval_kind, report

LEVEL = 0.9


def skewed(count, seed=0):
    """loc_Y, and scores that are ten times as large where loc_Y is above 0."""
    generator = torch.Generator().manual_seed(seed)
    locs = torch.randn(count, generator=generator, dtype=torch.float64)
    scores = torch.rand(count, generator=generator, dtype=torch.float64)
    return locs, torch.where(locs > 0, 10 * scores, scores)


def configured(kept, **fields):
    names = {f"conformal_{name}": column for name, column in kept._asdict().items()}
    return CausalQwen2Config(vocab_size=300, value_space="linear", **names, **fields)


def intervals(config, locs, folds=None):
    Y = Cauchy(locs, torch.ones_like(locs))
    found = report(config, Y, torch.empty(len(locs), 0) if folds is None else folds, None, LEVEL)
    return found.lower, found.upper


def test_ends_are_those_of_crepes():
    locs, scores = skewed(300)
    config = configured(keep_scores(scores, locs=locs, groups=3))
    new = torch.linspace(-2, 2, 41, dtype=torch.float64)
    edges = np.array(config.conformal_edges)
    reference = crepes.ConformalRegressor()
    reference.fit(residuals=scores.numpy(), bins=np.searchsorted(edges, locs.numpy()))
    expected = reference.predict_int(new.numpy(), bins=np.searchsorted(edges, new.numpy()), confidence=LEVEL)
    lower, upper = intervals(config, new)
    np.testing.assert_allclose(np.stack([lower, upper], 1), expected, rtol=1e-12)


def test_each_group_is_covered_where_one_group_is_not():
    locs, scores = skewed(900)
    new_locs, residuals = skewed(4000, seed=1)
    coverage = {}
    for groups in (1, 2):
        lower, upper = intervals(configured(keep_scores(scores, locs=locs, groups=groups)), new_locs)
        inside = residuals <= (upper - lower) / 2
        coverage[groups] = [inside[new_locs > 0].double().mean(), inside[new_locs <= 0].double().mean()]
    assert coverage[1][0] < 0.85
    assert coverage[1][1] == 1.0
    assert coverage[2] == [pytest.approx(LEVEL, abs=0.03)] * 2


def test_folds_that_agree_make_cv_plus_the_split_intervals():
    locs, scores = skewed(300)
    folds = torch.arange(300) % 4
    split = configured(keep_scores(scores, locs=locs, groups=3))
    by_fold = configured(keep_scores(scores, folds, locs=locs, groups=3), number_folds=4)
    same = locs[:, None].expand(-1, 4)
    torch.testing.assert_close(intervals(by_fold, locs, same), intervals(split, locs))
    assert interval_kind(by_fold).endswith("in 3 groups by what is predicted")


def test_groups_that_would_be_too_small_are_fewer(caplog):
    locs, scores = skewed(3 * FEWEST_SCORES + 5)
    with caplog.at_level(logging.WARNING):
        assert len(keep_scores(scores, locs=locs, groups=8).edges) == 2
    assert "make 3 groups" in caplog.text
    assert keep_scores(scores, locs=torch.zeros_like(locs), groups=2).edges is None  # nothing divides them


def test_a_configuration_refuses_groups_that_do_not_fit():
    kept = keep_scores(torch.rand(60), locs=torch.randn(60), groups=2)
    configured(kept)
    for change in ({"groups": None}, {"groups": [0] * 60}, {"edges": [2.0, 1.0]}):
        with pytest.raises(ValueError, match="conformal_edges"):
            configured(kept._replace(**change))


def test_a_precision_that_moves_numbers_costs_the_calibration():
    config = configured(keep_scores(torch.rand(60)), precision_shifts={"bfloat16": 0.3, "int8": 0.01})
    assert give_up_where_moved(config, "float32") is None
    assert give_up_where_moved(config, "int8") is None
    assert config.conformal_scores is not None
    assert "bfloat16" in give_up_where_moved(config, "bfloat16")
    assert config.conformal_scores is None
    assert give_up_where_moved(config, "bfloat16") is None  # said once
