"""What the demonstration does, step by step: convert, prove, generate, fine-tune, predict, ask "what if".

Each step is one function whose result the command prints and the report shows. Nothing is printed here.
"""

from __future__ import annotations

import importlib.resources
import json
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy
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
from causal_qwen.demo import pictures
from causal_qwen.evaluation import metrics, page, plots, predict
from causal_qwen.evaluation.page import Section
from causal_qwen.numbers import format_number
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.training import TrainingRecipe, train
from causal_qwen.training.records import METRICS_FILE, read_records

__all__ = [
    "COMMANDS",
    "SEED",
    "Forecast",
    "Tuned",
    "ask_what_if",
    "continuations",
    "convert_and_prove",
    "fine_tune",
    "forecast",
    "report",
    "write_table",
]

SEED = 7
TARGET = "Miles_per_Gallon"
TEMPLATE = (
    "{Origin} {Year:.4}, {Cylinders} cylinders, {Displacement} inches, {Horsepower} horsepower, "
    "{Weight_in_lbs} pounds, {Acceleration} seconds: {Miles_per_Gallon}"
)
SENTENCE = Template(TEMPLATE, TARGET)
TEST_ROWS = 48
# The individual's car, and the same car with another engine.
FACTUAL = {
    "Year": "1976", "Origin": "USA", "Cylinders": 8, "Displacement": 318,
    "Horsepower": 150, "Weight_in_lbs": 4000, "Acceleration": 13,
}  # fmt: skip
CHANGE = {"Cylinders": 4, "Displacement": 120, "Horsepower": 88, "Weight_in_lbs": 2400, "Acceleration": 16}

# How each step is repeated by hand.
COMMANDS = (
    "causal-qwen convert {base} {out}/model --overwrite",
    "causal-qwen parity {out}/model",
    'causal-qwen generate {out}/model "{prompt}" --mode causal --seed 7',
    "causal-qwen train {out}/cars.yaml --overwrite",
    "causal-qwen predict {out}/cars {out}/cars.test.jsonl -o {out}/predictions.csv",
    'causal-qwen counterfactual {out}/cars "USA 1976, 8 cylinders, 4000 pounds: " '
    '--do "USA 1976, 4 cylinders, 2400 pounds: " --seed 7',
)


@dataclass(frozen=True)
class Tuned:
    """A fine-tuned model, its figures, and the records of its training."""

    model: CausalLM
    processor: CausalQwen2Processor
    metrics: dict[str, float]
    records: list[dict[str, float]]
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


def write_table(directory: Path) -> tuple[Path, Path]:
    """A real table, cars and their fuel economy, as two files: rows to learn and rows to predict.

    Raises:
        ValueError: If the package that carries the table is not installed.
    """
    try:
        source = importlib.resources.files("vega_datasets") / "_data" / "cars.json"
    except ModuleNotFoundError:
        raise ValueError("the demo's table is in vega-datasets; run: pip install vega-datasets") from None
    rows = [row for row in json.loads(source.read_text(encoding="utf-8")) if None not in row.values()]
    random.Random(SEED).shuffle(rows)
    files = directory / "cars.train.jsonl", directory / "cars.test.jsonl"
    for file, part in zip(files, (rows[TEST_ROWS:], rows[:TEST_ROWS]), strict=True):
        write_file(file, "".join(json.dumps(row) + "\n" for row in part))
    return files


def fine_tune(directory: Path, *, model: Path, steps: int) -> Tuned:
    """Learn the table's sentences; the recipe is written beside it, for `causal-qwen train`."""
    train_file, test_file = write_table(directory)
    recipe = TrainingRecipe(
        model=str(model),
        data=str(train_file),
        validation=str(test_file),
        output=str(directory / "cars"),
        template=TEMPLATE,
        target=TARGET,
        batch_size=8,
        max_steps=steps,
        learning_rate=3e-5,
        heads_learning_rate=1e-2,
        warmup=0.1,
        softmax_loss_weight=1.0,
        classification_loss_weight=0.01,
        gate_alpha=1.0,
        calibration_fraction=0.12,
        loss_impl="sampled",
        logging_steps=1,
        save_steps=0,
        diagnostics=False,
        seed=SEED,
    )
    write_file(directory / "cars.yaml", recipe.to_yaml())
    result = train(recipe, overwrite=True)
    trained, processor = load_model(result.output)
    records = read_records(result.output / METRICS_FILE)
    return Tuned(trained, processor, result.metrics, records, result.output)


def forecast(tuned: Tuned, directory: Path, *, level: float = 0.9) -> Forecast:
    """The fuel economy of cars that training has not seen."""
    rows = [row for _, row in read_rows(directory / "cars.test.jsonl")]
    learned = [row[TARGET] for _, row in read_rows(directory / "cars.train.jsonl")]
    reading = Reading(TEMPLATE, TARGET)
    predictions = list(predict(tuned.model, tuned.processor, rows, reading=reading, level=level))
    median, lower, upper = (
        torch.tensor([getattr(one, name) for one in predictions], dtype=torch.float64)
        for name in ("median", "lower", "upper")
    )  # (n,) each
    names = [f"{row['Year'][:4]} {row['Name']}" for row in rows]
    truth = torch.tensor([row[TARGET] for row in rows], dtype=torch.float64)
    return Forecast(names, truth, median, lower, upper, statistics.median(learned), level)


def ask_what_if(tuned: Tuned) -> Counterfactual:
    """One individual's fuel economy with its own engine, and with a smaller one."""
    factual, changed = SENTENCE.prompt(FACTUAL).text, SENTENCE.prompt(FACTUAL | CHANGE).text
    return counterfactual(tuned.model, tuned.processor, factual, [changed], SEED, max_new_tokens=1)


def report(
    file: Path,
    *,
    parity: Mapping[str, str],
    texts: Mapping[str, str],
    prompt: str,
    tuned: Tuned,
    cars: Forecast,
    what_if: Counterfactual,
    model: Path,
) -> None:
    """Write the page with its pictures."""
    tokens, probs, U = _explained(tuned, SENTENCE.prompt(FACTUAL | CHANGE).text)
    command = f'causal-qwen generate {model} "{prompt}"'
    sections = [
        Section(
            "Exact on day one",
            "The converted model against its base, position by position, on text that nothing was fitted to.",
            page.table(list(parity.items())),
            [f"causal-qwen parity {model}"],
        ),
        Section(
            "Three ways to decide",
            f"“{prompt} …” In standard mode the law of the cause decides, in causal mode one concrete "
            "individual does, and compatible mode is what the base does. The same individual repeats itself.",
            page.table(list(texts.items()), header=("who decides", "continuation")),
            [command, f"{command} --mode causal --seed {SEED}", f"{command} --mode compatible --sample"],
        ),
        Section(
            "Learning a table",
            f"Each car is a sentence; the model learns to write its miles per gallon. "
            f"{tuned.metrics['train/rows']:.0f} rows, {tuned.metrics['train/steps']:.0f} steps, "
            f"{tuned.metrics['train/seconds']:.0f} seconds.",
            page.picture(pictures.loss_curve(tuned.records), alt="training loss against steps"),
            [f"causal-qwen train {file.parent / 'cars.yaml'} --overwrite"],
        ),
        Section(
            "Numbers with honest intervals",
            f"{len(cars.truth)} cars that training has not seen: median absolute error "
            f"{cars.error:.2f} miles per gallon, where the training median gets "
            f"{cars.constant_error:.2f}; {cars.coverage:.0%} of the {cars.level:.0%} "
            "intervals hold the truth.",
            page.picture(
                plots.picture(
                    plots.draw_predictions,
                    *(cars.truth, cars.median, cars.lower, cars.upper),
                    cars.level,
                    "miles per gallon",
                ),
                alt="predicted against true fuel economy",
            ),
            [f"causal-qwen predict {tuned.directory} {file.parent / 'cars.test.jsonl'} -o predictions.csv"],
        ),
        Section(
            "The same individual, another engine",
            "All that the model calls chance is held fixed, and only the sentence differs. Another "
            "individual under the first sentence shows how far chance alone goes.",
            page.table(what_if_rows(what_if), header=("who", "sentence", "miles per gallon")),
        ),
        Section(
            "The cause along a sentence",
            "The two dimensions of U that move most, median and quartiles (narrower than the line where the "
            "model is sure), and below the scales of all dimensions, median and quartiles.",
            page.picture(
                pictures.cause_along_text(tokens, U.loc.numpy(), U.scale.numpy()), alt="U along a sentence"
            ),
        ),
        Section(
            "Tokens by their One-vs-Rest probability",
            "P(S > C) of each token given those before it, from red (0) to green (1). Hover for the figure.",
            page.coloured(tokens, probs),
        ),
    ]
    lead = "A language model that infers a cause, then acts. Every figure here was computed just now."
    page.write_page(file, title="CausalQwen: the demonstration", lead=lead, sections=sections)


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


@torch.no_grad()
def _explained(tuned: Tuned, text: str) -> tuple[list[str], list[float | None], Cauchy]:
    """Tokens of a text, P of each given those before it, and U (T, D)."""
    batch = tuned.processor(text, return_tensors="pt")
    outputs = tuned.model(**batch, output_scores=True, output_logits=False)
    ids, values = batch["input_ids"][0], batch["numeric_values"][0]
    S = outputs.S[0, :-1]  # (T − 1, V)
    prob = S.sf(tuned.model.action.threshold).gather(1, ids[1:, None]).squeeze(1)
    is_number = ids == tuned.processor.num_token_id
    tokens = [
        format_number(value) if number else tuned.processor.tokenizer.decode([token])
        for token, value, number in zip(ids.tolist(), values.tolist(), is_number.tolist(), strict=True)
    ]
    U = tuned.model.action.exogenous(outputs.U[0].to(torch.float64))
    return tokens, [None, *prob.tolist()], U
