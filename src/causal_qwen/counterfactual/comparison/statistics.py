"""Pairs of scores → the mean paired difference with its interval, and what the pairing was worth.

Prompts are fixed and individuals are drawn. Where every prompt has individuals of its own, pairs are
independent and prompts are strata. Where the same individuals answer every prompt (*crossed*), their pairs
are dependent, an individual is the unit, and its differences are averaged over the prompts. Student's t gives
the interval; it is self-normalised: under heavy tails it widens with its own outliers and errs on the side of
caution. Under skewed ones it errs on one side, to which Hall's (1992) transformation moves an end: outwards
only, because where tails are heavy a sample's skewness is chance. The variance ratio and the correlation have
bootstrap intervals. This module knows numbers alone.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special, stats

__all__ = ["Estimate", "Interval", "Mean", "Tally", "mean_difference", "units"]

Matrix = npt.NDArray[np.float64]
Vector = npt.NDArray[np.float64]
REDRAWS = 1000
TIE = 1e-12  # of a variance, relative to the scores': what rounding leaves where there is none


class Interval(NamedTuple):
    """Two ends."""

    lower: float
    upper: float


class Mean(NamedTuple):
    """A mean, its standard error, the degrees of freedom that the error is known with, and its skewness."""

    value: float
    error: float
    freedom: float
    skewness: float = 0.0  # of the mean's own law, not of the values'

    @classmethod
    def of(cls, values: Vector) -> Mean:
        """Of independent values (n,) of one law; nothing is known of the error where n < 2."""
        if len(values) < 2:
            return cls(float(values.mean()), math.inf, 0)
        return mean_difference(values[:, None], crossed=False)

    @property
    def t(self) -> float:
        """The studentised mean; nearer to 0 where skewness alone would take it as far."""
        return _without_skewness(self.value / self.error, self.skewness)

    def end(self, t: float) -> float:
        """The hypothesis under which `t` is this, value − error·t; farther where skewness asks for it."""
        return self.value - self.error * _with_skewness(t, self.skewness)

    def interval(self, level: float) -> Interval:
        """Student's, value ± t·error, with the end farther out that skewness puts there."""
        if not math.isfinite(self.error):
            return Interval(-math.inf, math.inf)
        reach = float(special.stdtrit(self.freedom, (1 + level) / 2))
        return Interval(self.end(reach), self.end(-reach))


def _without_skewness(t: float, skewness: float) -> float:
    """t + γt²/3 + γ²t³/27 + γ/6, nearly normal where t has the skewness −2γ of a mean with skewness γ.

    Only towards 0, on the side where t is too large too often; the other side is left as it is.
    """
    if _sign(t) * skewness >= 0:
        return t
    straight = t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 6
    return math.copysign(min(abs(t), max(math.copysign(1, t) * straight, 0.0)), t)


def _with_skewness(t: float, skewness: float) -> float:
    """The inverse of `_without_skewness`; of 0 the end that is farther from it."""
    if _sign(t) * skewness > 0 or abs(skewness) < TIE:
        return t
    cube = skewness * t - skewness**2 / 6  # (1 + γ·bent/3)³ − 1
    root = math.expm1(math.log1p(cube) / 3) if cube > -0.5 else math.cbrt(1 + cube) - 1
    bent = 3 * root / skewness
    return min(t, bent) if skewness > 0 else max(t, bent)


def _sign(t: float) -> int:
    return (t > 0) - (t < 0)  # a product of two small numbers may have none


@dataclass(frozen=True)
class Estimate:
    """What a comparison says of one score; None where the pairs do not say it.

    Args:
        difference: Mean of A − B: over individuals within each prompt, then over prompts.
        lower: Lower end of its interval.
        upper: Upper end.
        level: Probability of the interval.
        standard_error: Of the difference.
        median: Of the differences of pairs, or where crossed of individuals: a companion that no outlier
            moves.
        median_lower: Lower end of its exact interval, by order statistics.
        median_upper: Upper end.
        mean_a: Mean score of A.
        mean_b: Mean score of B.
        correlation: Of the pairs, within prompts.
        correlation_lower: Lower end of its interval.
        correlation_upper: Upper end.
        variance_ratio: Var(A − B)/(Var A + Var B), within prompts; 1 is independent sampling, 0 no noise.
        variance_ratio_lower: Lower end of its interval.
        variance_ratio_upper: Upper end.
        design_effect: Variance of the difference over what it would be if an individual's pairs were
            independent of one another, as they are unless crossed.
        independent_pairs: Pairs of strangers, no two of them alike, that would be needed for the same
            precision: pairs over variance ratio and design effect.
        samples_saved: Those beyond the pairs at hand; below 0 where strangers would have needed fewer.
        samples_saved_share: The same as a share of the independent pairs.
        pairs: That have both scores.
        missing: Pairs without one, such as a text without the number that is scored.
        differing: Pairs whose scores differ.
        individuals: Who answered a prompt, at most.
        prompts: That have at least two pairs.
    """

    level: float
    pairs: int
    missing: int
    differing: int
    individuals: int
    prompts: int
    difference: float | None = None
    lower: float | None = None
    upper: float | None = None
    standard_error: float | None = None
    median: float | None = None
    median_lower: float | None = None
    median_upper: float | None = None
    mean_a: float | None = None
    mean_b: float | None = None
    correlation: float | None = None
    correlation_lower: float | None = None
    correlation_upper: float | None = None
    variance_ratio: float | None = None
    variance_ratio_lower: float | None = None
    variance_ratio_upper: float | None = None
    design_effect: float | None = None
    independent_pairs: float | None = None
    samples_saved: float | None = None
    samples_saved_share: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Tally:
    """Scores of pairs as they arrive, in any order.

    Args:
        individuals: How many there may be.
        prompts: How many.
        scores: Their names.
        crossed: Whether the same individuals answer every prompt.
    """

    def __init__(
        self, individuals: int, prompts: int, scores: tuple[str, ...], *, crossed: bool = False
    ) -> None:
        self.names, self.crossed = scores, crossed
        self._seen = np.zeros((individuals, prompts), dtype=bool)
        self._scores = np.full((len(scores), 2, individuals, prompts), np.nan)

    def add(
        self, individual: int, prompt: int, scores_a: tuple[float, ...], scores_b: tuple[float, ...]
    ) -> None:
        """One pair: indices of who and what, and its scores in the order of the names; NaN is missing."""
        self._seen[individual, prompt] = True
        self._scores[:, 0, individual, prompt] = scores_a
        self._scores[:, 1, individual, prompt] = scores_b

    @property
    def pairs(self) -> int:
        """How many arrived."""
        return int(self._seen.sum())

    def matrices(self, name: str, individuals: int | None = None) -> tuple[Matrix, Matrix]:
        """Scores of A and of B, (individuals, prompts), NaN where there is none; of the first individuals."""
        one, other = self._scores[self.names.index(name)]
        return one[:individuals], other[:individuals]

    def estimate(
        self, name: str, individuals: int | None = None, *, level: float = 0.95, seed: int = 0
    ) -> Estimate:
        """Of one score, by the pairs that have arrived; ``seed`` is the bootstrap's."""
        matrices = self.matrices(name, individuals)
        seen = int(self._seen[:individuals].sum())
        return estimate(*matrices, seen=seen, level=level, crossed=self.crossed, seed=seed)

    def difference(self, name: str, individuals: int | None = None) -> Mean:
        """Mean difference of one score, A − B."""
        one, other = self.matrices(name, individuals)
        return mean_difference(one - other, crossed=self.crossed)


def mean_difference(difference: Matrix, *, crossed: bool) -> Mean:
    """Mean over prompts of the means over individuals, for differences (n, P) with NaN where missing.

    Crossed, over the `units`. Else the prompts are strata: the variance is 1/P² Σ_p s_p²/n_p, with the
    degrees of freedom of Welch and Satterthwaite, and the third moment 1/P³ Σ_p k_p/n_p², with Fisher's k of
    prompts that have three pairs. Prompts with fewer than two are left out.
    """
    if crossed:
        return Mean.of(units(difference))
    counts = np.isfinite(difference).sum(0)
    difference, counts = difference[:, counts >= 2], counts[counts >= 2]
    if difference.size == 0:
        return Mean(math.nan, math.inf, 0)
    parts = np.nanvar(difference, axis=0, ddof=1) / counts  # (P,)
    means = np.nanmean(difference, axis=0)
    spread, freedom, skewness = parts.sum(), float((counts - 1).sum()), 0.0
    if spread > 0:
        freedom = float(spread**2 / (parts**2 / (counts - 1)).sum())
        cubes = np.nansum(((difference - means) / math.sqrt(spread)) ** 3, axis=0)
        # k_p/n_p² with k_p = n_p·cubes/((n_p − 1)(n_p − 2)); of two pairs, cubes are 0
        skewness = float((cubes / (counts * (counts - 1) * np.maximum(counts - 2, 1))).sum())
    return Mean(float(means.mean()), math.sqrt(spread) / len(parts), freedom, skewness)


def units(difference: Matrix) -> Vector:
    """Each individual's part in the mean difference, (n,), for differences (n, P) with NaN where missing.

    With nothing missing this is its mean over the prompts; else z_i = d̄ + 1/P Σ_p [there](n/n_p)(d_ip − d̄_p),
    whose mean is the mean over prompts of the means of what is there. Individuals without a pair, and
    prompts with fewer than two, are left out.
    """
    there = np.isfinite(difference)
    difference = difference[:, there.sum(0) >= 2]
    there = np.isfinite(difference)
    difference, there = difference[there.any(1)], there[there.any(1)]
    if difference.size == 0:
        return np.empty(0)
    counts = there.sum(0)
    means = np.where(there, difference, 0).sum(0) / counts  # (P,)
    shares = np.where(there, difference - means, 0) * (len(difference) / counts)
    result: Vector = means.mean() + shares.mean(1)
    return result


def median_interval(values: Vector, level: float) -> Interval:
    """Order statistics between which the median lies with at least this probability, whatever the law."""
    ordered, tail = np.sort(values), (1 - level) / 2
    rank = int(stats.binom.ppf(tail, len(values), 0.5))
    if rank == 0:  # too few: even the extremes do not reach the level
        return Interval(-math.inf, math.inf)
    return Interval(float(ordered[rank - 1]), float(ordered[len(values) - rank]))


def estimate(
    one: Matrix, other: Matrix, *, seen: int, level: float, crossed: bool = False, seed: int = 0
) -> Estimate:
    """Of scores of A and of B, (individuals, prompts) each.

    Args:
        one: Scores of A; NaN where missing.
        other: Scores of B.
        seen: Pairs that were scored, also those that have no score.
        level: Of all intervals.
        crossed: Whether the same individuals answer every prompt.
        seed: Of the bootstrap.
    """
    both = np.isfinite(one) & np.isfinite(other)
    kept = both.sum(0) >= 2
    one, other = (np.where(both, scores, np.nan)[:, kept] for scores in (one, other))
    people = np.isfinite(one).any(1)
    one, other = one[people], other[people]
    both = np.isfinite(one)
    facts = {
        "pairs": int(both.sum()), "missing": seen - int(both.sum()),
        "differing": int((one[both] != other[both]).sum()),
        "individuals": len(one), "prompts": one.shape[1],
    }  # fmt: skip
    if one.size == 0:
        return Estimate(level=level, **facts)
    mean = mean_difference(one - other, crossed=crossed)
    interval, error = mean.interval(level), mean.error
    values = units(one - other) if crossed else (one - other)[both]
    reach = median_interval(values, level)
    moments = _moments(one, other, np.ones((1, len(one))))
    ratio, correlation = float(_ratio(moments)[0]), float(_correlation(moments)[0])
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(len(one), np.full(len(one), 1 / len(one)), size=REDRAWS)
    redrawn = _moments(one, other, weights.astype(float))
    ratios, correlations = _quantiles(_ratio(redrawn), level), _quantiles(_correlation(redrawn), level)
    paired = float(moments.of_difference[0])
    design = math.nan if paired == 0 else error**2 * facts["pairs"] / paired if crossed else 1.0
    independent = facts["pairs"] / (ratio * design) if ratio > 0 else math.inf
    return Estimate(
        difference=mean.value,
        lower=_known(interval.lower),
        upper=_known(interval.upper),
        level=level,
        standard_error=_known(error),
        median=float(np.median(values)),
        median_lower=_known(reach.lower),
        median_upper=_known(reach.upper),
        mean_a=float(np.nanmean(one, 0).mean()),
        mean_b=float(np.nanmean(other, 0).mean()),
        correlation=_known(correlation),
        correlation_lower=_known(correlations.lower),
        correlation_upper=_known(correlations.upper),
        variance_ratio=_known(ratio),
        variance_ratio_lower=_known(ratios.lower),
        variance_ratio_upper=_known(ratios.upper),
        design_effect=_known(design),
        independent_pairs=_known(independent),
        samples_saved=_known(independent - facts["pairs"]),
        samples_saved_share=_known(1 - facts["pairs"] / independent),
        **facts,
    )


class _Moments(NamedTuple):
    """Mean over prompts of variances within prompts, one per redraw: (R,) each."""

    of_one: Vector
    of_other: Vector
    of_difference: Vector


def _moments(one: Matrix, other: Matrix, weights: Matrix) -> _Moments:
    """Of individuals that occur as often as the weights say, (R, n)."""
    there = np.isfinite(one).astype(float)
    counts = weights @ there  # (R, P)

    def variance(scores: Matrix) -> Vector:
        center = np.nanmean(scores, 0)  # a shift changes no variance, and keeps the squares small
        shifted = np.where(there > 0, scores - center, 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = weights @ shifted / counts
            spread = weights @ shifted**2 / counts - means**2
            unbiased = np.where(counts >= 2, np.maximum(spread, 0.0) * counts / (counts - 1), np.nan)
        known = np.isfinite(unbiased)
        sums: Vector = np.where(known, unbiased, 0.0).sum(1)
        # A spread that is rounding alone is none.
        floor = TIE * float((shifted**2).max(initial=0.0))
        means_of_variances: Vector = np.where(sums > floor, sums, 0.0) / np.maximum(known.sum(1), 1)
        return means_of_variances

    return _Moments(variance(one), variance(other), variance(one - other))


def _ratio(moments: _Moments) -> Vector:
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio: Vector = moments.of_difference / (moments.of_one + moments.of_other)
    return ratio


def _correlation(moments: _Moments) -> Vector:
    covariance = (moments.of_one + moments.of_other - moments.of_difference) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation: Vector = covariance / np.sqrt(moments.of_one * moments.of_other)
    return correlation


def _quantiles(values: Vector, level: float) -> Interval:
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return Interval(math.nan, math.nan)
    return Interval(*(float(end) for end in np.quantile(values, [(1 - level) / 2, (1 + level) / 2])))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
