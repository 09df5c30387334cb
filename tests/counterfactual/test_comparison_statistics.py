"""Intervals hold what they promise, at the end and after looking; variance ratios are those of known laws."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from causal_qwen.counterfactual.comparison.ranking import rank
from causal_qwen.counterfactual.comparison.sequential import Design, planned_looks
from causal_qwen.counterfactual.comparison.statistics import Mean, Tally, estimate, mean_difference, units

RUNS = 600  # a coverage of 95% then lies within 92.8% and 97.2% in 99 of 100 cases


def log_normal(draw, shape):
    return np.exp(draw.normal(size=shape)) - np.exp(0.5)


LAWS = {
    "normal": lambda draw, n: draw.normal(size=n),
    "heavy": lambda draw, n: draw.standard_t(2.5, n),
    "skewed": lambda draw, n: log_normal(draw, (n, 10)).mean(1),
    "rare": lambda draw, n: draw.choice([-1, 0, 1], (n, 10), p=[0.03, 0.9, 0.07]).mean(1) - 0.04,
}


def paired(draw, individuals=40, prompts=5, rho=0.6, shift=0.5):
    """Scores of A and B: an individual's own part, in all its pairs, and a correlation of the pairs."""
    own = draw.normal(size=(individuals, 1)) * 0.5
    a = draw.standard_t(4, size=(individuals, prompts))
    b = rho * a + np.sqrt(1 - rho**2) * draw.standard_t(4, size=(individuals, prompts))
    levels = draw.normal(size=prompts) * 3  # prompts differ, and that is no noise
    return a + own + shift + levels, b + levels


@pytest.mark.parametrize("law", LAWS)
def test_the_interval_at_the_end_covers(law):
    draw = np.random.default_rng(1)
    hits = 0
    for _ in range(RUNS):
        interval = Mean.of(LAWS[law](draw, 100) + 0.3).interval(0.95)
        hits += interval.lower <= 0.3 <= interval.upper
    assert 0.925 <= hits / RUNS <= 0.98


@pytest.mark.parametrize("shape", [(50, 1), (10, 5)])
def test_the_interval_of_few_skewed_pairs_covers_where_student_does_not(shape):
    draw, hits, students = np.random.default_rng(14), 0, 0
    for _ in range(RUNS):
        mean = mean_difference(log_normal(draw, shape), crossed=False)
        ends, student = mean.interval(0.95), mean._replace(skewness=0.0).interval(0.95)
        hits += ends.lower <= 0 <= ends.upper
        students += student.lower <= 0 <= student.upper
        assert ends.lower <= student.lower < student.upper <= ends.upper, "it is never narrower"
    assert 0.93 <= hits / RUNS <= 0.975
    assert students / RUNS < 0.925


def test_without_skewness_the_interval_is_students():
    values = np.random.default_rng(15).normal(size=20)
    values = np.concatenate([values, 2 * values.mean() - values])  # its own mirror image
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert Mean.of(values).interval(0.95) == pytest.approx((expected.low, expected.high))


def test_the_skewness_of_a_mean_is_that_of_the_values_over_the_root_of_their_number():
    values = log_normal(np.random.default_rng(16), 30)
    assert Mean.of(values).skewness == pytest.approx(stats.skew(values, bias=False) / math.sqrt(30))


@given(
    t=st.floats(-40, 40), skewness=st.one_of(st.floats(-2, 2), st.floats(-1e-9, 1e-9)), larger=st.floats(0, 5)
)
@example(t=5e-324, skewness=0.5, larger=0.0)
def test_ends_and_t_agree_and_keep_their_order(t, skewness, larger):
    mean = Mean(t, 1.0, 10, skewness)
    if mean.t != 0:  # the hypothesis under which t is what it is, is 0
        assert mean.end(mean.t) == pytest.approx(0, abs=1e-7)
    assert abs(mean.t) <= abs(t)
    assert mean.t * t >= 0
    assert mean.end(t) >= mean.end(t + larger)
    assert abs(t - mean.end(t)) >= abs(t) - 1e-12, "an end is never nearer than Student's"


def test_the_interval_counts_that_an_individual_answers_every_prompt():
    """Pairs of one individual are dependent here: an interval over pairs would be too narrow."""
    draw, hits, naive = np.random.default_rng(2), 0, 0
    for _ in range(RUNS):
        a, b = paired(draw)
        interval = mean_difference(a - b, crossed=True).interval(0.95)
        hits += interval.lower <= 0.5 <= interval.upper
        over_pairs = mean_difference(a - b, crossed=False).interval(0.95)
        naive += over_pairs.lower <= 0.5 <= over_pairs.upper
    assert 0.93 <= hits / RUNS <= 0.97
    assert naive / RUNS < 0.9
    found = estimate(a, b, seen=a.size, level=0.95, crossed=True)
    assert (found.lower, found.upper) == interval
    assert found.design_effect > 1.2
    # What strangers would need is counted by the precision that there is, not by the pairs alone.
    variance = np.var(a, axis=0, ddof=1).mean() + np.var(b, axis=0, ddof=1).mean()
    assert found.independent_pairs == pytest.approx(variance / found.standard_error**2)


@pytest.mark.parametrize("individuals", [3, 40])
def test_where_every_prompt_has_its_own_individuals_prompts_are_strata(individuals):
    """With few individuals and many prompts the interval is far narrower than one over few units."""
    draw, hits, widths = np.random.default_rng(12), 0, []
    noise = np.array([0.2, 1.0, 3.0, 1.0])  # of each prompt
    for _ in range(RUNS):
        difference = draw.normal(size=(individuals, 4)) * noise + 0.5 + np.array([2, -2, 1, -1])
        interval = mean_difference(difference, crossed=False).interval(0.95)
        hits += interval.lower <= 0.5 <= interval.upper
        over_units = mean_difference(difference, crossed=True).interval(0.95)
        widths.append((interval.upper - interval.lower) / (over_units.upper - over_units.lower))
    assert 0.93 <= hits / RUNS <= 0.975
    assert np.median(widths) < (0.85 if individuals == 3 else 1.01)


def test_one_prompt_is_welch_with_one_group():
    values = np.random.default_rng(13).normal(size=(30, 1))
    values[3] = np.nan
    mean = mean_difference(values, crossed=False)
    assert mean == pytest.approx(Mean.of(values[np.isfinite(values)]))
    two = np.column_stack([values[:, 0], -np.roll(values[:, 0] ** 2, 1)])
    halves = [column[np.isfinite(column)] for column in two.T]
    expected = stats.ttest_ind(halves[0], -halves[1], equal_var=False)  # of the sum: twice the mean
    found = mean_difference(two, crossed=False)
    assert found.freedom == pytest.approx(expected.df)
    assert found.value / found.error == pytest.approx(expected.statistic)


@pytest.mark.parametrize("law", ["normal", "heavy", "skewed"])
@pytest.mark.parametrize("shift", [0.0, 0.35, 1.5])
def test_the_interval_after_looking_covers(law, shift):
    draw, design, hits = np.random.default_rng(3), Design(planned_looks(60, 4)), 0
    runs = 200
    for _ in range(runs):
        values = LAWS[law](draw, 60) + shift
        for index, count in enumerate(design.looks):
            look = design.look(index, Mean.of(values[:count]))
            if look.significant:
                break
        hits += look.interval.lower <= shift <= look.interval.upper
        assert look.significant == (look.interval.lower > 0 or look.interval.upper < 0)
        assert look.interval.lower <= look.unbiased <= look.interval.upper
    assert 0.91 <= hits / runs <= 0.99


def test_boundaries_spend_alpha_and_no_more():
    """Against draws: among runs without a difference, five in a hundred cross a boundary."""
    design = Design(planned_looks(100, 5))
    z = np.random.default_rng(4).normal(size=(200_000, 5)).cumsum(1) / np.sqrt(np.arange(1, 6))
    crossed = (np.abs(z) >= design.boundaries).any(1).mean()
    assert crossed == pytest.approx(0.05, abs=0.0015)
    assert Design((10, 20)).boundaries[0] > stats.norm.ppf(0.975)


def test_one_look_is_the_plain_interval():
    values = np.random.default_rng(5).normal(size=30)
    mean = Mean.of(values)
    look = Design((30,)).look(0, mean)
    assert look.interval == pytest.approx(mean.interval(0.95), abs=1e-4)
    assert look.repeated == pytest.approx(mean.interval(0.95), abs=1e-4)


def test_too_few_to_look():
    with pytest.raises(ValueError, match="10 individuals are too few"):
        planned_looks(10, 5)
    with pytest.raises(ValueError, match="at least twice"):
        planned_looks(100, 1)
    assert planned_looks(20, 5) == (10, 20)


def test_variance_ratio_and_correlation_are_those_of_the_law():
    draw = np.random.default_rng(6)
    a, b = paired(draw, individuals=4000, rho=0.6, shift=0.0)
    found = estimate(a, b, seen=a.size, level=0.95)
    var_a, var_b, covariance = 2 + 0.25, 2.0, 0.6 * 2  # Student with 4 degrees: variance 2
    assert found.variance_ratio == pytest.approx(1 - 2 * covariance / (var_a + var_b), abs=0.04)
    assert found.correlation == pytest.approx(covariance / np.sqrt(var_a * var_b), abs=0.04)
    assert found.variance_ratio_lower < found.variance_ratio < found.variance_ratio_upper
    assert found.samples_saved == pytest.approx(found.pairs / found.variance_ratio - found.pairs)
    assert found.samples_saved_share == pytest.approx(1 - found.variance_ratio)


def test_the_interval_of_the_variance_ratio_covers():
    draw, hits, runs = np.random.default_rng(7), 0, 100
    for _ in range(runs):
        a = draw.normal(size=(60, 4))
        b = 0.7 * a + np.sqrt(1 - 0.49) * draw.normal(size=(60, 4))
        found = estimate(a, b, seen=a.size, level=0.95)
        hits += found.variance_ratio_lower <= 0.3 <= found.variance_ratio_upper
    assert 0.88 <= hits / runs <= 0.99


def test_the_same_scores_have_no_difference_and_no_variance():
    scores = np.random.default_rng(8).normal(size=(20, 3)) * 1e6
    found = estimate(scores, scores.copy(), seen=60, level=0.95)
    assert (found.difference, found.variance_ratio, found.differing, found.correlation) == (0, 0, 0, 1)
    assert found.lower < 0 < found.upper, "others may differ that were not seen"
    assert 0 == found.variance_ratio_lower < found.variance_ratio_upper < 0.06
    same = estimate(scores, scores.copy(), seen=60, level=0.95, span=None)
    assert (same.lower, same.upper) == (0, 0), "one and the same never do"
    assert found.samples_saved is None, "strangers would never get there"


def test_constant_scores_say_nothing_of_the_noise():
    found = estimate(np.ones((5, 2)), np.zeros((5, 2)), seen=10, level=0.95)
    assert (found.difference, found.variance_ratio, found.correlation) == (1, None, None)


def test_missing_scores_are_left_out_and_counted():
    draw = np.random.default_rng(9)
    a, b = paired(draw, individuals=30, prompts=3)
    whole = estimate(a, b, seen=90, level=0.95)
    a[0, 0] = b[5, 1] = np.nan
    a[:, 2] = np.nan  # a prompt that nobody answered with a score
    found = estimate(a, b, seen=90, level=0.95)
    assert (found.pairs, found.missing, found.prompts) == (58, 32, 2)
    assert found.difference == pytest.approx(np.nanmean((a - b)[:, :2], 0).mean())
    assert abs(found.difference - whole.difference) < 1
    assert estimate(a * np.nan, b, seen=90, level=0.95).difference is None
    assert len(units(a * np.nan)) == 0


def test_the_median_of_individuals_is_not_moved_by_an_outlier():
    a, b = np.zeros((41, 1)), -np.linspace(0.8, 1.2, 41)[:, None]
    a[0] = 1e9
    found = estimate(a, b, seen=41, level=0.95)
    assert found.median == pytest.approx(1.0, abs=0.02)
    assert 0.8 < found.median_lower < 1 < found.median_upper < 1.2
    assert found.lower < 0 < found.upper, "the mean's interval widens with its outlier"


def test_rankings_that_disagree_are_said():
    """Three sides that beat one another in a circle, as dice may, whatever their means are."""
    sides = np.array([[2, 4, 9], [1, 6, 8], [3, 5, 7]], dtype=float)
    rolls = np.array([(a, b, c) for a in sides[0] for b in sides[1] for c in sides[2]])
    scores = {name: rolls[:, [index]] for index, name in enumerate("abc")}
    scores["a"] = scores["a"] + np.where(scores["a"] == 9, 5.0, 0.0)  # the largest mean, and no other wins
    found = rank(scores)
    assert found.by_mean[0] == "a"
    assert found.cycle is not None
    assert not found.agree
    wins = found.to_dict()["pairwise"]
    assert {(entry["a"], entry["b"]) for entry in wins} == set(found.pairwise)
    plain = rank({"low": np.zeros((5, 2)), "high": np.ones((5, 2)), "middle": np.full((5, 2), 0.5)})
    assert (plain.by_mean, plain.agree) == (("high", "middle", "low"), True)
    assert plain.wins["high", "low"] == (1, 0)
    with pytest.raises(ValueError, match="at least 2"):
        rank({"alone": np.zeros((5, 2))})


def test_a_tally_takes_pairs_in_any_order():
    draw = np.random.default_rng(10)
    a, b = paired(draw, individuals=6, prompts=2)
    tally = Tally(6, 2, ("x", "y"))
    for index in draw.permutation(12):
        person, prompt = divmod(int(index), 2)
        tally.add(person, prompt, (a[person, prompt], 1.0), (b[person, prompt], 0.0))
    assert tally.pairs == 12
    assert tally.estimate("x").difference == pytest.approx((a - b).mean())
    assert tally.estimate("x", 3).individuals == 3
    assert tally.estimate("y").difference == 1
