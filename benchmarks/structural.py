"""A structural model that writes sentences: who somebody is, what they did, what they then earn.

Both worlds are known: everybody has a noise of their own, and an income for either choice. A coin makes the
choice, or who somebody is leans to one (`choices`); never their noise, so that sentences say all that is
needed to compare like with like.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Income of each, and what the course adds to it.
TRADES = {
    "nurse": (250, 120), "electrician": (420, 350), "teacher": (380, 60), "cook": (-250, 280),
    "gardener": (-300, 200), "programmer": (1100, -80), "bus driver": (0, 150), "carpenter": (120, 320),
    "cashier": (-420, 240), "accountant": (600, 90), "cleaner": (-480, 180), "journalist": (300, -40),
}  # fmt: skip
SCHOOLS = {
    "left school at sixteen": (-200, 150), "finished an apprenticeship": (0, 80),
    "holds a diploma": (180, 0), "has a university degree": (520, -120),
}  # fmt: skip
PLACES = {
    "a village in the hills": -220, "a port town": -40, "the suburbs": 60, "the capital": 380,
    "a mining region": -120,
}  # fmt: skip
HOBBIES = ("plays chess", "sings in a choir", "keeps bees", "runs marathons", "collects stamps", "paints")
CLAUSES = ("Worked overtime through the winter.", "Took an evening course through the winter.")
NOISES = ("additive", "multiplicative", "monotone")
SPREAD = 450.0  # of the individual noise, in the money of incomes
RELATIVE = 0.18  # of the multiplicative noise
NUMBERS = ("age", "experience", "hours")
WORDS = ("trade", "school", "place", "hobby")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Person:
    """What a sentence says of somebody; the hobby has no effect on anything."""

    age: int
    experience: int
    hours: int
    trade: str
    school: str
    place: str
    hobby: str

    def __str__(self) -> str:
        article = "an" if self.trade[0] in "aeiou" else "a"
        return (
            f"{self.age} years old, {article} {self.trade} with {self.experience} years of experience, "
            f"{self.hours} hours a week, lives in {self.place}, {self.school}, {self.hobby}."
        )

    def medians(self) -> tuple[float, float]:
        """Of the income in either world."""
        income, gain = TRADES[self.trade]
        schooled, school_gain = SCHOOLS[self.school]
        base = 2400 + income + schooled + PLACES[self.place] + 25 * (self.hours - 18)
        base += 45 * self.experience - 0.7 * self.experience**2
        return base, base + 80 + gain + school_gain + 6 * (40 - self.age)

    def leaning(self) -> float:
        """Probability of the course: the young and those who work fewer hours take it more often."""
        return 1 / (1 + math.exp(-0.04 * (40 - self.age) - 0.05 * (32 - self.hours)))


def people(count: int, seed: int) -> list[Person]:
    """Drawn independently."""
    draw = np.random.default_rng(seed)
    drawn = []
    for _ in range(count):
        age = int(draw.integers(20, 63))
        drawn.append(
            Person(
                age,
                int(draw.integers(0, age - 17)),
                int(draw.integers(18, 46)),
                *(str(draw.choice(list(names))) for names in (TRADES, SCHOOLS, PLACES, HOBBIES)),
            )
        )
    return drawn


def choices(persons: Sequence[Person], draw: np.random.Generator, *, confounded: bool = False) -> Array:
    """(N,) 1 for the course: by a coin, or confounded, by what somebody leans to."""
    leanings = [person.leaning() if confounded else 0.5 for person in persons]
    return (draw.random(len(persons)) < leanings).astype(int)


def incomes(persons: Sequence[Person], noise: str, draw: np.random.Generator) -> Array:
    """(N, 2) of both worlds, in whole units: Y(t) = f(person, t, ε), with one ε for both, increasing in it.

    additive: m(t) + σ·ε. multiplicative: m(t)·exp(ρ·ε). monotone: σ·ε without the course, and with it
    σ·(ε + (√(1 + ε²) − 1)/2), which draws the unlucky together and the lucky apart. ε is Student's t with 5
    degrees of freedom.
    """
    medians = np.array([person.medians() for person in persons])
    epsilon = draw.standard_t(5, size=(len(persons), 1))
    if noise == "additive":
        values = medians + SPREAD * epsilon
    elif noise == "multiplicative":
        values = medians * np.exp(RELATIVE * epsilon)
    else:
        bent = epsilon + (np.sqrt(1 + epsilon**2) - 1) / 2
        values = medians + SPREAD * np.concatenate([epsilon, bent], axis=1)
    return np.round(values)


def columns(persons: Sequence[Person]) -> Array:
    """(N, K) the same for other learners: numbers, and words one-hot."""
    levels = {"trade": TRADES, "school": SCHOOLS, "place": PLACES, "hobby": HOBBIES}
    parts = [[getattr(person, name) for person in persons] for name in NUMBERS]
    parts += [[getattr(p, name) == level for p in persons] for name in WORDS for level in levels[name]]
    return np.array(parts, dtype=float).T
