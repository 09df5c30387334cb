"""Counterfactuals: who would have said this, and what would the same individual have said otherwise?"""

from causal_qwen.counterfactual.abduction import Abduction, abduct
from causal_qwen.counterfactual.cohort import individuals
from causal_qwen.counterfactual.comparison import ComparisonResult, Side, compare
from causal_qwen.counterfactual.evidence import AbductionError
from causal_qwen.counterfactual.interventions import Counterfactual, counterfactual
from causal_qwen.counterfactual.numbers import (
    CounterfactualNumbers,
    counterfactual_number,
    counterfactual_numbers,
)

__all__ = [
    "Abduction",
    "AbductionError",
    "ComparisonResult",
    "Counterfactual",
    "CounterfactualNumbers",
    "Side",
    "abduct",
    "compare",
    "counterfactual",
    "counterfactual_number",
    "counterfactual_numbers",
    "individuals",
]
