"""Many splits of one table: features of a frozen backbone do not depend on the split.

They are computed once; the number head is solved and calibrated on each split by the functions that training
calls for `method: heads`.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from causal_qwen.calibration import NumberData, rounding_errors, set_value_space, solve_numbers
from causal_qwen.calibration.number_head import NOISE_ROWS
from causal_qwen.conversion import load_model
from causal_qwen.data import BadRows, Collator, Encoder, Reading, batches_of
from causal_qwen.intervals import read_numbers
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.training.features import cache_features
from peers import LEVELS, Predictions

BATCH = 8


class Frozen:
    """A table's sentences as the base reads them.

    Args:
        base: What `load_model` takes; its heads are changed by every `solve`.
        rows: All rows of the table.
        template: Sentence of a row.
        target: The field that is its number.
    """

    @torch.no_grad()
    def __init__(self, base: str, rows: Sequence[dict[str, Any]], template: str, target: str) -> None:
        self.model, converted = load_model(base)
        processor = CausalQwen2Processor(converted.tokenizer, numbers="written")
        encoded = list(Encoder(processor, Reading(template, target)).rows(rows, BadRows()))
        collator = Collator.of(processor)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "features"
            cached = cache_features(self.model, encoded, collator, batch_size=BATCH, file=file)
            self.data = cached.number_data(self.model)
        self.seconds_per_row = (time.perf_counter() - start) / len(encoded)
        start = time.perf_counter()
        # What rounding does to features has little to do with which rows they are of.
        self.errors = rounding_errors(self.model, batches_of(encoded[: 2 * NOISE_ROWS], collator, BATCH))
        self.seconds_of_errors = time.perf_counter() - start

    @torch.no_grad()
    def solve(self, train: Sequence[int], test: Sequence[int]) -> Predictions:
        """The head of some rows, asked about others; by index."""
        start = time.perf_counter()
        part, asked, model = self._part(train), self._part(test).U, self.model
        set_value_space(model, "log", part.values)
        solve_numbers(model, part, errors=self.errors, left_out=True)
        seconds = time.perf_counter() - start + len(train) * self.seconds_per_row + self.seconds_of_errors
        ends, median = {}, np.zeros(0)
        for level in LEVELS:
            numbers = read_numbers(model.action, model.config, asked, model.action.numbers(asked), level)
            median, lower, upper = (column.numpy() for column in numbers[:3])
            ends[level] = (lower, upper)
        return Predictions(median, ends, seconds)

    def _part(self, chosen: Sequence[int]) -> NumberData:
        """Some rows, each of which has one number."""
        data, index = self.data, list(chosen)
        columns = {name: getattr(data, name)[index] for name in ("U", "U0", "values", "rows")}
        return dataclasses.replace(data, **columns)
