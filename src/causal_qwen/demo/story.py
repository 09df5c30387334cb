"""What the demonstration does, step by step: convert, prove, generate, learn, predict, ask "what if".

Each step is one function whose result the command prints and the report shows. Nothing is printed here.
"""

from __future__ import annotations

import importlib.resources
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion import (
    EMBEDDED,
    Base,
    Conversion,
    bundled_text,
    convert,
    load_base,
    load_model,
    measure_parity,
)
from causal_qwen.conversion.files import write_file
from causal_qwen.conversion.parity import Parity
from causal_qwen.counterfactual.interventions import Branch, Counterfactual, counterfactual
from causal_qwen.data import Reading, Template, read_rows
from causal_qwen.data.rows import Row
from causal_qwen.decoder.engine import Engine
from causal_qwen.evaluation import metrics, predict
from causal_qwen.evaluation.predict import Prediction
from causal_qwen.numbers import format_number
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.training import TrainingRecipe, train
from causal_qwen.training.records import METRICS_FILE, read_records

__all__ = [
    "COMMANDS",
    "SEED",
    "SERVE",
    "Forecast",
    "Learned",
    "ask_what_if",
    "continuations",
    "convert_and_prove",
    "far_away",
    "far_rows",
    "forecast",
    "learn_table",
    "least_squares",
    "side_by_side",
    "tune",
    "what_if_rows",
    "write_table",
]

SEED = 7
TARGET = "Miles_per_Gallon"
COLUMNS = ("Cylinders", "Displacement", "Horsepower", "Weight_in_lbs", "Acceleration")
TEMPLATE = (
    "{Origin} {Year:.4}, {Cylinders} cylinders, {Displacement} inches, {Horsepower} horsepower, "
    "{Weight_in_lbs} pounds, {Acceleration} seconds. "
    "Its fuel economy in miles per gallon is {Miles_per_Gallon}"
)
SENTENCE = Template(TEMPLATE, TARGET)
TEST_ROWS = 48
BROKEN_SHARE, BROKEN_RANGE = 0.2, (1.0, 400.0)
# The individual's car, and the same car with another engine.
FACTUAL = {
    "Year": "1976", "Origin": "USA", "Cylinders": 8, "Displacement": 318,
    "Horsepower": 150, "Weight_in_lbs": 4000, "Acceleration": 13,
}  # fmt: skip
CHANGE = {"Cylinders": 4, "Displacement": 120, "Horsepower": 88, "Weight_in_lbs": 2400, "Acceleration": 16}
FAR = ("A bicycle weighs 30 pounds and has no engine:",)
PRODUCT = "{a} × {b} = {total}"
BATCH, PRODUCTS = 16, 900  # the head is solved on all of them at the end
LOSS = "train/reg_loss_effective"

# How each step is repeated by hand.
COMMANDS = (
    "causal-qwen convert {base} {out}/model --overwrite",
    "causal-qwen parity {out}/model",
    'causal-qwen generate {out}/model "{prompt}" --mode causal --seed 7',
    "causal-qwen train {out}/cars.yaml --overwrite",
    "causal-qwen train {out}/broken.yaml --overwrite",
    "causal-qwen predict {out}/cars {out}/test.jsonl -o {out}/predictions.csv",
    'causal-qwen counterfactual {out}/cars "USA 1976, 8 cylinders, 4000 pounds: " '
    '--do "USA 1976, 4 cylinders, 2400 pounds: " --seed 7',
)

SERVE = "{program} serve {out}/cars"


@dataclass(frozen=True)
class Learned:
    """A model that has learned a table, and its figures."""

    model: CausalLM
    processor: CausalQwen2Processor
    metrics: dict[str, float]
    directory: Path


@dataclass(frozen=True)
class Forecast:
    """Predictions of the rows that training has not seen; tensors (n,)."""

    names: list[str]
    truth: Tensor
    median: Tensor
    lower: Tensor
    upper: Tensor
    constant: float
    level: float

    @property
    def error(self) -> float:
        """Median absolute error."""
        return metrics.median_absolute_error(self.median, self.truth)

    @property
    def constant_error(self) -> float:
        """What always saying the training median would get."""
        return metrics.median_absolute_error(torch.tensor(self.constant), self.truth)

    @property
    def coverage(self) -> float:
        """Share of truths inside their interval."""
        return metrics.mean((self.lower <= self.truth) & (self.truth <= self.upper))

    @property
    def width(self) -> float:
        """Median width of the intervals."""
        return float((self.upper - self.lower).median())

    def shift(self, other: Forecast) -> float:
        """The farthest that a median lies from the other's, in widths of the interval here."""
        return float(((other.median - self.median).abs() / (self.upper - self.lower)).max())


def convert_and_prove(directory: Path, *, source: str = EMBEDDED) -> tuple[Base, Conversion, Parity]:
    """The base, its conversion in ``directory``, and both compared on held-out text."""
    base = load_base(source)
    conversion = convert(base, directory, overwrite=True)
    return base, conversion, measure_parity(conversion.model, base, bundled_text("heldout"))


def continuations(base: Base, conversion: Conversion, prompt: str, tokens: int) -> dict[str, str]:
    """The prompt continued by the base, and by the converted model in every mode."""
    inputs = conversion.processor(prompt, return_tensors="pt")
    start = inputs["input_ids"].shape[1]
    plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    greedy = {"do_sample": False}
    causal = {"inference_mode": "causal"}
    runs: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "base, greedy": (base.model, plain, greedy),
        "standard": (conversion.model, inputs, greedy),
        "standard, sampled": (conversion.model, inputs, {"do_sample": True, "individual": SEED}),
        f"causal, individual {SEED}": (conversion.model, inputs, causal | {"individual": SEED}),
        f"individual {SEED} again": (conversion.model, inputs, causal | {"individual": SEED}),
        f"causal, individual {SEED + 1}": (conversion.model, inputs, causal | {"individual": SEED + 1}),
        "compatible, sampled": (
            conversion.model, inputs, {"inference_mode": "compatible", "do_sample": True},
        ),
    }  # fmt: skip
    texts = {}
    for name, (model, prompt_inputs, options) in runs.items():
        torch.manual_seed(SEED)
        ids = model.generate(**prompt_inputs, **options, max_new_tokens=tokens)
        text = conversion.processor.decode(ids[0, start:], skip_special_tokens=True)
        texts[name] = " ".join(text.split())
    return texts


def write_table(directory: Path) -> None:
    """A real table, cars and their fuel economy: rows to learn, the same with broken labels, rows to predict.

    Raises:
        ValueError: If the package that carries the table is not installed.
    """
    try:
        source = importlib.resources.files("vega_datasets") / "_data" / "cars.json"
    except ModuleNotFoundError:
        raise ValueError("the demo's table is missing; run: pip install 'causal-qwen[demo]'") from None
    rows = [row for row in json.loads(source.read_text(encoding="utf-8")) if None not in row.values()]
    draw = random.Random(SEED)
    draw.shuffle(rows)
    test, clean = rows[:TEST_ROWS], rows[TEST_ROWS:]
    broken = [dict(row) for row in clean]
    for row in draw.sample(broken, round(BROKEN_SHARE * len(broken))):
        row[TARGET] = round(draw.uniform(*BROKEN_RANGE), 1)
    for name, part in (("cars", clean), ("broken", broken), ("test", test)):
        write_file(_file(directory, name), "".join(json.dumps(row) + "\n" for row in part))


def learn_table(directory: Path, name: str, *, model: Path) -> Learned:
    """Learn a table by the default recipe, which is written beside it, for `causal-qwen train`."""
    recipe = TrainingRecipe(
        model=str(model),
        data=str(_file(directory, name)),
        validation=str(_file(directory, "test")),
        output=str(directory / name),
        template=TEMPLATE,
        target=TARGET,
        seed=SEED,
    )
    write_file(directory / f"{name}.yaml", recipe.to_yaml())
    metrics = train(recipe, overwrite=True).metrics
    return Learned(*load_model(directory / name, dtype="float32"), metrics, directory / name)


def forecast(learned: Learned, directory: Path, *, integers: bool = False, level: float = 0.9) -> Forecast:
    """The fuel economy of cars that training has not seen, in float32 or by the native engine in int8."""
    rows, known = _rows(directory, "test"), _rows(directory, "cars")
    engine = Engine.from_model(learned.model, precision="int8") if integers else None
    reading = Reading(TEMPLATE, TARGET)
    predictions = predict(learned.model, learned.processor, rows, reading=reading, level=level, engine=engine)
    columns = zip(*((one.median, one.lower, one.upper) for one in predictions), strict=True)
    median, lower, upper = (torch.tensor(column, dtype=torch.float64) for column in columns)  # (n,) each
    names = [f"{row['Year'][:4]} {row['Name']}" for row in rows]
    truth = torch.tensor([row[TARGET] for row in rows], dtype=torch.float64)
    middle = statistics.median(row[TARGET] for row in known)
    return Forecast(names, truth, median, lower, upper, middle, level)


def least_squares(directory: Path, name: str) -> Tensor:
    """What least squares on the table's columns predicts for the same cars, (n,)."""
    learned, test = _rows(directory, name), _rows(directory, "test")
    origins = sorted({row["Origin"] for row in learned})

    def columns(rows: list[Row]) -> Tensor:
        values = [
            [1.0, int(row["Year"][:4]) - 1970, *(row[column] for column in COLUMNS)]
            + [float(row["Origin"] == origin) for origin in origins[1:]]
            for row in rows
        ]
        return torch.tensor(values, dtype=torch.float64)

    target = torch.tensor([row[TARGET] for row in learned], dtype=torch.float64)
    slope: Tensor = torch.linalg.lstsq(columns(learned), target[:, None]).solution
    return (columns(test) @ slope)[:, 0]


def far_away(learned: Learned) -> list[Prediction]:
    """A car like those of the table, and things that are not."""
    prompts = [SENTENCE.prompt(FACTUAL).text, *FAR]
    rows = [{"prompt": prompt.rstrip()} for prompt in prompts]
    return list(predict(learned.model, learned.processor, rows))


def tune(directory: Path, *, model: Path, steps: int) -> list[tuple[float, float]]:
    """Products of two numbers, which no frozen backbone spells out: the number loss of each step.

    The backbone learns by gradients while the number head is solved anew on its latest features. No row is
    seen twice, and many are not among those that the head begins with.
    """
    draw = random.Random(SEED)
    rows = [{"a": draw.randint(2, 99), "b": draw.randint(2, 99)} for _ in range(max(PRODUCTS, steps * BATCH))]
    recipe = TrainingRecipe(
        model=str(model),
        output=str(directory / "products"),
        template=PRODUCT,
        target="total",
        method="full",
        max_steps=steps,
        batch_size=BATCH,
        learning_rate=5e-5,
        warmup=0.2,
        loss_impl="sampled",
        validation_fraction=0.0,
        calibration_fraction=0.0,
        precision_proof=False,
        logging_steps=1,
        save_steps=0,
        diagnostics=False,
        seed=SEED,
    )
    train(recipe, rows=[row | {"total": row["a"] * row["b"]} for row in rows], overwrite=True)
    records = read_records(directory / "products" / METRICS_FILE)
    return [(record["step"], record[LOSS]) for record in records if LOSS in record]


def ask_what_if(learned: Learned) -> Counterfactual:
    """One individual's fuel economy with its own engine, and with a smaller one."""
    factual, changed = SENTENCE.prompt(FACTUAL).text, SENTENCE.prompt(FACTUAL | CHANGE).text
    return counterfactual(learned.model, learned.processor, factual, [changed], SEED, max_new_tokens=1)


def side_by_side(exact: Forecast, rounded: Forecast, most: int) -> list[tuple[str, str, str, str]]:
    """Car, truth, and both predictions with their intervals, of the first cars."""

    def cell(cars: Forecast, index: int) -> str:
        return f"{cars.median[index]:.2f}  ({cars.lower[index]:.1f} – {cars.upper[index]:.1f})"

    return [
        (exact.names[index], f"{exact.truth[index]:.1f}", cell(exact, index), cell(rounded, index))
        for index in range(min(most, len(exact.truth)))
    ]


def far_rows(predictions: Sequence[Prediction]) -> list[tuple[str, str, str, str]]:
    """Prompt, prediction, interval, and whether it lies beyond what was learned."""
    return [
        (
            one.prompt,
            f"{one.median:.1f}",
            f"{one.lower:.1f} – {one.upper:.1f}",
            "YES" if one.extrapolates else "no",
        )
        for one in predictions
    ]


def what_if_rows(what_if: Counterfactual) -> list[tuple[str, str, str]]:
    """Who, what was asked, and the number that was said."""
    branches = [
        (f"individual {what_if.individual.seed}", what_if.factual),
        *((f"individual {what_if.individual.seed}", branch) for branch in what_if.interventions),
        (f"control, individual {what_if.control.individual.seed}", what_if.control),
    ]
    return [(who, str(branch.prompt), _said(branch)) for who, branch in branches]


def _said(branch: Branch) -> str:
    if not branch.numbers:
        return branch.text.strip()
    number = branch.numbers[0]
    spread = (number.upper - number.lower) / 4
    return format_number(number.value, spread) if spread > 0 else format_number(number.value)


def _file(directory: Path, name: str) -> Path:
    return directory / f"{name}.jsonl"


def _rows(directory: Path, name: str) -> list[Row]:
    return [row for _, row in read_rows(_file(directory, name))]
