"""Evaluation: metrics, runs over data, predictions for rows, honest intervals."""

from causal_qwen.evaluation.conformal import fit_conformal
from causal_qwen.evaluation.run import Evaluation, evaluate, run_evaluation

__all__ = ["Evaluation", "evaluate", "fit_conformal", "run_evaluation"]
