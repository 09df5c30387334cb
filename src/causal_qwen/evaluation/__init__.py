"""Evaluation: metrics, runs over data, predictions for rows, honest intervals."""

from causal_qwen.evaluation.conformal import fit_conformal
from causal_qwen.evaluation.predict import Prediction, predict
from causal_qwen.evaluation.run import Evaluation, evaluate, run_evaluation

__all__ = ["Evaluation", "Prediction", "evaluate", "fit_conformal", "predict", "run_evaluation"]
