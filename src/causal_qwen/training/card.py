"""The model card: what was trained, on what, how well, and how to ask it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from causal_qwen.configuration import CausalFields
from causal_qwen.data import BadRows
from causal_qwen.evaluation.markdown import code, words
from causal_qwen.intervals import interval_kind
from causal_qwen.training.recipe import TrainingRecipe

__all__ = ["model_card"]

SHOWN = {
    "eval/accuracy": "next token chosen",
    "eval/num_f1": "F1 of expecting a number",
    "eval/reg_mdae": "median absolute error of numbers",
    "eval/coverage_90": "coverage of 90% intervals",
    "eval/width_90_median": "their median width",
    "eval/ovr_nll": "nats per token",
    "dist/ovr_prob_sum_median": "median ΣP",
    "train/steps": "steps",
    "train/seconds": "seconds",
    "train/rows": "training rows",
    "train/numbers": "numbers learned from",
}


READ = {
    "written": "Digits in prompts are read as the base reads them, white space at their end is not read, and "
    "the numbers that the model writes are values",
    "value": "Numbers in prompts and those that the model writes are values",
}


def model_card(
    recipe: TrainingRecipe,
    metrics: Mapping[str, float],
    config: CausalFields,
    bad_rows: BadRows,
    *,
    numbers: str,
) -> str:
    """README.md of a trained model whose processor has this ``numbers``."""
    rows = [
        f"| {name} | {text} | {metrics[name]:.4g} |"
        for name, text in SHOWN.items()
        if name in metrics and math.isfinite(metrics[name])
    ]
    few = "" if config.conformal_scores else ": there were too few numbers to calibrate on"
    intervals = f"{interval_kind(config)}{few}"
    skipped = f"\n{bad_rows.count} rows were skipped." if bad_rows.count else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [causal-qwen]
---

# {words(recipe.run_name or "A CausalQwen model")}

Trained from {code(recipe.model)} with method `{recipe.method}`, learning rate {recipe.learning_rate:g}
(heads {recipe.heads_learning_rate:g}), seed {recipe.seed}; the whole recipe is in `recipe.yaml`.{skipped}

| metric | meaning | value |
| --- | --- | --- |
{chr(10).join(rows)}

Metrics are of the validation rows, deterministic. Numbers live in {config.value_space} value space, center
{config.value_center:.6g}, spread {config.value_spread:.6g}. Intervals are {intervals}.
{READ[numbers]} (`numbers="{numbers}"`).

```python
from causal_qwen import CausalQwen2Processor
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIRECTORY").eval()
processor = CausalQwen2Processor.from_pretrained("DIRECTORY")
print(model.predict_number(processor("…", return_tensors="pt")))
```
"""
