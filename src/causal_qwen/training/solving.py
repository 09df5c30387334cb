"""What a run sets by solving for it: the number head, <NUM> and the end of a text, κ, intervals."""

from __future__ import annotations

import logging
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
from causal_qwen.calibration.conformal import Scores
from causal_qwen.calibration.number_head import FEWEST_NUMBERS, NOISE_ROWS
from causal_qwen.causal_lm import CausalLM
from causal_qwen.data import Encoded
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.training.preparation import Rows
from causal_qwen.training.recipe import TrainingRecipe

__all__ = ["Batches", "calibrate", "solve"]

logger = logging.getLogger(__name__)

Batches = Callable[[Sequence[Encoded]], Iterable[Mapping[str, Any]]]


def solve(
    model: CausalLM,
    recipe: TrainingRecipe,
    parts: Rows,
    batches: Batches,
    data: NumberData | None = None,
    *,
    frozen: bool,
) -> NumberData:
    """The number head by maximum likelihood on the training rows, whose ``data`` may be at hand.

    With features of a ``frozen`` backbone, that knows nothing of the labels, its left-out residuals calibrate
    the intervals.
    """
    data = number_data(model, batches(parts.sample)) if data is None else data
    rounded = batches(parts.sample[: 2 * NOISE_ROWS])
    errors = rounding_errors(model, rounded) if recipe.precision_proof else None
    solve_numbers(model, data, errors=errors, left_out=frozen, groups=recipe.interval_groups)
    return data


def calibrate(
    model: CausalLM,
    processor: CausalQwen2Processor,
    recipe: TrainingRecipe,
    parts: Rows,
    batches: Batches,
    data: NumberData | None,
) -> bool:
    """What is set when training ends, on rows that training did not use where there are any.

    The number head was solved already on the ``data`` of a backbone that stayed as it was.

    Returns:
        Whether rows of W have moved, which adapters leave as they are.
    """
    model.eval()
    if recipe.refit_words:  # first: the rest reads scale_U
        refit_words(model, batches(parts.calibration or parts.sample), seed=recipe.seed)
    if parts.words:
        moved = _place_in_text(model, recipe, parts, batches, data)
    else:
        reads_it = processor.numbers == "value" and model.config.tie_word_embeddings
        moved = _place_in_table(model, recipe, parts, batches, data, reads_it=reads_it)
    if held_out := parts.calibration or parts.validation:
        recalibrate_gain(model, batches(held_out), seed=recipe.seed)
    if parts.calibration:
        rows, before = batches(parts.calibration), Scores.kept_in(model.config)
        fit_conformal(model, rows, groups=recipe.interval_groups, seed=recipe.seed)
        if model.config.conformal_scores is None and before.scores is not None:
            logger.warning("intervals stay those of the training rows, each left out once")
            before.keep_in(model.config)
    return moved


def _place_in_text(
    model: CausalLM, recipe: TrainingRecipe, parts: Rows, batches: Batches, data: NumberData | None
) -> bool:
    """<NUM> among words, then the number head: what follows a number reads the row that has moved."""
    frozen, tied = data is not None, model.config.tie_word_embeddings
    data = number_data(model, batches(parts.sample)) if data is None else data
    moved = not _holds_rows(recipe) and place_num_token(model, data, among_words=True)
    if (
        _holds_rows(recipe) and len(data.values) >= FEWEST_NUMBERS
    ):  # b and C alone would write as many words as numbers
        logger.warning("hold keeps W as it is: numbers are learned, but <NUM> is not placed among words")
    if (moved and tied) or not frozen:
        solve(model, recipe, parts, batches, None if moved and tied else data, frozen=frozen)
    return moved


def _place_in_table(
    model: CausalLM,
    recipe: TrainingRecipe,
    parts: Rows,
    batches: Batches,
    data: NumberData | None,
    *,
    reads_it: bool,
) -> bool:
    """The number head; then <NUM> and the end, which are all that a table's rows say.

    Where the row of <NUM> is how values are read, it stays.
    """
    frozen = data is not None
    if data is None:
        data = solve(model, recipe, parts, batches, frozen=False)
    move = not _holds_rows(recipe)
    moved = place_num_token(model, data, move_row=move and not reads_it)
    if parts.eos_token_id is not None:
        ends = batches(parts.sample[:NOISE_ROWS])
        moved |= place_end_token(model, parts.eos_token_id, data, ends, move_row=move)
    if moved and model.config.tie_word_embeddings and _reads_moved(model, parts):
        solve(model, recipe, parts, batches, frozen=frozen)
    return moved


def _reads_moved(model: CausalLM, parts: Rows) -> bool:
    """Whether a row has <NUM> or the end, as of a chat's turns, before a number that is learned."""
    num, moved = model.config.num_token_id, {model.config.num_token_id, parts.eos_token_id}

    def reads(row: Encoded) -> bool:
        learned = [place for place, label in enumerate(row.labels) if label == num]
        return bool(learned) and any(token in moved for token in row.input_ids[: learned[-1]])

    return any(map(reads, parts.sample))


def _holds_rows(recipe: TrainingRecipe) -> bool:
    """Whether W is to stay as it is."""
    return any(
        part in name for part in recipe.hold for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
