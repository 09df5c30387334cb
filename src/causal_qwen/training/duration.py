"""How long a run will compute: the arithmetic of its matrix products over the rate of a device.

It is a lower bound: what is no matrix product, reading, evaluating and waiting for other processes come on
top.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from causal_qwen.causal_lm import CausalLM
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.workload import Workload

__all__ = ["Arithmetic", "estimate_arithmetic", "measured_rate"]

MATRIX_SIZE = 2048  # of the products by which a rate is measured: 17 GFLOP each
MEASURED_SECONDS = 1.0


@dataclass(frozen=True)
class Arithmetic:
    """Floating-point operations on one device.

    Args:
        once: Before the first step: features of all rows, where the backbone stays.
        per_step: Of each step.
        steps: How many; None where nobody knows.
    """

    once: float
    per_step: float
    steps: int | None

    @property
    def total(self) -> float | None:
        """Of the whole run."""
        return None if self.steps is None else self.once + self.steps * self.per_step


def estimate_arithmetic(
    model: CausalLM, recipe: TrainingRecipe, workload: Workload, *, processes: int = 1
) -> Arithmetic:
    """2 operations per weight and token forth, and for each gradient on the way back as many again.

    A matrix that learns has two gradients, its own and that of what it reads: 6·weights·tokens in all. One
    that is held has the second alone, and checkpointing goes forth once more. Attention has two products of
    B·T²·heads·head_dim, One-vs-Rest six of N·V·D (of the drawn words alone, where negatives are sampled),
    cross-entropy three.

    Args:
        model: A skeleton, before it is prepared.
        recipe: How it is trained.
        workload: On what.
        processes: How many train together, each on batches of its own.
    """
    config: Any = model.config
    backbone: Any = model.model
    weights = sum(p.numel() for layer in backbone.layers for p in layer.parameters() if p.ndim == 2)
    weights += sum(p.numel() for p in model.abduction.parameters() if p.ndim == 2)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_pair = 4 * config.num_attention_heads * head * config.num_hidden_layers  # of two positions, forth

    rows = recipe.batch_size * recipe.accumulation
    tokens, learned = workload.tokens, workload.learned
    forth = 2.0 * weights * tokens + per_pair * tokens**2  # of a row
    loss = _loss_operations(config, recipe, learned * recipe.batch_size) / recipe.batch_size
    steps = workload.steps(recipe, processes)
    if recipe.method == "heads":
        return Arithmetic((workload.rows or 0) * forth, rows * loss, steps)
    passes = 3 if recipe.method == "full" else 2
    passes += 1 if recipe.gradient_checkpointing else 0
    attention = per_pair * tokens**2 if recipe.method == "lora" else 0.0  # has two gradients in any case
    return Arithmetic(0.0, rows * (passes * forth + attention + loss), steps)


def _loss_operations(config: Any, recipe: TrainingRecipe, positions: float) -> float:
    """Of all positions of a batch."""
    vocabulary: int = config.vocab_size
    width: int = config.causal_size
    product = 2.0 * positions * vocabulary * width
    if recipe.ovr_rivals is not None:
        one_vs_rest = product + 6.0 * positions * (1 + recipe.ovr_rivals) * width
    elif recipe.loss_impl == "sampled":
        words = min(recipe.num_negatives + positions, vocabulary)
        one_vs_rest = 6 * product * words / vocabulary
    else:
        one_vs_rest = 6 * product
    return one_vs_rest + (3 * product if recipe.softmax_loss_weight else 0.0)


def measured_rate(device: str, *, dtype: torch.dtype = torch.float32) -> float:
    """Operations per second of matrix products on a device of this machine, in about a second."""
    matrix = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype, device=device)
    product = matrix @ matrix  # what is loaded at the first use does not count
    _wait(device)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < MEASURED_SECONDS:
        torch.mm(matrix, matrix, out=product)
        _wait(device)
        count += 1
    return count * 2.0 * MATRIX_SIZE**3 / (time.perf_counter() - start)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
