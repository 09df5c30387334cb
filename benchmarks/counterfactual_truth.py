"""Counterfactuals of numbers against a truth that is known, and effects against what others measured.

People: a structural model of our own (`structural`) writes sentences of 750 people, of whom everybody makes
one of two choices. The number head is solved on what happened to 500 of them. For the others the observed
income says who they are, and the income of the other choice is asked; the structural model knows it. Beside
it: the same head without the observation, the observed income itself, two boosting models on the columns
with and without the same step, and the base with digits as text and replayed Gumbel noise. Nothing is chosen
by the truth: the value space is the one under which left-out factual rows are likelier, and for effects so
is whether each world has a head of its own.

Effects (`effect_data`): IHDP, response surfaces A and B, and ACIC 2016, as sentences; the root mean squared
error of the effect on each held-out unit (√PEHE) and of their average.

    python benchmarks/counterfactual_truth.py              # half an hour on two cores
    python benchmarks/counterfactual_truth.py --quick      # people only, one draw of choices and noise
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import effect_data
import structural
from causal_qwen.conversion import load_model
from causal_qwen.counterfactual import counterfactual_numbers
from causal_qwen.data import Reading
from causal_qwen.training import TrainingRecipe, train
from effect_data import Units
from measure import BASE, Option, Record, Table, run_benchmark, watched
from replay import GumbelReplay, Question, replaced
from structural import CLAUSES, NOISES, Array, Person
from worlds import both_worlds, solve

OPTIONS = {
    "base": BASE,
    "people": Option("of the structural model", 750, smoke=80),
    "tested": Option("people who are held out, others in each draw", 250, smoke=20),
    "draws": Option("of choices and noise", 3, smoke=1, quick=2),
    "trained": Option("people whom the default recipe learns from end to end", 300, smoke=30, quick=0),
    "replayed": Option("people whose digits are replayed", 40, smoke=1, quick=16),
    "shots": Option("training rows that digits as text reads", 12, smoke=1),
    "effects": Option(
        "data with known effects", ("IHDP A", "IHDP B", "ACIC 2016"), smoke=("IHDP B",), quick=()
    ),
    "units": Option("of IHDP, at most", 400, smoke=60),
    "anonymous_units": Option("of ACIC 2016, whose sentences are long", 300, smoke=60),
    "simulations": Option("of each", 10, smoke=1),
    "trees": Option("of the causal forest", 400, smoke=8),
    "keep": Option("directory in which features are kept between runs", "", smoke=""),
    "threads": Option("of torch", 2, smoke=1),
}
TEMPLATE = "{who} {choice} The monthly income is now {income}"
OURS, PLAIN = "abducted", "prediction"
ARMS = {
    OURS: "ours, abducted from the observed number",
    PLAIN: "ours, without the observation",
    "unchanged": "the observed number, no effect",
    "boosting": "boosting, two models",
    "boosting_abducted": "boosting, two models, and the residual kept",
    "digits": "digits as text, Gumbel noise replayed",
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
RESAMPLES = 2000
# The noise and who chooses; what is judged is decided by a coin, as in a trial.
WORLDS = {noise: (noise, False) for noise in NOISES} | {"confounded": ("additive", True)}
HEADINGS = {noise: f"{noise} noise" for noise in NOISES} | {"confounded": "additive, choices by the person"}
HELD_OUT = 0.25  # of units


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="people only, one draw", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios of median errors first, then everything by noise and by data."""
    torch.set_num_threads(arguments.threads)
    noises = _people(arguments)
    return {
        **{f"{noise}_ratio": noises[noise]["ratio"] for noise in NOISES},
        "noises": noises,
        "end_to_end": _end_to_end(arguments) if arguments.trained else {},
        "effects": {name: _effects(arguments, name) for name in arguments.effects},
        "published": PUBLISHED,
    }


def _kept(arguments: argparse.Namespace, name: str) -> Path | None:
    return Path(arguments.keep) / f"{name}.npz" if arguments.keep else None


# People -----------------------------------------------------------------------------------------------------


def _people(arguments: argparse.Namespace) -> dict[str, Any]:
    persons = structural.people(arguments.people, seed=0)
    endings = [f" {clause} The monthly income is now" for clause in CLAUSES]
    name = f"people-{arguments.people}"
    loc_U, rounding = both_worlds(
        arguments.base, [str(one) for one in persons], endings, _kept(arguments, name)
    )
    columns = structural.columns(persons)
    digits = GumbelReplay(arguments.base, arguments.shots) if arguments.replayed else None
    found = {}
    for world in WORLDS:
        errors: dict[str, list[Array]] = {}
        held, chosen, unreadable = [], [], 0
        for seed in watched(range(arguments.draws), world):
            choice, income, train_part, test_part = _draw(persons, world, seed, arguments.tested)
            observed = income[np.arange(len(persons)), choice]
            truth = income[np.arange(len(persons)), 1 - choice][test_part]
            fit = solve(
                loc_U[train_part], choice[train_part], observed[train_part], rounding=rounding, heads=(1,)
            )
            ours = fit.otherwise(loc_U[test_part], choice[test_part], observed[test_part])
            boosted = _boosted_worlds(columns, choice, observed, train_part, test_part)
            rows = np.arange(len(test_part))
            factual, other = boosted[rows, choice[test_part]], boosted[rows, 1 - choice[test_part]]
            answers = {
                OURS: ours.median.numpy(),
                PLAIN: ours.prediction.numpy(),
                "unchanged": observed[test_part],
                "boosting": other,
                "boosting_abducted": observed[test_part] + other - factual,
            }
            if digits is not None and seed == 0 and world in NOISES:
                asked = test_part[: arguments.replayed]
                given = _digits(digits, persons, choice, observed, train_part, asked)
                answers["digits"], unreadable = given
            for arm, answer in answers.items():
                errors.setdefault(arm, []).append(np.abs(answer - truth[: len(answer)]))
            assert ours.lower is not None
            assert ours.upper is not None
            held.append((ours.lower.numpy() <= truth) & (truth <= ours.upper.numpy()))
            chosen.append(fit.name)
        found[world] = _summary(errors, held) | {"chosen": chosen, "unreadable": unreadable}
    return found


def _draw(persons: Sequence[Person], world: str, seed: int, tested: int) -> tuple[Array, Array, Array, Array]:
    """Choices (N,), incomes (N, 2), and who is trained and tested on: others in each draw."""
    noise, confounded = WORLDS[world]
    draw = np.random.default_rng([seed, NOISES.index(noise)])
    choice = structural.choices(persons, draw, confounded=confounded)
    income = structural.incomes(persons, noise, draw)
    order = np.roll(np.random.default_rng(0).permutation(len(persons)), -seed * tested)
    return choice, income, order[tested:], order[:tested]


def _summary(errors: dict[str, list[Array]], held: list[Array]) -> dict[str, Any]:
    """Median errors over all draws, with intervals over resampled people."""
    pooled = {arm: np.concatenate(parts) for arm, parts in errors.items()}
    arms = {
        arm: {"mdae": float(np.median(one)), "interval": _interval([one], lambda part: np.median(part))}
        for arm, one in pooled.items()
    }
    pair = [pooled[OURS], pooled[PLAIN]]
    ratio = float(np.median(pair[0]) / np.median(pair[1]))
    covered = np.concatenate(held).astype(float)
    others = [one for arm, one in pooled.items() if arm != OURS and len(one) == len(pair[0])]

    def to_best(ours: Array, *rest: Array) -> Any:
        return np.median(ours) / min(np.median(one) for one in rest)

    return {
        "arms": arms,
        "ratio": ratio,
        "ratio_interval": _interval(pair, lambda one, two: np.median(one) / np.median(two)),
        "ratio_to_best": float(to_best(pair[0], *others)),
        "ratio_to_best_interval": _interval([pair[0], *others], to_best),
        "coverage": float(covered.mean()),
        "coverage_interval": _interval([covered], lambda part: part.mean()),
        "tested": len(pair[0]),
    }


def _interval(samples: Sequence[Array], statistic: Callable[..., Any]) -> list[float]:
    """95%, by the bootstrap over the entries that all samples share."""
    draw = np.random.default_rng(0)
    count = len(samples[0])
    values = []
    for _ in range(RESAMPLES):
        chosen = draw.integers(0, count, count)
        values.append(float(statistic(*(sample[chosen] for sample in samples))))
    return [float(end) for end in np.quantile(values, [0.025, 0.975])]


def _digits(
    digits: GumbelReplay,
    persons: Sequence[Person],
    choice: Array,
    observed: Array,
    train_part: Array,
    asked: Array,
) -> tuple[Array, int]:
    def prompt(index: int, world: int) -> str:
        return f"{persons[index]} {CLAUSES[world]} The monthly income is now"

    shown = train_part[: digits.shots]
    lines = [f"{prompt(index, choice[index])} {observed[index]:.0f}" for index in shown]
    questions = [
        Question(prompt(i, choice[i]), f"{observed[i]:.0f}", prompt(i, 1 - choice[i])) for i in asked
    ]
    answers, missing = replaced(
        digits.answers(lines, questions, seed=0), float(np.median(observed[train_part]))
    )
    return np.array(answers), missing


def _end_to_end(arguments: argparse.Namespace) -> dict[str, Any]:
    """The default recipe of ``causal-qwen train`` and `counterfactual_numbers`, additive noise."""
    persons = structural.people(arguments.people, seed=0)
    choice, income, train_part, test_part = _draw(persons, "additive", 0, arguments.tested)
    rows = [
        {"who": str(one), "choice": CLAUSES[t], "income": income[index, t]}
        for index, (one, t) in enumerate(zip(persons, choice, strict=True))
    ]
    learned = [rows[index] for index in train_part[: arguments.trained]]
    asked = [rows[index] for index in test_part[: arguments.trained // 3]]
    other = [row | {"choice": CLAUSES[1 - CLAUSES.index(row["choice"])]} for row in asked]
    with tempfile.TemporaryDirectory() as directory:
        recipe = TrainingRecipe(
            output=f"{directory}/model",
            model=arguments.base,
            template=TEMPLATE,
            target="income",
            validation_fraction=0.0,
        )
        output = train(recipe, rows=learned, progress=None).output
        model, processor = load_model(str(output))
        answer = counterfactual_numbers(model, processor, asked, other, reading=Reading.of(output))
    truth = np.array([income[i, 1 - choice[i]] for i in test_part[: len(asked)]])
    errors = [np.abs(column.numpy() - truth) for column in (answer.median, answer.prediction)]
    return {
        "people": len(learned),
        "tested": len(asked),
        "mdae": float(np.median(errors[0])),
        "prediction_mdae": float(np.median(errors[1])),
        "ratio": float(np.median(errors[0]) / np.median(errors[1])),
        "ratio_interval": _interval(errors, lambda one, two: np.median(one) / np.median(two)),
    }


# Learners on the columns ------------------------------------------------------------------------------------


def _boosted(x: Array, y: Array) -> Any:
    """Of the two implementations the one with the smaller cross-validated error, fitted."""
    from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor
    from sklearn.model_selection import cross_val_score

    models = (HistGradientBoostingRegressor(random_state=0), GradientBoostingRegressor(random_state=0))
    scores = [cross_val_score(model, x, y, cv=3, scoring="neg_mean_squared_error").mean() for model in models]
    return models[int(np.argmax(scores))].fit(x, y)


def _boosted_worlds(
    columns: Array, world: Array, observed: Array, train_part: Array, test_part: Array
) -> Array:
    """(N, 2) of held-out rows by two models, one for each world."""
    fitted = []
    for index in (0, 1):
        rows = train_part[world[train_part] == index]
        fitted.append(_boosted(columns[rows], observed[rows]).predict(columns[test_part]))
    return np.stack(fitted, axis=1)


def _boosted_effect(
    columns: Array, world: Array, observed: Array, train_part: Array, test_part: Array
) -> Array:
    """(N,) by one model that has the world as a column."""
    model = _boosted(np.column_stack([columns, world])[train_part], observed[train_part])
    x = columns[test_part]
    ends = [model.predict(np.column_stack([x, np.full(len(x), index)])) for index in (0, 1)]
    effect: Array = ends[1] - ends[0]
    return effect


def _forest_effect(
    columns: Array, world: Array, observed: Array, train_part: Array, test_part: Array, trees: int
) -> Array:
    """(N,) by a causal forest on residuals (double machine learning)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies
        from econml.dml import CausalForestDML
        from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

        forest = CausalForestDML(
            model_y=GradientBoostingRegressor(random_state=0),
            model_t=GradientBoostingClassifier(random_state=0),
            discrete_treatment=True,
            n_estimators=trees,
            random_state=0,
            n_jobs=1,
        )
        forest.fit(observed[train_part], world[train_part], X=columns[train_part])
        effect: Array = forest.effect(columns[test_part]).ravel()
    return effect


# Effects ----------------------------------------------------------------------------------------------------


def _effects(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    units = _units(arguments, name)
    family = f"{name.split()[0].lower()}-{len(units.sentences)}"
    loc_U, rounding = both_worlds(arguments.base, units.sentences, units.clauses, _kept(arguments, family))
    runs: dict[str, dict[str, list[float]]] = {arm: {"pehe": [], "ate": []} for arm in LEARNERS}
    chosen = []
    for number in watched(range(arguments.simulations), name):
        draw = units.draw(number)
        order = np.random.default_rng(number).permutation(len(draw.effect))
        size = round(HELD_OUT * len(order))
        train_part, test_part = order[size:], order[:size]
        fit = solve(loc_U[train_part], draw.treated[train_part], draw.outcome[train_part], rounding=rounding)
        ours = fit.medians(loc_U[test_part])
        rows = (units.columns, draw.treated, draw.outcome, train_part, test_part)
        two = _boosted_worlds(*rows)
        effects = {
            "causal": ours[:, 1] - ours[:, 0],
            "boosting_s": _boosted_effect(*rows),
            "boosting_t": two[:, 1] - two[:, 0],
            "forest": _forest_effect(*rows, trees=arguments.trees),
        }
        truth = draw.effect[test_part]
        for arm, effect in effects.items():
            runs[arm]["pehe"].append(float(np.sqrt(np.mean((effect - truth) ** 2))))
            runs[arm]["ate"].append(float(abs(effect.mean() - truth.mean())))
        chosen.append(fit.name)
    best = min(BOOSTING, key=lambda arm: statistics.fmean(runs[arm]["pehe"]))
    pair = [np.array(runs[arm]["pehe"]) for arm in ("causal", best)]
    return {
        "arms": {
            arm: {
                figure: {
                    "mean": statistics.fmean(values),
                    "interval": _interval([np.array(values)], lambda part: part.mean()),
                    "median": statistics.median(values),
                }
                for figure, values in run.items()
            }
            for arm, run in runs.items()
        },
        "best_boosting": best,
        "ratio": float(pair[0].mean() / pair[1].mean()),
        "ratio_interval": _interval(pair, lambda one, two: one.mean() / two.mean()),
        "chosen": chosen,
        "units": len(units.sentences),
        "held_out": round(HELD_OUT * len(units.sentences)),
    }


def _units(arguments: argparse.Namespace, name: str) -> Units:
    if name == "ACIC 2016":
        return effect_data.acic(arguments.anonymous_units)
    return effect_data.ihdp(name.removeprefix("IHDP "), arguments.units)


# What is shown ----------------------------------------------------------------------------------------------


def tables(record: Record) -> list[Table]:
    """Errors by noise, the ratios, and the effects."""
    found = record.figures["noises"]
    rows = [(label, *(_arm(found[world]["arms"], arm) for world in WORLDS)) for arm, label in ARMS.items()]
    ratios = [f"{one['ratio']:.2f} ({_ends(one['ratio_interval'])})" for one in found.values()]
    rows.append(("abducted over not abducted", *ratios))
    ratios = [f"{o['ratio_to_best']:.2f} ({_ends(o['ratio_to_best_interval'])})" for o in found.values()]
    rows.append(("abducted over the best of the others, digits aside", *ratios))
    covered = [f"{one['coverage']:.0%} ({_shares(one['coverage_interval'])})" for one in found.values()]
    rows.append(("true counterfactuals inside our 90% intervals", *covered))
    chosen = ["; ".join(sorted(set(one["chosen"]))) for one in found.values()]
    rows.append(("chosen by factual likelihood", *chosen))
    tested = found[NOISES[0]]["tested"]
    title = f"Median error of the counterfactual income, {tested} held-out answers (95% intervals)"
    shown = [Table(title, ("", *HEADINGS.values()), rows)]
    trained = record.figures["end_to_end"]
    if trained:
        line = (
            f"{trained['people']} people",
            f"{trained['mdae']:.0f}",
            f"{trained['prediction_mdae']:.0f}",
            f"{trained['ratio']:.2f} ({_ends(trained['ratio_interval'])})",
        )
        heading = f"The default recipe end to end, additive noise, {trained['tested']} held-out people"
        shown.append(Table(heading, ("learned from", "abducted", "not abducted", "ratio"), [line]))
    for figure, label in (("pehe", "√PEHE"), ("ate", "Error of the average effect")):
        effects = record.figures["effects"]
        rows = [
            (
                f"{name} ({effect['units']} units, {len(effect['chosen'])} simulations)",
                *(_with_interval(effect["arms"][arm][figure], "mean") for arm in LEARNERS),
            )
            for name, effect in effects.items()
        ]
        if rows:
            heading = f"{label} on held-out units, mean over simulations (95% interval)"
            shown.append(Table(heading, ("", *LEARNERS.values()), rows))
    if record.figures["effects"]:
        published = [(name, str(value)) for name, value in record.figures["published"].items()]
        heading = "√PEHE on IHDP out of sample as published, mean over 1,000 other draws"
        shown.append(Table(heading, ("", "√PEHE"), published))
    return shown


def _arm(arms: dict[str, Any], arm: str) -> str:
    return _with_interval(arms[arm], "mdae") if arm in arms else ""


def _shares(interval: Sequence[float]) -> str:
    return f"{interval[0]:.0%}–{interval[1]:.0%}"


def _with_interval(entry: dict[str, Any], figure: str) -> str:
    return f"{_short(entry[figure])} ({_ends(entry['interval'])})"


def _ends(interval: Sequence[float]) -> str:
    return f"{_short(interval[0])}–{_short(interval[1])}"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def headlines(record: Record) -> list[tuple[str, str]]:
    """What abduction is worth, and how effects compare."""
    noises, effects = record.figures["noises"], record.figures["effects"]
    shown = [
        (
            "median error of a counterfactual number, abducted over not abducted: "
            "additive, multiplicative, monotone noise",
            ", ".join(f"{noises[noise]['ratio']:.2f}" for noise in NOISES),
        )
    ]
    if effects:
        ratios = ", ".join(f"{name} {effect['ratio']:.2f}" for name, effect in effects.items())
        shown.append(("√PEHE over that of the better boosting learner", ratios))
    return shown


if __name__ == "__main__":
    main()
