"""Counterfactuals: who would have said this, and what would the same individual have said otherwise?"""

from causal_qwen.counterfactual.abduction import Abduction, abduct
from causal_qwen.counterfactual.comparison import ComparisonResult, Side, compare
from causal_qwen.counterfactual.evidence import AbductionError
from causal_qwen.counterfactual.interventions import Counterfactual, counterfactual

__all__ = [
    "Abduction",
    "AbductionError",
    "ComparisonResult",
    "Counterfactual",
    "Side",
    "abduct",
    "compare",
    "counterfactual",
]
