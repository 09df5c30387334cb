"""Real tables that come with installed packages, as sentences for a language model and as columns for others.

Tables have at most `MOST_ROWS` rows, drawn once, so that every run on two cores is short; of those that are
left over some are kept to test on. A table's sentence says nothing that its columns do not say, and the other
way round; it ends by naming the number that follows.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import random
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CARS = Path(__file__).parents[1] / "examples/configs/cars.yaml"
MOST_ROWS = 400
TEST_SHARE = 0.2
Row = dict[str, Any]


@dataclass(frozen=True)
class Dataset:
    """Rows, and how they are read.

    Args:
        about: What is predicted from what, for a reader.
        source: Package and file.
        template: Sentence of a row, for `causal_qwen.data.Template`.
        target: Field that is predicted: a number.
        rows: With every field of the template.
        numbers: Columns for the peers that are numbers.
        words: Columns of a few categories.
        texts: Columns of free text.
        others: Rows of a larger table that were not drawn, as many again at most.
    """

    about: str
    source: str
    template: str
    target: str
    rows: list[Row]
    numbers: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    others: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        """Only rows that have everything, and not too many of them."""
        used = (self.target, *self.numbers, *self.words, *self.texts)
        whole = [row for row in self.rows if not any(row[name] in (None, "", "NA") for name in used)]
        for row in whole:
            row.update({name: _number(row[name]) for name in (self.target, *self.numbers)})
        drawn = whole
        if len(whole) > MOST_ROWS:
            drawn = random.Random(0).sample(whole, MOST_ROWS)
        known = set(map(id, drawn))
        rest = [row for row in whole if id(row) not in known]
        object.__setattr__(self, "rows", drawn)
        object.__setattr__(self, "others", random.Random(1).sample(rest, min(len(rest), MOST_ROWS)))

    def split(self, seed: int) -> tuple[list[Row], list[Row]]:
        """Rows to train on, and rows to test on."""
        train, test = self.split_indices(seed)
        return [self.rows[i] for i in train], [self.rows[i] for i in test]

    def split_indices(self, seed: int) -> tuple[list[int], list[int]]:
        """The same by index."""
        order = list(range(len(self.rows)))
        random.Random(seed).shuffle(order)
        test = round(len(order) * TEST_SHARE)
        return order[test:], order[:test]

    def with_wrong_labels(self, rows: list[Row], share: float, seed: int) -> list[Row]:
        """A share of the labels is drawn anew, uniformly between the smallest and ten times the largest."""
        draw = random.Random(seed)
        labels = [row[self.target] for row in self.rows]
        lowest, highest = min(labels), 10 * max(labels)
        wrong = set(draw.sample(range(len(rows)), round(share * len(rows))))
        # As many decimal places as the true ones, so that nothing but the value tells them apart.
        places = max(len(str(label).partition(".")[2]) for label in labels)
        return [
            {**row, self.target: _number(round(draw.uniform(lowest, highest), places))}
            if index in wrong
            else row
            for index, row in enumerate(rows)
        ]


def _number(value: Any) -> float | int:
    number = float(value)
    return int(number) if number == math.floor(number) else number


def _vega(file: str) -> str:
    """Text of a file of vega_datasets."""
    return (package_directory("vega_datasets") / "_data" / file).read_text(encoding="utf-8")


def _r_table(name: str) -> list[Row]:
    """A table of pydataset, an archive of R's; importing it would unpack all into the home directory."""
    with tarfile.open(package_directory("pydataset") / "resources.tar.gz") as archive:
        file = archive.extractfile(f"resources/rdata/csv/{name}.csv")
        assert file is not None
        return _csv(file.read().decode("utf-8"))


def package_directory(name: str) -> Path:
    """Of an installed package, which is not imported.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    specification = importlib.util.find_spec(name)
    if specification is None or specification.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed; `make setup` installs it")
    return Path(specification.origin).parent


def _csv(text: str) -> list[Row]:
    """Rows of a table with a header; R's row names are the field "name" unless there is one."""
    rows = list(csv.DictReader(io.StringIO(text)))
    for row in rows:
        row.setdefault("name", row.pop("", "").replace(".", " "))
    return rows


# The tables ------------------------------------------------------------------------------------------------


def cars() -> Dataset:
    """The example's sentences."""
    rows = json.loads(_vega("cars.json"))
    return Dataset(
        about="fuel economy of cars, miles per gallon; from engine, weight, year and origin",
        source="vega_datasets: cars.json",
        template=yaml.safe_load(CARS.read_text(encoding="utf-8"))["template"],
        target="Miles_per_Gallon",
        rows=[row | {"year": int(row["Year"][:4])} for row in rows],
        numbers=("Cylinders", "Displacement", "Horsepower", "Weight_in_lbs", "Acceleration", "year"),
        words=("Origin",),
    )


def diabetes() -> Dataset:
    """Ten measurements of 442 patients."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    names = (
        "age",
        "sex",
        "bmi",
        "pressure",
        "cholesterol",
        "ldl",
        "hdl",
        "ratio",
        "triglycerides",
        "glucose",
    )
    rows = [
        dict(zip(names, map(float, values), strict=True)) | {"progression": float(label)}
        for values, label in zip(bunch.data, bunch.target, strict=True)
    ]
    return Dataset(
        about="progression of diabetes after a year; from ten measurements",
        source="scikit-learn: load_diabetes",
        template="Age {age}, sex {sex}, BMI {bmi}, blood pressure {pressure}, cholesterol {cholesterol}, "
        "LDL {ldl}, HDL {hdl}, ratio {ratio}, triglycerides {triglycerides}, glucose {glucose}. "
        "The progression of the diabetes is {progression}",
        target="progression",
        rows=rows,
        numbers=names,
    )


def diamonds() -> Dataset:
    """Four properties that jewellers name."""
    return Dataset(
        about="price of diamonds, dollars; from carat, cut, colour and clarity",
        source="pydataset: ggplot2/diamonds",
        template="A {carat} carat diamond, cut {cut}, colour {color}, clarity {clarity}. "
        "Its price in dollars is {price}",
        target="price",
        rows=_r_table("ggplot2/diamonds"),
        numbers=("carat",),
        words=("cut", "color", "clarity"),
    )


def occupations() -> Dataset:
    """Nothing but the name of the occupation."""
    return Dataset(
        about="prestige of occupations, 0 to 100; from the name alone",
        source="pydataset: car/Prestige",
        template="{name}. The prestige of this occupation is {prestige}",
        target="prestige",
        rows=_r_table("car/Prestige"),
        texts=("name",),
    )


def countries() -> Dataset:
    """Nothing but the name of the country."""
    return Dataset(
        about="infant deaths per thousand births; from the country's name alone",
        source="pydataset: car/UN",
        template="{name}. Its number of infant deaths per thousand births is {infant}",
        target="infant",
        rows=[row | {"infant": row["infant.mortality"]} for row in _r_table("car/UN")],
        texts=("name",),
    )


def airports() -> Dataset:
    """Where a town is, by its name."""
    rows = [row for row in _csv(_vega("airports.csv")) if row["country"] == "USA"]
    return Dataset(
        about="longitude of American airports, degrees; from the names of airport and town",
        source="vega_datasets: airports.csv",
        template="{name} airport, {city}. Its longitude in degrees is {longitude}",
        target="longitude",
        rows=rows,
        texts=("name", "city"),
    )


def movies() -> Dataset:
    """Films that at least a thousand people have rated."""
    genres = ("Action", "Animation", "Comedy", "Drama", "Documentary", "Romance", "Short")
    rows = [row for row in _r_table("ggplot2/movies") if int(row["votes"]) >= 1000]
    named = [
        row | {"genre": " ".join(name for name in genres if row[name] == "1") or "Other"} for row in rows
    ]
    return Dataset(
        about="ratings of films, 1 to 10; from title, year, genre and length",
        source="pydataset: ggplot2/movies",
        template="{title} ({year}), {genre}, {length} minutes. The film's rating is {rating}",
        target="rating",
        rows=named,
        numbers=("year", "length"),
        words=("genre",),
        texts=("title",),
    )


def car_names() -> Dataset:
    """Cars without their measurements."""
    rows = json.loads(_vega("cars.json"))
    return Dataset(
        about="fuel economy of cars, miles per gallon; from name and year",
        source="vega_datasets: cars.json",
        template="{Name}, {year}. Its fuel economy in miles per gallon is {Miles_per_Gallon}",
        target="Miles_per_Gallon",
        rows=[row | {"year": int(row["Year"][:4])} for row in rows],
        numbers=("year",),
        texts=("Name",),
    )


def journals() -> Dataset:
    """What libraries pay for economics journals."""
    return Dataset(
        about="price of economics journals, dollars a year; from title, publisher, field, year and pages",
        source="pydataset: Ecdat/Journals",
        template="{title}, {pub}, {field}, since {date1}, {pages} pages. Its price in dollars is {libprice}",
        target="libprice",
        rows=_r_table("Ecdat/Journals"),
        numbers=("date1", "pages"),
        words=("pub", "field"),
        texts=("title",),
    )


def computers() -> Dataset:
    """Machines of the 1980s."""
    return Dataset(
        about="performance of computers; from name, cycle time, memory and cache",
        source="pydataset: MASS/cpus",
        template="{name}, cycle {syct} ns, memory {mmin} to {mmax} kB, cache {cach}. "
        "Its performance is {perf}",
        target="perf",
        rows=_r_table("MASS/cpus"),
        numbers=("syct", "mmin", "mmax", "cach"),
        texts=("name",),
    )


TABLES: Mapping[str, Callable[[], Dataset]] = {
    "cars": cars,
    "diabetes": diabetes,
    "diamonds": diamonds,
    "car names": car_names,
    "occupations": occupations,
    "countries": countries,
    "airports": airports,
    "movies": movies,
    "journals": journals,
    "computers": computers,
}


def load(names: Iterable[str]) -> dict[str, Dataset]:
    """Tables by name.

    Raises:
        ValueError: If there is no such table.
    """
    missing = [name for name in names if name not in TABLES]
    if missing:
        raise ValueError(f"there is no table {missing[0]!r}; there are {', '.join(TABLES)}")
    return {name: TABLES[name]() for name in names}
