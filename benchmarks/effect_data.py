"""Semi-synthetic data that others published, with the true effect of a treatment on every unit.

IHDP: 747 premature children of a real trial, of whose treated ones those with nonwhite mothers were left out;
outcomes by Hill's (2011) response surfaces A (constant effect) and B (effects that differ), as `econml` draws
them. ACIC 2016: 58 real covariates, and treatments and outcomes of ten simulations, in `causallib`, of which
only the files are read. Sentences say what the columns say.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from table_data import package_directory

Array = np.ndarray[Any, Any]
INSTANCES = 10  # simulations of ACIC 2016 in causallib
DRAWN = 0  # seed of the units of ACIC 2016 that are taken


@dataclass(frozen=True)
class Draw:
    """One simulation: what happened, and what is true."""

    treated: Array  # (N,) 0 or 1
    outcome: Array  # (N,)
    effect: Array  # (N,) of the treatment on each unit's expected outcome


@dataclass(frozen=True)
class Units:
    """N units as sentences and as columns.

    Args:
        sentences: What is said of each before its treatment.
        clauses: Untreated, treated; each ends by naming the number that follows.
        columns: (N, K) for other learners.
        draw: A simulation by its number.
    """

    sentences: list[str]
    clauses: tuple[str, str]
    columns: Array
    draw: Callable[[int], Draw]


def ihdp(surface: str, most: int) -> Units:
    """Children and their mothers; ``most`` of them, evenly spread."""
    from econml.data import dgps

    simulate = {"A": dgps.ihdp_surface_A, "B": dgps.ihdp_surface_B}[surface]
    text = (package_directory("econml") / "data" / "ihdp" / "sim.csv").read_text(encoding="utf-8")
    rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(text.splitlines())]
    rows = [row for row in rows if not (row["treat"] == 1 and row["momwhite"] == 0)]
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int))
    columns = simulate(random_state=0)[2][chosen, 1:]  # without its column of ones

    def draw(number: int) -> Draw:
        outcome, treated, _, effect = simulate(random_state=number)
        return Draw(treated[chosen].astype(int), outcome[chosen], effect[chosen])

    clauses = (
        " The child stayed at home with the mother. Its test score is",
        " The child went to the day-care programme. Its test score is",
    )
    return Units([_child(rows[index]) for index in chosen], clauses, columns, draw)


def _child(row: Mapping[str, float]) -> str:
    def said(name: str, yes: str, no: str) -> str:
        return yes if row[name] else no

    education = next(
        (
            text
            for name, text in (
                ("mom.lths", "left school early"),
                ("mom.hs", "finished high school"),
                ("mom.scoll", "went to college for a while"),
            )
            if row[name]
        ),
        "finished college",
    )
    site = next((index for index in range(1, 8) if row[f"site{index}"]), 8)
    child = (
        f"A {said('sex', 'boy', 'girl')}, {row['bw']:.0f} grams at birth, head {row['b.head']:.1f} cm, "
        f"{row['preterm']:.0f} weeks early, neonatal health {row['nnhealth']:.0f}, "
        f"{said('twin', 'a twin', 'no twin')}, {said('first', 'first-born', 'not first-born')}, "
        f"birth order {row['birth.o']:.0f}."
    )
    mother = (
        f" The mother is {row['momage']:.0f}, {said('b.marr', 'married', 'not married')}, {education}, "
        f"{said('cig', 'smoked', 'did not smoke')}, {said('booze', 'drank alcohol', 'drank no alcohol')}, "
        f"{said('drugs', 'took no drugs', 'took drugs')}, "
        f"{said('work.dur', 'worked during pregnancy', 'did not work')}, "
        f"{said('prenatal', 'had prenatal care', 'had no prenatal care')}. Site {site}."
    )
    return child + mother


def acic(most: int) -> Units:
    """Units of the data challenge of 2016, whose columns have no names: ``most`` of 4,802."""
    folder = package_directory("causallib") / "datasets" / "data" / "acic_challenge_2016"
    rows = _table(folder / "x.csv")
    chosen = np.sort(np.random.default_rng(DRAWN).permutation(len(rows))[:most])
    names = list(rows[0])
    parts: list[list[float]] = []
    for name in names:
        values = [rows[index][name] for index in chosen]
        if values[0].isalpha():
            parts += [[float(value == level) for value in values] for level in sorted(set(values))]
        else:
            parts.append([float(value) for value in values])

    def draw(number: int) -> Draw:
        outcomes = _table(folder / f"zymu_{1 + number % INSTANCES}.csv")
        picked = [{name: float(value) for name, value in outcomes[index].items()} for index in chosen]
        treated = np.array([int(row["z"]) for row in picked])
        outcome = np.array([row[f"y{int(row['z'])}"] for row in picked])
        return Draw(treated, outcome, np.array([row["mu1"] - row["mu0"] for row in picked]))

    sentences = [f"Record: {' '.join(rows[index].values())}." for index in chosen]
    clauses = (" Not treated. The outcome is", " Treated. The outcome is")
    return Units(sentences, clauses, np.array(parts).T, draw)


def _table(file: Any) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))
