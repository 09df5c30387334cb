"""Running text with numbers: what examples/configs/descriptions.yaml learns, every token of it.

Of the base, of the base with only what the recipe solves for at its end (where numbers are written, and the
number head), and after the whole recipe, on passages that training has not seen: nats of the words under
softmax, how often the next word is the likeliest one and the chosen token the right one, where numbers are
written, and by how much they are missed.

In running text a number can be anything that a description may say next, a year or a p-value. Its law is
fitted in logarithms, and half of the numbers are below twenty, so that absolute errors reward whoever always
says a small one. What a law is worth are its nats (of log(1 + |v|)) and the factor by which it misses; beside
them stands the law that says the training median whatever the text, with the likeliest β.

    python benchmarks/descriptions.py                  # a quarter of an hour on two cores
    python benchmarks/descriptions.py --quick --json   # two steps, to see that it runs
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causal_qwen.calibration import number_data, set_value_space, solve_numbers, wake_numbers
from causal_qwen.calibration.belief import cauchy_scale
from causal_qwen.calibration.positions import labelled_positions
from causal_qwen.cauchy import Cauchy
from causal_qwen.conversion import convert, load_model
from causal_qwen.data import BadRows, Collator, batches_of, read_rows
from causal_qwen.data.encoding import numbers_of
from causal_qwen.evaluation import run_evaluation
from causal_qwen.training import TrainingRecipe, preparation, train
from causal_qwen.training.solving import calibrate
from causal_qwen.value_space import ValueSpace, signed_log1p
from measure import BASE, Option, Record, Table, run_benchmark

CONFIG = Path(__file__).parent.parent / "examples/configs/descriptions.yaml"
OPTIONS = {
    "base": BASE,
    "steps": Option("of training; 0 is what the recipe says", 0, smoke=1, quick=2),
    "words": Option("of each description that are read; 0 is all", 0, smoke=120, quick=120),
    "threads": Option("of torch", 2, smoke=1),
}
LABELS = {
    "word_nats": "nats per word, softmax",
    "word_accuracy": "words that are the likeliest",
    "accuracy": "tokens chosen rightly, words and numbers",
    "number_f1": "F1 of where numbers are written",
    "number_nats": "nats per number",
    "number_gain": "… fewer than of the training median",
    "number_factor": "half the numbers are missed by less than a factor of",
    "number_mdae": "median absolute error of numbers",
    "coverage_90": "90% intervals that hold",
}
STATES = {
    "before": "the base",
    "solved": "solved, nothing trained",
    "after": "trained",
    "median": "training median",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure before and after, and print both."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="two steps", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """What each state knows of words and numbers; a base has no numbers, the training median no words."""
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        base = f"{directory}/base"
        convert(arguments.base, base)
        recipe = TrainingRecipe.from_yaml(CONFIG, output=f"{directory}/model", model=base)
        if arguments.steps:
            recipe = dataclasses.replace(recipe, max_steps=arguments.steps)
        rows = _texts(recipe, arguments.words)
        model, processor = preparation.load_model(recipe)
        parts = preparation.prepare_rows(recipe, processor, rows)
        batches = partial(batches_of, collator=Collator.of(processor), batch_size=recipe.batch_size)
        held = list(batches(parts.validation))
        accuracy = run_evaluation(model, held).metrics()["eval/accuracy"]
        states: dict[str, dict[str, Any]] = {"before": _words(model, held) | {"accuracy": accuracy}}
        numbers = numbers_of(parts.sample, processor.num_token_id)
        set_value_space(model, recipe.value_space, numbers)
        wake_numbers(model)
        calibrate(model, processor, recipe, parts, batches, None)
        constant = _constant(model.value_space, numbers, numbers_of(parts.validation, processor.num_token_id))
        states["solved"] = _words(model, held) | _numbers(model, held, constant)
        left_out = _left_out(model, batches(parts.sample))
        start = time.perf_counter()
        output = train(recipe, rows=rows, progress=None).output
        seconds = time.perf_counter() - start
        trained, _ = load_model(str(output))
        states["after"] = _words(trained, held) | _numbers(trained, held, constant)
    states["median"] = constant.errors()
    return {
        "states": states,
        "left_out": left_out,
        "training_rows": len(parts.sample),
        "training_numbers": len(numbers),
        "validation_rows": len(parts.validation),
        "validation_numbers": len(constant.truth),
        "seconds": seconds,
    }


def _texts(recipe: TrainingRecipe, most: int) -> Any:
    """The recipe's own files, or the beginnings of them as rows."""
    if not most:
        return None
    assert isinstance(recipe.data, str)
    texts = [dict(row) for _, row in read_rows(recipe.data, bad_rows=BadRows())]
    return [{"text": " ".join(row["text"].split(" ")[:most])} for row in texts]


class _Numbers(NamedTuple):
    """The same law or several, held against M numbers."""

    truth: Tensor  # (M,)
    predicted: Tensor  # (M,) or scalar
    nats: Tensor  # (M,) −log density of log(1 + |v|)

    def errors(self) -> dict[str, float]:
        """By how much numbers are missed."""
        factor = (signed_log1p(self.predicted) - signed_log1p(self.truth)).abs().median().exp()
        return {
            "number_nats": self.nats.mean().item(),
            "number_factor": factor.item(),
            "number_mdae": (self.predicted - self.truth).abs().median().item(),
        }

    def gain(self, constant: _Numbers) -> list[float]:
        """Nats per number fewer than another law takes, and the standard error of their mean."""
        gains = constant.nats - self.nats
        return [gains.mean().item(), gains.std().item() / math.sqrt(len(gains))]


def _constant(space: ValueSpace, numbers: Tensor, truth: Tensor) -> _Numbers:
    """The median of the training numbers and the likeliest β about it, which is 0 in their value space."""
    zero = torch.zeros((), dtype=torch.float64)
    law = Cauchy(zero, torch.tensor(cauchy_scale(space.encode(numbers.double())), dtype=torch.float64))
    return _Numbers(truth.double(), space.decode(zero), _nats(law, space, truth.double()))


def _nats(Y: Cauchy, space: ValueSpace, truth: Tensor) -> Tensor:
    return math.log(space.spread) - Y.log_prob(space.encode(truth))


def _numbers(model: Any, held: Sequence[Any], constant: _Numbers) -> dict[str, Any]:
    """Where numbers are written and how well, also beside what is ``constant``."""
    evaluation = run_evaluation(model, held)
    metrics = evaluation.metrics()
    law = _Numbers(
        evaluation.values,
        evaluation.predicted,
        _nats(evaluation.Y, evaluation.value_space, evaluation.values),
    )
    return law.errors() | {
        "accuracy": metrics["eval/accuracy"],
        "number_f1": metrics["eval/num_f1"],
        "coverage_90": metrics["eval/coverage_90"],
        "number_gain": law.gain(constant),
    }


def _left_out(model: Any, rows: Any) -> dict[str, dict[str, Any]]:
    """Each number of the training rows by a head that was solved without its row, beside their median."""
    data = number_data(model, rows)
    fit, space = solve_numbers(model, data, left_out=False), model.value_space
    assert fit is not None
    law = Cauchy(space.encode(data.values) - fit.left_out, torch.tensor(fit.scale, dtype=torch.float64))
    head = _Numbers(data.values, space.decode(law.loc), _nats(law, space, data.values))
    constant = _constant(space, data.values, data.values)
    return {"solved": head.errors() | {"number_gain": head.gain(constant)}, "median": constant.errors()}


@torch.no_grad()
def _words(model: Any, held: Sequence[Any]) -> dict[str, float]:
    """Of every word (not <NUM>): its nats among words, and whether it is the likeliest of them."""
    nats, correct = [], []
    for positions in labelled_positions(model, held):
        for part in positions.at(positions.labels != model.config.num_token_id).split(128):
            logits: Tensor = torch.nn.functional.linear(
                part.U.loc, model.lm_head.weight.float(), model.action.bias.float()
            )
            logits[:, model.config.num_token_id] = -torch.inf
            nats.append(torch.nn.functional.cross_entropy(logits, part.labels, reduction="none").double())
            correct.append((logits.argmax(-1) == part.labels).double())
    return {"word_nats": torch.cat(nats).mean().item(), "word_accuracy": torch.cat(correct).mean().item()}


def tables(record: Record) -> list[Table]:
    """A column for each state."""
    figures = record.figures
    rows = [
        (label, *(_text(name, figures["states"][state].get(name)) for state in STATES))
        for name, label in LABELS.items()
    ]
    title = (
        "{validation_rows} passages with {validation_numbers} numbers, which training on {training_rows} "
        "with {training_numbers} numbers has not seen; {seconds:.0f} seconds"
    ).format(**figures)
    return [Table(title, ("", *STATES.values()), rows), _left_out_table(figures)]


def _left_out_table(figures: dict[str, Any]) -> Table:
    columns = ("solved", "median")
    rows = [
        (label, *(_text(name, figures["left_out"][column].get(name)) for column in columns))
        for name, label in LABELS.items()
        if name in figures["left_out"]["solved"]
    ]
    title = "The {training_numbers} numbers that are learned from, each by a head without its passage"
    return Table(title.format(**figures), ("", *(STATES[column] for column in columns)), rows)


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "number_gain":
        return "{:.2f} ± {:.2f}".format(*value)
    if name in ("word_accuracy", "accuracy", "coverage_90"):
        return f"{value:.0%}"
    return f"{value:.3g}" if name in ("number_mdae", "number_factor") else f"{value:.2f}"


def headlines(record: Record) -> list[tuple[str, str]]:
    """Words before and after, and where numbers are written."""
    states = record.figures["states"]
    label = "running text with numbers: nats per word before and after two epochs"
    return [
        (label, f"{states['before']['word_nats']:.2f} → {states['after']['word_nats']:.2f}"),
        ("… F1 of where numbers are written, after", f"{states['after']['number_f1']:.2f}"),
    ]


if __name__ == "__main__":
    main()
