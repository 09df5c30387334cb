"""Generation: decision rules, the decoding loop, counterfactuals."""

from causal_qwen.generation.decisions import Choice, Decision, InferenceMode
from causal_qwen.generation.decoding import CausalGenerateOutput, decode
from causal_qwen.generation.engine import Inference, InferenceEngine
from causal_qwen.generation.streaming import NumberStreamer

__all__ = [
    "CausalGenerateOutput",
    "Choice",
    "Decision",
    "Inference",
    "InferenceEngine",
    "InferenceMode",
    "NumberStreamer",
    "decode",
]
