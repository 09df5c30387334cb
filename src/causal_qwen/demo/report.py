"""The page of the demonstration: what its steps found, in words, tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from causal_qwen.counterfactual.interventions import Counterfactual
from causal_qwen.demo import pictures, story
from causal_qwen.demo.story import SEED, Forecast
from causal_qwen.evaluation import metrics, page, plots
from causal_qwen.evaluation.page import Section
from causal_qwen.evaluation.predict import Prediction

__all__ = ["Findings", "error_rows", "write_report"]

SHOWN = 12  # cars of the table in two precisions
UNIT = "miles per gallon"


@dataclass(frozen=True)
class Findings:
    """What the steps found.

    Args:
        parity: Figures of the comparison with the base.
        texts: Continuations of the prompt, by who decides.
        rows: Cars that were learned.
        clean: Predictions learned from the table as it is.
        broken: Predictions learned from broken labels.
        squares: What least squares predicts, (n,) from clean labels and (n,) from broken ones.
        integers: Predictions of the clean model in int8.
        far: Prompts near and far.
        losses: Step and number loss while a backbone learns.
        what_if: One individual and two engines.
    """

    parity: Mapping[str, str]
    texts: Mapping[str, str]
    rows: int
    clean: Forecast
    broken: Forecast
    squares: tuple[Tensor, Tensor]
    integers: Forecast
    far: Sequence[Prediction]
    losses: Sequence[tuple[float, float]]
    what_if: Counterfactual

    @property
    def loss_ends(self) -> tuple[float, float]:
        """Mean number loss of the first two batches, when little has moved, and of the last fifth."""
        losses = [loss for _, loss in self.losses]
        some = max(len(losses) // 5, 1)
        return sum(losses[:2]) / len(losses[:2]), sum(losses[-some:]) / some


def error_rows(found: Findings) -> list[tuple[str, str, str]]:
    """Median errors from clean labels and from broken ones."""
    clean, broken = (metrics.median_absolute_error(column, found.clean.truth) for column in found.squares)
    return [
        ("this model, maximum Cauchy likelihood", f"{found.clean.error:.2f}", f"{found.broken.error:.2f}"),
        ("least squares on the table's columns", f"{clean:.2f}", f"{broken:.2f}"),
    ]


def write_report(file: Path, found: Findings, *, prompt: str, out: Path) -> None:
    """Write the page with its pictures."""
    cars, model = found.clean, out / "model"
    command = f'causal-qwen generate {model} "{prompt}"'
    first, last = found.loss_ends
    sections = [
        Section(
            "Exact on day one",
            "The converted model against its base, position by position, on text that nothing was fitted to.",
            page.table(list(found.parity.items())),
            [f"causal-qwen parity {model}"],
        ),
        Section(
            "Three ways to decide",
            f"“{prompt} …” In standard mode the law of the cause decides, in causal mode one concrete "
            "individual does, and compatible mode is what the base does. The same individual repeats itself.",
            page.table(list(found.texts.items()), header=("who decides", "continuation")),
            [command, f"{command} --mode causal --seed {SEED}", f"{command} --mode compatible --sample"],
        ),
        Section(
            "A table, learned without a gradient step",
            f"Each of {found.rows} cars is a sentence that ends in its {UNIT}; the law of that number is "
            f"solved for. Of {len(cars.truth)} cars that it has not seen the median absolute error is "
            f"{cars.error:.2f}, where the training median gets {cars.constant_error:.2f}; "
            f"{cars.coverage:.0%} of the {cars.level:.0%} intervals hold the truth, and they are "
            f"{cars.width:.1f} wide.",
            page.picture(
                plots.picture(
                    plots.draw_predictions,
                    *(cars.truth, cars.median, cars.lower, cars.upper),
                    cars.level,
                    UNIT,
                ),
                alt="predicted against true fuel economy",
            ),
            [
                f"causal-qwen train {out / 'cars.yaml'} --overwrite",
                f"causal-qwen predict {out / 'cars'} {out / 'test.jsonl'} -o predictions.csv",
            ],
        ),
        Section(
            "A fifth of the labels broken",
            "The same cars once more, but a fifth of the labels is anything from 1 to 400. A Cauchy law "
            "takes them for the outliers that they are; squares follow them. An interval promises to hold "
            f"labels as they are given, so those of {cars.level:.0%} are now {found.broken.width:.0f} wide.",
            page.table(error_rows(found), header=("median error", "clean labels", "a fifth broken"))
            + page.picture(
                pictures.broken_labels(
                    cars.truth,
                    {"this model": (cars.median, found.broken.median), "least squares": found.squares},
                    unit=UNIT,
                ),
                alt="predictions from clean and from broken labels",
            ),
            [f"causal-qwen train {out / 'broken.yaml'} --overwrite"],
        ),
        Section(
            "The same numbers in integers",
            "Predictions in float32 and by the native engine with weights of 8 bits. (The embedded base was "
            "published in 4 bits, which 8 hold to rounding; weights of a finer base would move more.) No "
            f"median moves by more than {cars.shift(found.integers):.3f} of its interval's width; the median "
            f"error is {cars.error:.2f} and {found.integers.error:.2f}.",
            page.table(
                story.side_by_side(cars, found.integers, SHOWN), header=("car", "truth", "float32", "int8")
            ),
        ),
        Section(
            "It says when it does not know",
            "A car like those of the table, and something that is not. What lies beyond all that was learned "
            "is flagged, and its interval is no longer the calibrated one.",
            page.table(story.far_rows(found.far), header=("prompt", UNIT, "90% interval", "extrapolates")),
        ),
        Section(
            "The same individual, another engine",
            "All that the model calls chance is held fixed, and only the sentence differs. Another "
            "individual under the first sentence shows how far chance alone goes.",
            page.table(story.what_if_rows(found.what_if), header=("who", "sentence", UNIT)),
        ),
        Section(
            "A backbone that learns",
            "Sentences with the product of two numbers, of which no row comes twice. The backbone "
            "learns by gradients while the number's law is solved anew on its latest features. "
            f"Over {len(found.losses)} steps the number loss goes from {first:.2f} to "
            f"{last:.2f} nats (means of the first two batches and of the last fifth). It rises "
            "in between, while moving features leave the head behind; benchmarks/tuning.py has longer runs.",
            page.picture(pictures.loss_curve(found.losses), alt="number loss against steps"),
        ),
    ]
    lead = "A language model that infers a cause, then acts. Every figure here was computed just now."
    page.write_page(file, title="CausalQwen: the demonstration", lead=lead, sections=sections)
