"""What a run sets by solving for it: the number head, <NUM> and the end of a text, κ, intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from causal_qwen.calibration import (
    NumberData,
    fit_conformal,
    number_data,
    place_end_token,
    place_num_token,
    recalibrate_gain,
    refit_words,
    rounding_errors,
    solve_numbers,
)
from causal_qwen.calibration.number_head import NOISE_ROWS
from causal_qwen.causal_lm import CausalLM
from causal_qwen.data import Encoded
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.training.features import CachedFeatures
from causal_qwen.training.preparation import Rows
from causal_qwen.training.recipe import TrainingRecipe

__all__ = ["Batches", "calibrate", "solve"]

Batches = Callable[[Sequence[Encoded]], Iterable[Mapping[str, Any]]]


def solve(
    model: CausalLM,
    recipe: TrainingRecipe,
    parts: Rows,
    batches: Batches,
    features: CachedFeatures | None = None,
) -> NumberData:
    """The number head by maximum likelihood on the training rows.

    With features of a backbone that knows nothing of the labels its left-out residuals calibrate the
    intervals.
    """
    data = number_data(model, batches(parts.sample)) if features is None else features.number_data(model)
    errors = rounding_errors(model, batches(parts.sample[:NOISE_ROWS])) if recipe.precision_proof else None
    frozen = features is not None
    solve_numbers(model, data, errors=errors, left_out=frozen, groups=recipe.interval_groups)
    return data


def calibrate(
    model: CausalLM,
    processor: CausalQwen2Processor,
    recipe: TrainingRecipe,
    parts: Rows,
    batches: Batches,
    data: NumberData | None,
) -> None:
    """What is set when training ends, on rows that training did not use where there are any.

    The number head was solved already on the ``data`` of a backbone that stayed as it was.
    """
    model.eval()
    if recipe.refit_words:  # first: the rest reads scale_U
        refit_words(model, batches(parts.calibration or parts.sample), seed=recipe.seed)
    if data is None:
        solve(model, recipe, parts, batches)
    elif not parts.words:  # <NUM> and the end are all that a table's rows say
        reads_it = processor.numbers == "value" and model.config.tie_word_embeddings
        place_num_token(model, data, move_row=not reads_it)
        if parts.eos_token_id is not None:
            place_end_token(model, parts.eos_token_id, data, batches(parts.sample[:NOISE_ROWS]))
    recalibrate_gain(model, batches(parts.calibration or parts.validation), seed=recipe.seed)
    if parts.calibration:
        rows = batches(parts.calibration)
        fit_conformal(model, rows, groups=recipe.interval_groups, seed=recipe.seed)
