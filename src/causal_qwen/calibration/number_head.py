"""The number channel, set from rows: value space, and w, b_Y and β_Y by maximum Cauchy likelihood.

Conversion knows no numbers. Here the features of training rows say where loc_Y and scale_Y should be, and
what has been seen at all; where <NUM> is chosen is said elsewhere (`placing`). This module does not know how
rows are read.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from causal_qwen.calibration.cauchy_regression import CauchyRegression, cauchy_regression
from causal_qwen.calibration.conformal import Scores, keep_scores
from causal_qwen.cauchy import Cauchy
from causal_qwen.causal_lm import CausalLM, shifted
from causal_qwen.decoder.engine import Engine
from causal_qwen.decoder.packed import Precision
from causal_qwen.heads import exact
from causal_qwen.losses import IGNORE_INDEX
from causal_qwen.support import NumberSupport
from causal_qwen.value_space import ValueSpace

__all__ = [
    "NumberData",
    "Rounding",
    "forget_numbers",
    "number_data",
    "rounding_errors",
    "set_value_space",
    "solve_numbers",
    "support_of",
    "wake_numbers",
]

logger = logging.getLogger(__name__)

FEWEST_NUMBERS = 16  # fewer say nothing about a slope
MOST_NUMBERS = 20_000  # features of so many are held in memory
MOST_ELSEWHERE = 512  # positions where no number follows
MOST_AMONG_WORDS = 2048  # the same of running text, where most positions are such, of every kind
# Rows whose rounding a head is solved to survive; as many others say by how much its numbers still move.
NOISE_ROWS = 32
# Precisions that a head has to survive: int4 changes more than a head can avoid.
SURVIVED = ("bfloat16", "int8")
INTEGERS: tuple[Precision, ...] = ("int8", "int4")
# Least scale_Y in units of value_spread: narrower than this is rounding.
NARROWEST = 1e-4
Batches = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class NumberData:
    """Causes at positions before a number, N of them, and at M where something else follows."""

    U: Cauchy  # (N, D), U'
    U0: Cauchy  # (N,)
    values: Tensor  # (N,) the numbers, float64
    rows: Tensor  # (N,) the row that each stands in, from 0
    U_elsewhere: Cauchy  # (M, D), U'
    U0_elsewhere: Cauchy  # (M,)
    words: int  # labels of these rows that are no numbers

    @classmethod
    @torch.no_grad()
    def of(
        cls, model: CausalLM, before: Tensor, values: Tensor, rows: Tensor, elsewhere: Tensor, *, words: int
    ) -> NumberData:
        """From features z: (N, H) before numbers, (N,) those numbers and their rows, and (M, H) elsewhere."""
        U, U0 = model.abduction(before.to(model.device))
        other, other0 = model.abduction(elsewhere.to(model.device))
        action = model.action
        return cls(action.exogenous(U), U0, values.double(), rows, action.exogenous(other), other0, words)

    @property
    def words_per_number(self) -> float:
        """At least 1, which it is in a table whose rows end behind their number."""
        return max(self.words / max(len(self.values), 1), 1.0)


def set_value_space(model: CausalLM, kind: Literal["log", "linear"], values: Tensor) -> None:
    """Center and spread of the numbers (N,) to be trained on; without numbers nothing changes."""
    if values.numel() == 0:
        logger.warning("the training rows hold no number to learn; only words are trained")
        return
    space = ValueSpace.fit(kind, values)
    model.config.value_space = space.kind
    model.config.value_center, model.config.value_spread = space.center, space.spread


@torch.no_grad()
def wake_numbers(model: CausalLM) -> None:
    """b_<NUM> = 0, loc_Y = 0, scale_Y = 1 of a model that has never written numbers."""
    action = model.action
    action.bias[model.config.num_token_id] = 0.0
    action.number.weight.zero_()
    action.number.bias.zero_()
    action.number_noise.fill_(1.0)


def forget_numbers(model: CausalLM) -> None:
    """Drop intervals and support, which belong to the head as it was."""
    config, action = model.config, model.action
    Scores().keep_in(config)
    config.value_range = config.precision_shifts = config.wrong_labels = config.number_leverage = None
    config.number_folds = config.number_support = 0
    size, device = action.fold_slopes.shape[1], action.fold_slopes.device
    action.keep_folds(torch.zeros(0, size, device=device), torch.zeros(0, device=device))
    action.keep_support(NumberSupport(size).to(device))


@torch.no_grad()
def number_data(model: CausalLM, batches: Batches) -> NumberData:
    """Run the model over labelled rows, and keep what the number head is solved on."""
    was_training = model.training
    model.eval()
    parts: list[tuple[Tensor, ...]] = []
    count = words = 0
    for batch in batches:
        inputs = {name: entry.to(model.device) for name, entry in batch.items() if isinstance(entry, Tensor)}
        before, elsewhere = positions_of(inputs, model.config)
        words += count_words(shifted(inputs["labels"], IGNORE_INDEX), model.config)
        values = inputs.get("labels_values", inputs.get("numeric_values"))
        values = torch.zeros_like(inputs["input_ids"]) if values is None else values
        states = features_of(model, inputs)  # (B, T, H)
        rows = count + before.nonzero()[:, 0].cpu()
        parts.append((states[before], shifted(values.double(), 0.0)[before], rows, states[elsewhere]))
        count += len(before)
        if sum(len(part[1]) for part in parts) >= MOST_NUMBERS:
            break
    model.train(was_training)
    if not parts:
        nothing = torch.empty(0, model.config.hidden_size)
        nobody = torch.empty(0, dtype=torch.long)
        return NumberData.of(model, nothing, torch.empty(0), nobody, nothing, words=0)
    before_z, values, rows, elsewhere_z = (torch.cat(column) for column in zip(*parts, strict=True))
    elsewhere_z = some_elsewhere(elsewhere_z, words=words, numbers=len(values))
    return NumberData.of(model, before_z, values, rows, elsewhere_z, words=words)


def positions_of(inputs: Mapping[str, Tensor], config: Any) -> tuple[Tensor, Tensor]:
    """(B, T) positions before a number that is learned, and some before something that is no number.

    In a prompt the digits of a number say nothing about <NUM>: positions before them are neither.
    """
    ids, row = inputs["input_ids"], config.num_token_id
    labels, following = shifted(inputs["labels"], IGNORE_INDEX), shifted(ids, row)
    digits = torch.tensor([row, *(config.number_spelling or {}).values()], device=ids.device)
    padding = torch.zeros_like(ids) if "attention_mask" not in inputs else 1 - inputs["attention_mask"]
    in_prompt = (labels == IGNORE_INDEX) & ~torch.isin(following, digits) & (shifted(padding, 1) == 0)
    elsewhere = (labels != IGNORE_INDEX) & (labels != row) | in_prompt & (padding == 0)
    return labels == row, elsewhere


def count_words(labels: Tensor, config: Any) -> int:
    """Labels, shifted or not, that are learned and no numbers."""
    return int(((labels != IGNORE_INDEX) & (labels != config.num_token_id)).sum())


def some_elsewhere(features: Tensor, *, words: int, numbers: int) -> Tensor:
    """Of features (M, H) where no number follows, as many as say what such positions are like."""
    return evenly(features, MOST_AMONG_WORDS if words > numbers else MOST_ELSEWHERE)


def evenly(rows: Tensor, most: int) -> Tensor:
    """At most ``most`` of the rows (N, ...), evenly spread."""
    if len(rows) <= most:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).long()]


@dataclass(frozen=True)
class Rounding:
    """What other precisions do to features, as far as a head has to survive it."""

    moment: Tensor  # (D, D) R = Σ E[δδᵀ] over the precisions
    variance: float  # of an entry of δ around what all rows have in common, mean over the entries

    @classmethod
    def of(cls, errors: Sequence[Tensor]) -> Rounding:
        """From δ (n, D) of each precision."""
        moments = [error.T @ error / len(error) for error in errors]
        variances = [float(error.var(0, correction=0).mean()) for error in errors]
        return cls(torch.stack(moments).sum(0), sum(variances))


@torch.no_grad()
def rounding_errors(model: CausalLM, batches: Batches) -> dict[str, Tensor]:
    """What other precisions change in loc_U before a number, (n, D) each, by the precision's name.

    Integers are those of the native engine, where the model is one that it runs.

    Args:
        model: On any device.
        batches: Labelled rows, of which the first with 64 numbers are run again in each precision: 32 for
            a head to be solved with, 32 to judge it by.
    """
    sample: list[dict[str, Tensor]] = []
    count = 0
    for batch in batches:
        inputs = {name: entry.to(model.device) for name, entry in batch.items() if isinstance(entry, Tensor)}
        sample.append(inputs)
        count += int((inputs["labels"] == model.config.num_token_id).sum())
        if count >= 2 * NOISE_ROWS:
            break
    if count == 0:
        return {}
    was_training = model.training
    model.eval()
    before = [positions_of(inputs, model.config)[0] for inputs in sample]
    reference = [model.abduction(features_of(model, inputs))[0].loc for inputs in sample]
    errors = {}
    for precision, rounded in _rounded(model, sample):
        changes = zip(before, reference, rounded, strict=True)
        errors[precision] = torch.cat([(loc_U - exactly)[at].double() for at, exactly, loc_U in changes])
    model.train(was_training)
    return errors


def _rounded(model: CausalLM, sample: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[str, list[Tensor]]]:
    """loc_U (B, T, D) of each batch in bfloat16, and where it can be in int8 and int4."""
    if model.dtype != torch.bfloat16:
        half = copy.deepcopy(model.model).to(torch.bfloat16)
        yield "bfloat16", [model.abduction(features_of(model, inputs, half))[0].loc for inputs in sample]
        del half
    names = ("input_ids", "attention_mask", "numeric_values")
    read = [{name: inputs[name] for name in names if name in inputs} for inputs in sample]
    for precision in INTEGERS:
        try:
            engine = Engine.from_model(model, precision=precision)
        except (KeyError, ValueError):  # not on the CPU, of another family, or with adapters
            return
        yield precision, [model.causes(inputs, engine).U.loc for inputs in read]


def features_of(model: CausalLM, inputs: Mapping[str, Tensor], backbone: Any = None) -> Tensor:
    """z (B, T, H) by the model's backbone, or by another of its kind."""
    backbone = model.model if backbone is None else backbone
    rest = {name: inputs[name] for name in ("attention_mask", "position_ids") if name in inputs}
    values = inputs.get("numeric_values", torch.zeros_like(inputs["input_ids"]))
    embeds = model.embed(inputs["input_ids"], values).to(next(backbone.parameters()).dtype)
    return exact(backbone(inputs_embeds=embeds, use_cache=False, **rest).last_hidden_state)


@torch.no_grad()
def solve_numbers(
    model: CausalLM,
    data: NumberData,
    *,
    errors: Mapping[str, Tensor] | None = None,
    left_out: bool,
    groups: int = 1,
) -> CauchyRegression | None:
    """Set w, b_Y and β_Y to the likeliest, and what was seen: the support and range of the training numbers.

    Args:
        model: Changed in place.
        data: Of the training rows.
        errors: Of the features in other precisions, as `rounding_errors` measures them. The head leaves alone
            what bfloat16 and int8 change in the first 32, and the configuration keeps by how much numbers
            move in the others: of rows that a head was told of, rounding changes next to nothing.
        left_out: Whether intervals come from the residuals of left-out rows (CV+). They are honest where the
            features know nothing of the labels: a backbone that was trained on these rows does.
        groups: Of intervals with residuals of their own, as for `keep_scores`.

    Returns:
        The fit; None, and nothing changed but what was seen forgotten, with fewer than 16 numbers or where
        all are equal.
    """
    forget_numbers(model)
    config, action = model.config, model.action
    target = model.value_space.encode(data.values.to(data.U.loc.device))
    if len(target) < FEWEST_NUMBERS or float(target.min()) == float(target.max()):
        logger.warning("%d numbers, too few or all equal: the number head is not solved", len(target))
        return None
    told, kept_back = _halves(errors or {})
    survived = [told[name] for name in SURVIVED if name in told]
    rounding = Rounding.of(survived) if survived else None
    noise = None if rounding is None else rounding.moment
    fit = cauchy_regression(data.U.loc, target, noise=noise, groups=data.rows.unique(return_inverse=True)[1])
    action.number.weight.copy_(fit.slope[None])
    action.number.bias.fill_(fit.intercept)
    action.number_noise.zero_()
    from_causes = float(action.numbers(data.U).scale.median())
    action.number_noise.fill_(max(fit.scale - from_causes, NARROWEST))
    config.wrong_labels = None if fit.wrong is None else list(fit.wrong)
    config.value_range = [float(data.values.min()), float(data.values.max())]
    count = int(fit.believed.sum())
    support, config.number_leverage = support_of(evenly(data.U.loc, MOST_NUMBERS), fit, rounding)
    action.keep_support(support)
    config.number_support = len(action.support.gains)
    width = max(2 * float(fit.left_out[fit.believed].abs().quantile(0.9)), NARROWEST)
    config.precision_shifts = {
        name: float((error @ fit.slope).abs().median()) / width
        for name, error in kept_back.items()
        if len(error)
    }
    if left_out and len(fit.fold) == 0:
        logger.warning("too few rows to leave some out: intervals stay the quantiles of the Cauchy law")
    elif left_out:
        action.keep_folds(fit.fold_slopes, fit.fold_intercepts)
        config.number_folds = len(fit.fold_slopes)
        scores = fit.left_out.abs() / action.numbers(data.U).scale.double()
        locs = (target - fit.left_out).cpu()
        keep_scores(scores.cpu(), fit.fold.cpu(), locs=locs, groups=groups).keep_in(config)
    if count < len(target):
        wrong = len(target) - count
        logger.warning("%d of %d training numbers look wrong: the head is solved without", wrong, len(target))
    error = float(fit.left_out[fit.believed].abs().median())
    logger.info("numbers: median error %.3f spreads, left out", error)
    return fit


def support_of(
    loc_U: Tensor, fit: CauchyRegression, rounding: Rounding | None
) -> tuple[NumberSupport, float]:
    """What a fit to causes (N, D) has seen, those that rounding makes of them among it."""
    if rounding is None:
        return NumberSupport.of(loc_U, fit.ridge)
    count = int(fit.believed.sum())
    return NumberSupport.of(loc_U, fit.ridge + count * rounding.variance, noise=count * rounding.moment)


def _halves(errors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Errors (n, D) that a head is told of, 32 or half of them, and the others."""
    first = {name: min(NOISE_ROWS, (len(error) + 1) // 2) for name, error in errors.items()}
    told = {name: error[: first[name]] for name, error in errors.items()}
    return told, {name: error[first[name] :] for name, error in errors.items()}
