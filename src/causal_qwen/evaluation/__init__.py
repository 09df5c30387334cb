"""Evaluation: metrics, runs over data, predictions for rows. It writes nothing into a model."""

from causal_qwen.evaluation.predict import Prediction, predict
from causal_qwen.evaluation.run import Evaluation, evaluate, run_evaluation

__all__ = ["Evaluation", "Prediction", "evaluate", "predict", "run_evaluation"]
