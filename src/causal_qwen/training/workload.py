"""What a recipe's rows amount to: the largest batch, and how many steps of how many tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from causal_qwen.losses import IGNORE_INDEX
from causal_qwen.training.estimate import Batch
from causal_qwen.training.preparation import Rows
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.sampling import StreamedRows

__all__ = ["Workload", "assumed_workload", "measured_workload"]


@dataclass(frozen=True)
class Workload:
    """What there is to compute.

    Args:
        batch: The largest one.
        rows: To train on; None where nobody knows.
        tokens: Of a row, on average.
        learned: Positions of a row that have a label, on average.
    """

    batch: Batch
    rows: int | None
    tokens: float
    learned: float

    def steps(self, recipe: TrainingRecipe, processes: int) -> int | None:
        """Optimizer steps of the whole run; None where nobody knows."""
        if recipe.method == "heads" and not self.batch.learned:
            return 0
        if recipe.max_steps is not None:
            return recipe.max_steps
        if self.rows is None:
            return None
        batches = math.ceil(math.ceil(self.rows / recipe.batch_size) / processes)
        return math.ceil(recipe.epochs * max(math.ceil(batches / recipe.accumulation), 1))


def measured_workload(parts: Rows, recipe: TrainingRecipe) -> Workload:
    """Of rows that have been read."""
    rows = parts.sample if isinstance(parts.train, StreamedRows) else parts.train
    lengths = [len(row) for row in rows]
    learned = [sum(label != IGNORE_INDEX for label in row.labels) for row in rows]
    count = min(recipe.batch_size, len(rows))
    # Where all that is learned is solved for, no step is taken.
    is_solved = recipe.method == "heads" and not parts.words
    batch = Batch(
        rows=count,
        length=max(lengths),
        learned=0 if is_solved else count * max(learned),
        padded=recipe.packing or len(set(lengths)) > 1,
        numbers=parts.numbers["train"] > 0,
    )
    known = None if isinstance(parts.train, StreamedRows) else len(rows)
    return Workload(batch, known, sum(lengths) / len(rows), sum(learned) / len(rows))


def assumed_workload(recipe: TrainingRecipe, rows: int | None = None) -> Workload:
    """Of ``rows`` that nobody has read: each is as long as it may be, and all of it is learned."""
    length = recipe.max_length
    batch = Batch(recipe.batch_size, length, recipe.batch_size * length, padded=recipe.packing)
    return Workload(batch, rows, length, length)
