"""Running text with numbers: what examples/configs/descriptions.yaml learns, every token of it.

Before training, with the number head solved on the features of the base, and after the whole recipe, on
passages that training has not seen: nats of the words under softmax, how often the next word is the likeliest
one, where numbers are written, and by how much they are missed. In running text a number can be anything that
a description may say next, a year or a p-value, so its error stands beside that of the training median.

    python benchmarks/descriptions.py                  # a quarter of an hour on two cores
    python benchmarks/descriptions.py --quick --json   # two steps, to see that it runs
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from causal_qwen.calibration import number_data, set_value_space, solve_numbers, wake_numbers
from causal_qwen.calibration.positions import labelled_positions
from causal_qwen.conversion import convert, load_model
from causal_qwen.data import BadRows, Collator, batches_of, read_rows
from causal_qwen.data.encoding import numbers_of
from causal_qwen.evaluation import run_evaluation
from causal_qwen.training import TrainingRecipe, preparation, train
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
    "number_f1": "F1 of where numbers are written",
    "number_mdae": "median absolute error of numbers",
    "coverage_90": "90% intervals that hold",
}
STATES = {"before": "before, numbers asleep", "solved": "number head solved", "after": "trained"}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure before and after, and print both."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="two steps", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """The three states, and what the training median would miss numbers by."""
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
        states = {"before": _measured(model, batches(parts.validation))}
        numbers = numbers_of(parts.sample, processor.num_token_id)
        set_value_space(model, recipe.value_space, numbers)
        wake_numbers(model)
        solve_numbers(model, number_data(model, batches(parts.sample)), left_out=False)
        states["solved"] = _measured(model, batches(parts.validation))
        start = time.perf_counter()
        output = train(recipe, rows=rows, progress=None).output
        seconds = time.perf_counter() - start
        trained, _ = load_model(str(output))
        states["after"] = _measured(trained, batches(parts.validation))
    truth = numbers_of(parts.validation, processor.num_token_id).double()
    return {
        "states": states,
        "median_mdae": float((truth - numbers.double().median()).abs().median()),
        "training_rows": len(parts.sample),
        "validation_rows": len(parts.validation),
        "validation_numbers": len(truth),
        "seconds": seconds,
    }


def _texts(recipe: TrainingRecipe, most: int) -> Any:
    """The recipe's own files, or the beginnings of them as rows."""
    if not most:
        return None
    assert isinstance(recipe.data, str)
    texts = [dict(row) for _, row in read_rows(recipe.data, bad_rows=BadRows())]
    return [{"text": " ".join(row["text"].split(" ")[:most])} for row in texts]


@torch.no_grad()
def _measured(model: Any, batches: Any) -> dict[str, float]:
    held = list(batches)
    found = run_evaluation(model, held).metrics()
    nats, correct = (torch.cat(column) for column in zip(*_words(model, held), strict=True))
    return {
        "word_nats": nats.mean().item(),
        "word_accuracy": correct.double().mean().item(),
        "number_f1": found["eval/num_f1"],
        "number_mdae": found["eval/reg_mdae"],
        "coverage_90": found["eval/coverage_90"],
    }


def _words(model: Any, batches: Any) -> Any:
    """Of every word (not <NUM>): its nats among words, and whether it is the likeliest of them."""
    for positions in labelled_positions(model, batches):
        for part in positions.at(positions.labels != model.config.num_token_id).split(128):
            logits: Tensor = torch.nn.functional.linear(
                part.U.loc, model.lm_head.weight.float(), model.action.bias.float()
            )
            logits[:, model.config.num_token_id] = -torch.inf
            nats = torch.nn.functional.cross_entropy(logits, part.labels, reduction="none")
            yield nats.double(), logits.argmax(-1) == part.labels


def tables(record: Record) -> list[Table]:
    """A column for each state."""
    figures = record.figures
    rows = [
        (label, *(_text(name, figures["states"][state][name]) for state in STATES))
        for name, label in LABELS.items()
    ]
    rows.append(("… of the training median", "", "", f"{figures['median_mdae']:.3g}"))
    title = (
        "{validation_rows} passages with {validation_numbers} numbers that training on {training_rows} has "
        "not seen; {seconds:.0f} seconds"
    ).format(**figures)
    return [Table(title, ("", *STATES.values()), rows)]


def _text(name: str, value: float) -> str:
    if name in ("word_accuracy", "coverage_90"):
        return f"{value:.0%}"
    return f"{value:.2f}" if name in ("word_nats", "number_f1") else f"{value:.3g}"


def headlines(record: Record) -> list[tuple[str, str]]:
    """Words before and after."""
    states = record.figures["states"]
    label = "running text with numbers: nats per word before and after two epochs"
    return [(label, f"{states['before']['word_nats']:.2f} → {states['after']['word_nats']:.2f}")]


if __name__ == "__main__":
    main()
