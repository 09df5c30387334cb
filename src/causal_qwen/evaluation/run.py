"""A run over data: from files, rows or batches to every eval/* and dist/* metric.

Scores (positions × vocabulary) exist for a few positions at a time; what is kept of a position is a handful
of numbers, and of the causes a random sample of bounded size.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from causal_qwen.calibration.belief import WrongLabels
from causal_qwen.calibration.conformal import standardised_residuals
from causal_qwen.calibration.positions import Positions, labelled_positions
from causal_qwen.cauchy import Cauchy
from causal_qwen.causal_lm import CausalLM
from causal_qwen.data import BadRows, Files, Reading, Source, labelled_batches
from causal_qwen.decoder.engine import Engine
from causal_qwen.evaluation import metrics
from causal_qwen.generation.readout import ReadOut
from causal_qwen.heads import exact
from causal_qwen.intervals import Numbers, leverage, report
from causal_qwen.native_model import NativeModel
from causal_qwen.number_processor import NumberProcessor
from causal_qwen.value_space import ValueSpace

__all__ = ["Evaluation", "evaluate", "run_evaluation"]

# Elements of one (positions, vocabulary) tensor: 32 MB in float32.
CHUNK_ELEMENTS = 1 << 23
# Positions whose causes are kept for medians and quartiles.
SAMPLE_POSITIONS = 4096
# Facts of a token of which only the mean is kept.
TOKEN_MEANS = ("eval/ovr_nll", "eval/softmax_nll", "eval/brier", "dist/mode_agreement")
# |g(v) − loc_Y|/scale_Y beyond which a number weighs less than a hundredth of one on the line: the border of
# belief where training has found no wrong labels.
FARTHEST_BELIEVED = 10.0
ROUNDING = 1e-6  # of scale_Y, which is float32
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """What a run has measured, position by position.

    Args:
        labels: (N,) true next tokens.
        chosen: (N,) deterministic choices.
        confidence: (N,) P_k/ΣP of the choice.
        prob_sum: (N,) ΣP.
        token_means: Means over the N positions of what is not kept per position.
        U: Moments and quartiles of loc_U and scale_U.
        Y: (M,) laws of the numbers in value space, float64.
        values: (M,) true numbers, float64.
        fold_locs: (M, K) loc_Y of the numbers by the head without each fold.
        leverage: (M,) how far their features lie from those of training; None where nobody knows.
        prob_num: (N,) P_<NUM>; empty without a number channel.
        config: The model's.
    """

    labels: Tensor
    chosen: Tensor
    confidence: Tensor
    prob_sum: Tensor
    token_means: dict[str, float]
    U: dict[str, float]
    Y: Cauchy
    values: Tensor
    fold_locs: Tensor
    leverage: Tensor | None
    prob_num: Tensor
    config: Any

    @property
    def correct(self) -> Tensor:
        """(N,) whether the choice was the label."""
        return self.chosen == self.labels

    @property
    def value_space(self) -> ValueSpace:
        """Where Y lives."""
        return ValueSpace(self.config.value_space, self.config.value_center, self.config.value_spread)

    @property
    def predicted(self) -> Tensor:
        """(M,) point predictions."""
        return self.numbers(0.9).median

    @property
    def residuals(self) -> Tensor:
        """(M,) |g(v) − loc_Y|/scale_Y."""
        return standardised_residuals(self.Y, self.value_space.encode(self.values))

    @property
    def believed(self) -> Tensor:
        """(M,) whether a number is taken for one of its law, not for a wrong label.

        By the law of the wrong labels among the training rows, as they themselves were judged; where there
        were none, within ten scale_Y of the prediction.
        """
        if self.config.wrong_labels is None:
            return self.residuals <= FARTHEST_BELIEVED
        target, scale = self.value_space.encode(self.values), self.Y.scale.double()
        return WrongLabels(*self.config.wrong_labels).right(self.residuals * scale, target, scale) >= 0.5

    def numbers(self, level: float, *, raw: bool = False) -> Numbers:
        """Medians and intervals, as `predict_number` reports them."""
        return report(self.config, self.Y, self.fold_locs, self.leverage, level, raw=raw)

    def coverage(self, level: float, *, raw: bool = False, believed: bool = False) -> float:
        """Share of the intervals of this level that hold their number, or of those of numbers believed."""
        _, lower, upper, _ = self.numbers(level, raw=raw)
        # An end may be this very number, and decoding rounds it.
        slack = ROUNDING * torch.maximum(self.values.abs(), upper - lower)
        inside = (lower - slack <= self.values) & (self.values <= upper + slack)
        return metrics.mean(inside[self.believed] if believed else inside)

    def metrics(self) -> dict[str, float]:
        """Every metric by its name; NaN where the data leave one undefined."""
        is_num = -1 if self.config.num_token_id is None else self.config.num_token_id
        predicted, actual = self.chosen == is_num, self.labels == is_num
        _, lower, upper, extrapolates = self.numbers(0.9)
        unknown = torch.full_like(lower, torch.nan)
        return {
            "eval/accuracy": metrics.accuracy(self.chosen, self.labels),
            "eval/num_precision": metrics.precision(predicted, actual),
            "eval/num_recall": metrics.recall(predicted, actual),
            "eval/num_f1": metrics.f1(predicted, actual),
            "eval/reg_mae": metrics.mean_absolute_error(self.predicted, self.values),
            "eval/reg_mdae": metrics.median_absolute_error(self.predicted, self.values),
            "eval/reg_crps": metrics.crps(self.Y, self.value_space.encode(self.values)),
            "eval/coverage_50": self.coverage(0.5),
            "eval/coverage_90": self.coverage(0.9),
            "eval/coverage_90_believed": self.coverage(0.9, believed=True),
            "eval/believed": metrics.mean(self.believed),
            "eval/extrapolates": metrics.mean(unknown if extrapolates is None else extrapolates),
            "eval/coverage_50_raw": self.coverage(0.5, raw=True),
            "eval/coverage_90_raw": self.coverage(0.9, raw=True),
            "eval/width_90_median": metrics.median(upper - lower),
            **self.token_means,
            "eval/ece": metrics.expected_calibration_error(self.confidence, self.correct),
            "eval/num_ece": metrics.expected_calibration_error(self.prob_num, actual),
            **self.U,
            "dist/ovr_prob_sum_median": metrics.median(self.prob_sum),
        }


def evaluate(
    model: CausalLM | NativeModel,
    processor: NumberProcessor,
    data: Source | Iterable[Batch],
    *,
    reading: Reading | None = None,
    max_length: int = 512,
    batch_size: int = 16,
    bad_rows: BadRows | None = None,
    engine: Engine | None = None,
) -> dict[str, float]:
    """Every eval/* and dist/* metric of a model on labelled data, always deterministic ("standard").

    Args:
        model: Left in the mode of training that it was in.
        processor: The model's.
        data: Files or rows, as for `labelled_batches`, which the options below are for; or batches that are
            ready, each with tensors ``input_ids`` and ``labels`` (B, T), −100 ignored, and where there are
            any ``attention_mask`` and ``numeric_values``.
        reading: How rows become texts; `Reading.of` a trained model knows.
        max_length: Tokens per row; never more than the context.
        batch_size: Rows per forward pass.
        bad_rows: Counts what is skipped; the first bad row stops by default.
        engine: Made from the model; its backbone and W are measured, in its precision, with the model's
            heads.

    Raises:
        ValueError: If model and processor do not mean the same token by <NUM>, or a row cannot be used.
    """
    if model.config.num_token_id not in (None, processor.num_token_id):
        raise ValueError(
            f"<NUM> is {processor.num_token_id} for the processor and {model.config.num_token_id} for the "
            "model; load both from the same directory"
        )
    items, are_batches = _first_looked_at(data)
    if not are_batches:
        items = labelled_batches(
            processor,
            items,
            reading=reading,
            max_length=min(max_length, model.config.max_position_embeddings),
            batch_size=batch_size,
            bad_rows=bad_rows,
        )
    return run_evaluation(model, items, engine=engine).metrics()


def _first_looked_at(data: Source | Iterable[Batch]) -> tuple[Any, bool]:
    """The data, whole, and whether they are batches that are ready, which have tensors for labels."""
    if isinstance(data, str | Path | Files):
        return data, False
    items: Iterator[Any] = iter(data)
    first = list(itertools.islice(items, 1))
    are_batches = all(isinstance(item, Mapping) and isinstance(item.get("labels"), Tensor) for item in first)
    return itertools.chain(first, items), are_batches


@torch.no_grad()
def run_evaluation(
    model: CausalLM | NativeModel, batches: Iterable[Batch], *, engine: Engine | None = None
) -> Evaluation:
    """Look at every labelled position of batches once; arguments as for `evaluate`."""
    causes = {"loc": _Summary(), "scale": _Summary()}
    facts: defaultdict[str, list[Tensor]] = defaultdict(list)
    chunk = max(CHUNK_ELEMENTS // model.config.vocab_size, 1)
    readout = ReadOut(model, None if engine is None else engine.weights.head)
    for positions in labelled_positions(model, batches, engine=engine):
        causes["loc"].add(positions.U.loc)
        causes["scale"].add(positions.U.scale)
        for part in positions.split(chunk):
            for name, fact in _token_facts(readout, part).items():
                facts[name].append(fact.cpu())
        if model.config.num_token_id is not None:
            numbers = positions.at(positions.labels == model.config.num_token_id)
            facts["loc_Y"].append(numbers.Y.loc.double().cpu())
            facts["scale_Y"].append(numbers.Y.scale.double().cpu())
            facts["values"].append(numbers.values.cpu())
            facts["fold_locs"].append(model.action.fold_numbers(numbers.U_noisy).double().cpu())
            far = leverage(model.action, numbers.U_noisy)
            if far is not None:
                facts["leverage"].append(far.cpu())
            facts["prob_num"].append(model.prob_num(positions.U_noisy, positions.U0, engine).cpu())

    def column(name: str) -> Tensor:
        return torch.cat(facts[name]) if name in facts else torch.empty(0)

    return Evaluation(
        labels=column("labels"),
        chosen=column("chosen"),
        confidence=column("confidence"),
        prob_sum=column("prob_sum"),
        token_means={name: metrics.mean(column(name)) for name in TOKEN_MEANS},
        U={
            f"dist/U_{name}_{statistic}": entry
            for name, summary in causes.items()
            for statistic, entry in summary.statistics().items()
        },
        Y=Cauchy(column("loc_Y"), column("scale_Y")),
        values=column("values"),
        fold_locs=column("fold_locs"),
        leverage=column("leverage") if "leverage" in facts else None,
        prob_num=column("prob_num"),
        config=model.config,
    )


def _token_facts(readout: ReadOut, positions: Positions) -> dict[str, Tensor]:
    """What is kept of n positions, (n,) each."""
    S = readout.scores(positions.U_noisy, positions.U0)  # (n, V)
    labels, chosen = positions.labels, readout.action.z_scores(S).argmax(-1)
    prob = S.sf(exact(readout.action.threshold))  # (n, V)
    return {
        "labels": labels,
        "chosen": chosen,
        "confidence": metrics.confidence(prob, chosen),
        "prob_sum": prob.sum(-1),
        "eval/ovr_nll": metrics.ovr_nll(prob, labels),
        # loc_S is the logits and a common shift.
        "eval/softmax_nll": metrics.softmax_nll(S.loc, labels),
        "eval/brier": metrics.brier(prob, labels),
        # Training moves scale_S apart by token, and with it the choices by score and by logit.
        "dist/mode_agreement": chosen == readout.logits(positions.U.loc).argmax(-1),
    }


class _Summary:
    """Mean and standard deviation of all entries, by Chan's update; median and quartiles of a random sample.

    The sample is exact up to 4,096 positions; beyond, those with the smallest of random keys are kept.
    """

    def __init__(self) -> None:
        self.count, self.center, self.squares = 0, 0.0, 0.0
        self.generator = torch.Generator().manual_seed(0)
        self.keys, self.rows = torch.empty(0), torch.empty(0)

    def add(self, rows: Tensor) -> None:
        """Take in (n, D) entries."""
        if rows.numel() == 0:
            return
        rows = rows.cpu()
        center = float(rows.double().mean())
        total, shift = self.count + rows.numel(), center - self.center
        self.squares += float((rows.double() - center).square().sum())
        self.squares += shift**2 * self.count * rows.numel() / total
        self.center += shift * rows.numel() / total
        self.count = total
        keys = torch.cat([self.keys, torch.rand(len(rows), generator=self.generator)])
        smallest = keys.topk(min(len(keys), SAMPLE_POSITIONS), largest=False).indices
        sample = torch.cat([self.rows.reshape(-1, rows.shape[1]).to(rows.dtype), rows])
        self.keys, self.rows = keys[smallest], sample[smallest]

    def statistics(self) -> dict[str, float]:
        """mean, median, std and iqr; NaN of nothing."""
        low, middle, high = (metrics.quantile(self.rows, prob) for prob in (0.25, 0.5, 0.75))
        return {
            "mean": self.center if self.count else math.nan,
            "median": middle,
            "std": math.sqrt(self.squares / self.count) if self.count else math.nan,
            "iqr": high - low,
        }
