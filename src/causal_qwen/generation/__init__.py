"""Generation: decision rules, the decoding loop, counterfactuals."""

from causal_qwen.generation.abduction import Abduction, AbductionError, abduct
from causal_qwen.generation.counterfactual import Counterfactual, counterfactual
from causal_qwen.generation.decisions import Choice, Decision, InferenceMode
from causal_qwen.generation.decoding import CausalGenerateOutput, decode
from causal_qwen.generation.engine import Inference, InferenceEngine
from causal_qwen.generation.native import NativeEngine
from causal_qwen.generation.readout import ReadOut
from causal_qwen.generation.streaming import NumberStreamer

__all__ = [
    "Abduction",
    "AbductionError",
    "CausalGenerateOutput",
    "Choice",
    "Counterfactual",
    "Decision",
    "Inference",
    "InferenceEngine",
    "InferenceMode",
    "NativeEngine",
    "NumberStreamer",
    "ReadOut",
    "abduct",
    "counterfactual",
    "decode",
]
