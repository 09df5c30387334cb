"""Generation: steppers, decisions and the one loop that drives them; a mixin that knows no concrete model.

Only ``mixin``, ``outputs`` and ``streamers`` import transformers.
"""

from typing import TYPE_CHECKING

from causal_qwen.lazy import lazy_names

if TYPE_CHECKING:
    from causal_qwen.generation.decisions import Choice, Decision, InferenceMode
    from causal_qwen.generation.inferencer import Inferencer
    from causal_qwen.generation.loop import Inference, Texts, steps
    from causal_qwen.generation.mixin import CausalGenerationMixin
    from causal_qwen.generation.native import NativeFeatures, NativeStepper
    from causal_qwen.generation.outputs import CausalGenerateOutput
    from causal_qwen.generation.readout import ReadOut
    from causal_qwen.generation.stepping import Causes, Stepper, TransformersStepper
    from causal_qwen.generation.streamers import NumberStreamer

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "causal_qwen.generation.decisions": ("Choice", "Decision", "InferenceMode"),
        "causal_qwen.generation.inferencer": ("Inferencer",),
        "causal_qwen.generation.loop": ("Inference", "Texts", "steps"),
        "causal_qwen.generation.mixin": ("CausalGenerationMixin",),
        "causal_qwen.generation.native": ("NativeFeatures", "NativeStepper"),
        "causal_qwen.generation.outputs": ("CausalGenerateOutput",),
        "causal_qwen.generation.readout": ("ReadOut",),
        "causal_qwen.generation.stepping": ("Causes", "Stepper", "TransformersStepper"),
        "causal_qwen.generation.streamers": ("NumberStreamer",),
    },
)
