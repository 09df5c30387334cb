"""Pairs of scores → the mean paired difference with its interval, and what the pairing was worth.

Prompts are fixed and individuals are drawn. Where every prompt has individuals of its own, pairs are
independent and prompts are strata. Where the same individuals answer every prompt (*crossed*), their pairs
are dependent, an individual is the unit, and its differences are averaged over the prompts. Student's t gives
the interval; it is self-normalised: under heavy tails it widens with its own outliers and errs on the side of
caution. Under skewed ones it errs on one side, to which Hall's (1992) transformation moves an end: outwards
only, because where tails are heavy a sample's skewness is chance. Where no two pairs differ in their
difference, no sample tells how far another one would: as many as may have been missed are taken to differ by
the span of the scores. What pairing was worth is said by `pairing`. This module knows numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from causal_qwen.counterfactual.comparison.pairing import TIE, Interval, worth

__all__ = ["Estimate", "Interval", "Mean", "Tally", "known", "mean_difference", "units"]

Matrix = npt.NDArray[np.float64]
Vector = npt.NDArray[np.float64]
# Pairs that nobody has seen may be 3/n of them with probability 0.05: two standard errors of this over n.
UNSEEN = 1.5


class Mean(NamedTuple):
    """A mean, its standard error, the degrees of freedom that the error is known with, and its skewness."""

    value: float
    error: float
    freedom: float
    skewness: float = 0.0  # of the mean's own law, not of the values'

    @classmethod
    def of(cls, values: Vector, *, span: float | None = 0.0) -> Mean:
        """Of independent values (n,) of one law; nothing is known of the error where n < 2."""
        if len(values) < 2:
            return cls(float(values.mean()) if len(values) else math.nan, math.inf, 0)
        return mean_difference(values[:, None], crossed=False, span=span)

    @property
    def is_known(self) -> bool:
        """Whether there is a mean with an error."""
        return math.isfinite(self.value) and math.isfinite(self.error)

    @property
    def t(self) -> float:
        """The studentised mean; nearer to 0 where skewness alone would take it as far."""
        if self.error == 0:
            return self.value and math.copysign(math.inf, self.value)
        return _without_skewness(self.value / self.error, self.skewness)

    def end(self, t: float) -> float:
        """The hypothesis under which `t` is this, value − error·t; farther where skewness asks for it."""
        return self.value - self.error * _with_skewness(t, self.skewness)

    def interval(self, level: float) -> Interval:
        """Student's, value ± t·error, with the end farther out that skewness puts there."""
        if not self.is_known:
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
        spans: How far apart a score's values can lie, where that is known without seeing any.
        equal: Whether both sides are one and the same, so that no pair can differ.
    """

    def __init__(
        self,
        individuals: int,
        prompts: int,
        scores: tuple[str, ...],
        *,
        crossed: bool = False,
        spans: Mapping[str, float] | None = None,
        equal: bool = False,
    ) -> None:
        self.names, self.crossed, self.spans, self.equal = scores, crossed, spans or {}, equal
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

    def estimate(self, name: str, individuals: int | None = None, *, level: float = 0.95) -> Estimate:
        """Of one score, by the pairs that have arrived."""
        matrices = self.matrices(name, individuals)
        seen = int(self._seen[:individuals].sum())
        return estimate(*matrices, seen=seen, level=level, crossed=self.crossed, span=self._known_span(name))

    def difference(self, name: str, individuals: int | None = None) -> Mean:
        """Mean difference of one score, A − B."""
        one, other = self.matrices(name, individuals)
        span = _span(one, other, self._known_span(name))
        return mean_difference(one - other, crossed=self.crossed, span=span)

    def _known_span(self, name: str) -> float | None:
        return None if self.equal else self.spans.get(name, 0.0)


def mean_difference(difference: Matrix, *, crossed: bool, span: float | None = 0.0) -> Mean:
    """Mean over prompts of the means over individuals, for differences (n, P) with NaN where missing.

    Crossed, over the `units`. Else the prompts are strata: the variance is 1/P² Σ_p s_p²/n_p, with the
    degrees of freedom of Welch and Satterthwaite, and the third moment 1/P³ Σ_p k_p/n_p², with Fisher's k of
    prompts that have three pairs. Prompts with fewer than two are left out. Without any spread the error is
    that of pairs which were not seen and may differ by a ``span``; where that is 0 nobody knows it, and None
    says that there are none.
    """
    if crossed:
        return Mean.of(units(difference), span=span)
    counts = np.isfinite(difference).sum(0)
    difference, counts = difference[:, counts >= 2], counts[counts >= 2]
    if difference.size == 0:
        return Mean(math.nan, math.inf, 0)
    parts = np.nanvar(difference, axis=0, ddof=1) / counts  # (P,)
    means = np.nanmean(difference, axis=0)
    spread = parts.sum()
    if spread <= (TIE * np.nanmax(np.abs(difference))) ** 2:
        error = 0.0 if span is None else UNSEEN * span / int(counts.sum()) if span else math.inf
        return Mean(float(means.mean()), error, float((counts - 1).sum()))
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
    one: Matrix, other: Matrix, *, seen: int, level: float, crossed: bool = False, span: float | None = 0.0
) -> Estimate:
    """Of scores of A and of B, (individuals, prompts) each.

    Args:
        one: Scores of A; NaN where missing.
        other: Scores of B.
        seen: Pairs that were scored, also those that have no score.
        level: Of all intervals.
        crossed: Whether the same individuals answer every prompt.
        span: How far apart scores can lie, as far as that is known without them; None where no pair differs.
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
    mean = mean_difference(one - other, crossed=crossed, span=_span(one, other, span))
    interval, error = mean.interval(level), mean.error
    values = units(one - other) if crossed else (one - other)[both]
    reach = median_interval(values, level)
    gain = worth(one, other, level=level, crossed=crossed)
    design = 1.0
    if crossed:
        design = math.nan if gain.paired == 0 else error**2 * facts["pairs"] / gain.paired
    independent = math.inf if gain.ratio == 0 else facts["pairs"] / (gain.ratio * design)
    return Estimate(
        difference=mean.value,
        lower=known(interval.lower),
        upper=known(interval.upper),
        level=level,
        standard_error=known(error),
        median=float(np.median(values)),
        median_lower=known(reach.lower),
        median_upper=known(reach.upper),
        mean_a=float(np.nanmean(one, 0).mean()),
        mean_b=float(np.nanmean(other, 0).mean()),
        correlation=known(gain.correlation),
        correlation_lower=known(gain.correlation_ends.lower),
        correlation_upper=known(gain.correlation_ends.upper),
        variance_ratio=known(gain.ratio),
        variance_ratio_lower=known(gain.ratio_ends.lower),
        variance_ratio_upper=known(gain.ratio_ends.upper),
        design_effect=known(design),
        independent_pairs=known(independent),
        samples_saved=known(independent - facts["pairs"]),
        samples_saved_share=known(1 - facts["pairs"] / independent),
        **facts,
    )


def _span(one: Matrix, other: Matrix, known: float | None) -> float | None:
    """How far apart scores lie, those that were seen among them; None where no pair can differ."""
    both = np.concatenate([one, other])
    seen = both[np.isfinite(both)]
    return None if known is None else max(known, float(np.ptp(seen)) if seen.size else 0.0)


def known(value: float) -> float | None:
    """The value; None where it is no number."""
    return value if math.isfinite(value) else None
