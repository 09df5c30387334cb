"""Training: from a table or a text to a calibrated model."""

from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.run import TrainingResult, train

__all__ = ["TrainingRecipe", "TrainingResult", "train"]
