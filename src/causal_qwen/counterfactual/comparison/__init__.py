"""Comparison on the same individuals: two prompts, two models or two settings.

`plan` says who answers what, `speakers` and `gumbel` make the texts, `scores` and `judge` score them,
`statistics`, `sequential` and `ranking` say what follows, `run` does all of it, and `report` shows it.
"""

from causal_qwen.counterfactual.comparison.judge import Judge
from causal_qwen.counterfactual.comparison.plan import Comparison, Outline, Pair, Side
from causal_qwen.counterfactual.comparison.ranking import Ranking, rank
from causal_qwen.counterfactual.comparison.run import ComparisonResult, compare, conclude, write_pairs
from causal_qwen.counterfactual.comparison.scores import Said, Score, score_of
from causal_qwen.counterfactual.comparison.speakers import PlainSpeaker, Talker
from causal_qwen.counterfactual.comparison.statistics import Estimate, Tally

__all__ = [
    "Comparison",
    "ComparisonResult",
    "Estimate",
    "Judge",
    "Outline",
    "Pair",
    "PlainSpeaker",
    "Ranking",
    "Said",
    "Score",
    "Side",
    "Talker",
    "Tally",
    "compare",
    "conclude",
    "rank",
    "score_of",
    "write_pairs",
]
