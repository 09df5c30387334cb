"""Counterfactuals of numbers against a truth that is known.

A structural model of our own (`structural`) writes sentences of 750 people, of whom everybody makes one of
two choices. The number head is solved on what happened to 500 of them. For the others the observed income
says who they are, and the income of the other choice is asked; the structural model knows it. Beside it: the
same head without the observation, the observed income itself, two boosting models on the columns with and
without the same step, and the base with digits as text and replayed Gumbel noise. Nothing is chosen by the
truth: the value space is the one under which left-out factual rows are likelier. Effects on data that others
published are in treatment_effects.py.

    python benchmarks/counterfactual_truth.py              # half an hour on two cores
    python benchmarks/counterfactual_truth.py --quick      # fewer draws of choices and noise
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import structural
from causal_qwen.conversion import load_model
from causal_qwen.counterfactual import CounterfactualNumbers, counterfactual_numbers
from causal_qwen.data import Reading
from causal_qwen.training import TrainingRecipe, train
from effect_learners import boosted_worlds, resampled, with_interval
from measure import BASE, Option, Record, Table, run_benchmark, watched
from replay import GumbelReplay, Question, replaced
from structural import CLAUSES, NOISES, Array, Person
from worlds import both_worlds, solve

OPTIONS = {
    "base": BASE,
    "people": Option("of the structural model", 750, smoke=48),
    "tested": Option("people who are held out, others in each draw", 250, smoke=12),
    "draws": Option("of choices and noise", 3, smoke=1, quick=2),
    "trained": Option("people whom the default recipe learns from end to end", 300, smoke=20, quick=0),
    "replayed": Option("people whose digits are replayed", 40, smoke=1, quick=16),
    "shots": Option("training rows that digits as text reads", 12, smoke=1),
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
# The noise and who chooses; what is judged is decided by a coin, as in a trial.
WORLDS = {noise: (noise, False) for noise in NOISES} | {"confounded": ("additive", True)}
HEADINGS = {noise: f"{noise} noise" for noise in NOISES} | {"confounded": "additive, choices by the person"}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    run_benchmark(
        __file__, __doc__, OPTIONS, figures, tables, quick="fewer draws, nothing end to end", argv=argv
    )


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios of median errors first, then everything by noise."""
    torch.set_num_threads(arguments.threads)
    noises = _people(arguments)
    return {
        **{f"{noise}_ratio": noises[noise]["ratio"] for noise in NOISES},
        "noises": noises,
        "end_to_end": _end_to_end(arguments) if arguments.trained else {},
    }


# People -----------------------------------------------------------------------------------------------------


def _people(arguments: argparse.Namespace) -> dict[str, Any]:
    persons = structural.people(arguments.people, seed=0)
    endings = [f" {clause} The monthly income is now" for clause in CLAUSES]
    keep = Path(arguments.keep) / f"people-{arguments.people}.npz" if arguments.keep else None
    causes = both_worlds(arguments.base, [str(one) for one in persons], endings, keep)
    loc_U, rounding = causes.loc_U, causes.rounding
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
            boosted = boosted_worlds(columns, choice, observed, train_part, test_part)
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
            held.append(_held(ours, truth))
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
        arm: {"mdae": float(np.median(one)), "interval": resampled([one], lambda part: np.median(part))}
        for arm, one in pooled.items()
    }
    pair = [pooled[OURS], pooled[PLAIN]]
    ratio = float(np.median(pair[0]) / np.median(pair[1]))
    others = [one for arm, one in pooled.items() if arm != OURS and len(one) == len(pair[0])]

    def to_best(ours: Array, *rest: Array) -> Any:
        return np.median(ours) / min(np.median(one) for one in rest)

    return {
        "arms": arms,
        "ratio": ratio,
        "ratio_interval": resampled(pair, lambda one, two: np.median(one) / np.median(two)),
        "ratio_to_best": float(to_best(pair[0], *others)),
        "ratio_to_best_interval": resampled([pair[0], *others], to_best),
        **_coverage(held),
        "tested": len(pair[0]),
    }


def _held(answer: CounterfactualNumbers, truth: Array) -> Array:
    """(N,) whether the interval holds the truth."""
    assert answer.lower is not None
    assert answer.upper is not None
    held: Array = (answer.lower.numpy() <= truth) & (truth <= answer.upper.numpy())
    return held


def _coverage(held: list[Array]) -> dict[str, Any]:
    covered = np.concatenate(held).astype(float)
    interval = resampled([covered], lambda part: part.mean())
    return {"coverage": float(covered.mean()), "coverage_interval": interval}


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
        **_coverage([_held(answer, truth)]),
        "people": len(learned),
        "tested": len(asked),
        "mdae": float(np.median(errors[0])),
        "interval": resampled(errors[:1], np.median),
        "prediction_mdae": float(np.median(errors[1])),
        "prediction_interval": resampled(errors[1:], np.median),
        "ratio": float(np.median(errors[0]) / np.median(errors[1])),
        "ratio_interval": resampled(errors, lambda one, two: np.median(one) / np.median(two)),
    }


# What is shown ----------------------------------------------------------------------------------------------


def tables(record: Record) -> list[Table]:
    """Errors by noise, and their ratios."""
    found = {world: record.figures["noises"][world] for world in WORLDS}  # a file has its own order
    rows = [(label, *(_arm(found[world]["arms"], arm) for world in WORLDS)) for arm, label in ARMS.items()]
    ratios = [with_interval(one["ratio"], one["ratio_interval"]) for one in found.values()]
    rows.append(("abducted over not abducted", *ratios))
    ratios = [with_interval(one["ratio_to_best"], one["ratio_to_best_interval"]) for one in found.values()]
    rows.append(("abducted over the best of the others, digits aside", *ratios))
    covered = [_covered(one) for one in found.values()]
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
            with_interval(trained["mdae"], trained["interval"]),
            with_interval(trained["prediction_mdae"], trained["prediction_interval"]),
            with_interval(trained["ratio"], trained["ratio_interval"]),
            _covered(trained),
        )
        heading = f"The default recipe end to end, additive noise, {trained['tested']} held-out people"
        columns = ("learned from", "abducted", "not abducted", "ratio", "inside 90% intervals")
        shown.append(Table(heading, columns, [line]))
    return shown


def _arm(arms: dict[str, Any], arm: str) -> str:
    return with_interval(arms[arm]["mdae"], arms[arm]["interval"]) if arm in arms else ""


def _covered(found: dict[str, Any]) -> str:
    low, high = found["coverage_interval"]
    return f"{found['coverage']:.0%} ({low:.0%}–{high:.0%})"


def headlines(record: Record) -> list[tuple[str, str]]:
    """What abduction is worth."""
    found = [record.figures["noises"][noise] for noise in NOISES]
    ratios = ", ".join(with_interval(one["ratio"], one["ratio_interval"]) for one in found)
    label = "median error of a counterfactual number, abducted over not: additive, multiplicative, monotone"
    return [(label, ratios)]


if __name__ == "__main__":
    main()
