"""Generation: steppers, decisions and the one loop that drives them; a mixin that knows no concrete model."""

from causal_qwen.generation.decisions import Choice, Decision, InferenceMode
from causal_qwen.generation.decoding import CausalGenerateOutput
from causal_qwen.generation.inferencer import Inferencer
from causal_qwen.generation.loop import Inference, Texts, steps
from causal_qwen.generation.mixin import CausalGenerationMixin
from causal_qwen.generation.native import NativeFeatures, NativeStepper
from causal_qwen.generation.readout import ReadOut
from causal_qwen.generation.stepping import Causes, Stepper, TransformersStepper
from causal_qwen.generation.streaming import NumberStreamer

__all__ = [
    "CausalGenerateOutput",
    "CausalGenerationMixin",
    "Causes",
    "Choice",
    "Decision",
    "Inference",
    "InferenceMode",
    "Inferencer",
    "NativeFeatures",
    "NativeStepper",
    "NumberStreamer",
    "ReadOut",
    "Stepper",
    "Texts",
    "TransformersStepper",
    "steps",
]
