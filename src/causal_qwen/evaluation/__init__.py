"""Evaluation: metrics, runs over data, predictions for rows. It writes nothing into a model."""

from typing import TYPE_CHECKING

from causal_qwen.evaluation.predict import Prediction, predict  # the function, not the module of its name
from causal_qwen.lazy import lazy_names

if TYPE_CHECKING:
    from causal_qwen.evaluation.run import Evaluation, evaluate, run_evaluation

__all__ = ["Evaluation", "Prediction", "evaluate", "predict", "run_evaluation"]

__getattr__, __dir__ = lazy_names(
    __name__, {"causal_qwen.evaluation.run": ("Evaluation", "evaluate", "run_evaluation")}
)
