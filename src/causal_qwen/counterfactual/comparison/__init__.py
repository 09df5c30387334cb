"""Comparison on the same individuals: two prompts, two models or two settings.

`run` plans and pairs, `speakers` and `gumbel` make the texts, `scores` and `judge` score them, `statistics`
and `sequential` say what follows, `report` shows it.
"""

from causal_qwen.counterfactual.comparison.judge import Judge
from causal_qwen.counterfactual.comparison.run import Comparison, ComparisonResult, Pair, Side, compare
from causal_qwen.counterfactual.comparison.scores import Said, Score, score_of
from causal_qwen.counterfactual.comparison.speakers import PlainSpeaker
from causal_qwen.counterfactual.comparison.statistics import Estimate, Tally

__all__ = [
    "Comparison",
    "ComparisonResult",
    "Estimate",
    "Judge",
    "Pair",
    "PlainSpeaker",
    "Said",
    "Score",
    "Side",
    "Tally",
    "compare",
    "score_of",
]
