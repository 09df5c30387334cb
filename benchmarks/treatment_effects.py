"""Effects on data that others published: IHDP, response surfaces A and B, and ACIC 2016, as sentences.

The number head is solved on the factual outcomes of three quarters of the units; the effect on each of the
others is the difference of what it predicts with either treatment. √PEHE is the root mean squared error of
that effect, beside the error of the average one. Boosting as one model and as two, and a causal forest, get
the columns. Features do not depend on outcomes and are computed once for all simulations. Value space, and
whether one head serves both treatments or each has its own, are those under which left-out factual rows are
likeliest.

    python benchmarks/treatment_effects.py                             # half an hour on two cores
    python benchmarks/treatment_effects.py --data "IHDP B" --units 240
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import effect_data
from effect_data import Draw, Units
from effect_learners import boosted_effect, boosted_worlds, forest_effect, resampled, with_interval
from measure import BASE, Option, Record, Table, run_benchmark, watched
from worlds import both_worlds, solve

OPTIONS = {
    "base": BASE,
    "data": Option("which", ("IHDP A", "IHDP B", "ACIC 2016"), smoke=("IHDP B",), quick=("IHDP B",)),
    "units": Option("of IHDP, at most", 747, smoke=60, quick=240),
    "anonymous_units": Option("of ACIC 2016, whose sentences are long", 400, smoke=60),
    "simulations": Option("of each", 10, smoke=1, quick=3),
    "trees": Option("of the causal forest", 400, smoke=8),
    "keep": Option("directory in which features are kept between runs", "", smoke=""),
    "threads": Option("of torch", 2, smoke=1),
}
LEARNERS = {
    "causal": "ours",
    "boosting_s": "boosting, one model (S)",
    "boosting_t": "boosting, two models (T)",
    "forest": "causal forest",
}
BOOSTING = ("boosting_s", "boosting_t")
# √PEHE out of sample, mean over 1,000 draws of IHDP (Shalit, Johansson and Sontag, 2017).
PUBLISHED = {"TARNet": 0.95, "BART": 2.3}
HELD_OUT = 0.25  # of the units


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    quick = "fewer units of one table, fewer simulations"
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick=quick, argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """By data: each learner's errors over simulations, and ours over that of the better boosting."""
    torch.set_num_threads(arguments.threads)
    effects = {name: _effects(arguments, name) for name in arguments.data}
    return {"effects": effects, "published": PUBLISHED}


def _effects(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    units = _units(arguments, name)
    family = f"{name.split()[0].lower()}-{len(units.sentences)}"
    keep = Path(arguments.keep) / f"{family}.npz" if arguments.keep else None
    causes = both_worlds(arguments.base, units.sentences, units.clauses, keep)
    loc_U, rounding = causes.loc_U, causes.rounding
    runs: dict[str, dict[str, list[float]]] = {arm: {"pehe": [], "ate": []} for arm in LEARNERS}
    chosen, covered = [], []
    for number in watched(range(arguments.simulations), name):
        draw = units.draw(number)
        order = np.random.default_rng(number).permutation(len(draw.effect))
        size = round(HELD_OUT * len(order))
        train_part, test_part = order[size:], order[:size]
        fit = solve(loc_U[train_part], draw.treated[train_part], draw.outcome[train_part], rounding=rounding)
        ours = fit.medians(loc_U[test_part])
        rows = (units.columns, draw.treated, draw.outcome, train_part, test_part)
        two = boosted_worlds(*rows)
        effects = {
            "causal": ours[:, 1] - ours[:, 0],
            "boosting_s": boosted_effect(*rows),
            "boosting_t": two[:, 1] - two[:, 0],
            "forest": forest_effect(*rows, trees=arguments.trees),
        }
        truth = draw.effect[test_part]
        for arm, effect in effects.items():
            runs[arm]["pehe"].append(float(np.sqrt(np.mean((effect - truth) ** 2))))
            runs[arm]["ate"].append(float(abs(effect.mean() - truth.mean())))
        chosen.append(fit.name)
        covered.append(_coverage(loc_U, draw, train_part, test_part, rounding))
    best = min(BOOSTING, key=lambda arm: statistics.fmean(runs[arm]["pehe"]))
    pair = [np.array(runs[arm]["pehe"]) for arm in ("causal", best)]
    return {
        "arms": {
            arm: {
                figure: {
                    "mean": statistics.fmean(values),
                    "interval": resampled([np.array(values)], lambda part: part.mean()),
                    "median": statistics.median(values),
                }
                for figure, values in run.items()
            }
            for arm, run in runs.items()
        },
        "best_boosting": best,
        "ratio": float(pair[0].mean() / pair[1].mean()),
        "ratio_interval": resampled(pair, lambda one, two: one.mean() / two.mean()),
        "coverage": statistics.fmean(covered),
        "coverage_interval": resampled([np.array(covered)], lambda part: part.mean()),
        "chosen": chosen,
        "units": len(units.sentences),
        "held_out": round(HELD_OUT * len(units.sentences)),
    }


def _coverage(loc_U: Any, draw: Draw, train_part: Any, test_part: Any, rounding: Any) -> float:
    """Share of units whose outcome under the other treatment is inside its 90% interval, by one head for
    both, as a trained model has; the outcome is the observed one, moved by the true effect.
    """
    fit = solve(
        loc_U[train_part], draw.treated[train_part], draw.outcome[train_part], rounding=rounding, heads=(1,)
    )
    treated, observed = draw.treated[test_part], draw.outcome[test_part]
    answer = fit.otherwise(loc_U[test_part], treated, observed)
    assert answer.lower is not None
    assert answer.upper is not None
    truth = observed + np.where(treated, -1, 1) * draw.effect[test_part]
    return float(((answer.lower.numpy() <= truth) & (truth <= answer.upper.numpy())).mean())


def _units(arguments: argparse.Namespace, name: str) -> Units:
    if name == "ACIC 2016":
        return effect_data.acic(arguments.anonymous_units)
    return effect_data.ihdp(name.removeprefix("IHDP "), arguments.units)


def tables(record: Record) -> list[Table]:
    """Both errors of all learners, and what others published."""
    effects, shown = record.figures["effects"], []
    for figure, label in (("pehe", "√PEHE"), ("ate", "Error of the average effect")):
        rows = []
        for name, effect in effects.items():
            about = f"{name} ({effect['units']} units, {len(effect['chosen'])} simulations)"
            entries = [effect["arms"][arm][figure] for arm in LEARNERS]
            rows.append((about, *(with_interval(entry["mean"], entry["interval"]) for entry in entries)))
        heading = f"{label} on held-out units, mean over simulations (95% interval)"
        shown.append(Table(heading, ("", *LEARNERS.values()), rows))
    rows = [
        (
            name,
            with_interval(effect["ratio"], effect["ratio_interval"]),
            LEARNERS[effect["best_boosting"]],
            "; ".join(sorted(set(effect["chosen"]))),
            "{:.0%} ({:.0%}–{:.0%})".format(effect["coverage"], *effect["coverage_interval"]),
        )
        for name, effect in effects.items()
    ]
    columns = (
        "", "ratio", "better boosting", "ours, chosen by factual likelihood",
        "counterfactual outcomes inside 90% intervals of one head",
    )  # fmt: skip
    shown.append(Table("Our √PEHE over that of the better boosting", columns, rows))
    published = [(name, str(value)) for name, value in record.figures["published"].items()]
    heading = "√PEHE on IHDP out of sample as published, mean over 1,000 draws that are not these"
    return [*shown, Table(heading, ("", "√PEHE"), published)]


def headlines(record: Record) -> list[tuple[str, str]]:
    """How we compare with boosting."""
    effects = record.figures["effects"].items()
    ratios = ", ".join(f"{name} {effect['ratio']:.2f}" for name, effect in effects)
    return [("√PEHE over that of the better boosting learner", ratios)]


if __name__ == "__main__":
    main()
