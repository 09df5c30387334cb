"""CausalQwen: causal language models on Qwen2, Qwen3 and Hugging Face transformers.

Importing it registers our classes with transformers' Auto classes. Other names are resolved on first use.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "causal_qwen.cauchy": ("Cauchy",),
    "causal_qwen.configuration_causal_qwen2": ("CausalQwen2Config",),
    "causal_qwen.conversion": ("convert",),
    "causal_qwen.counterfactual": (
        "Abduction",
        "AbductionError",
        "ComparisonResult",
        "Counterfactual",
        "Side",
        "abduct",
        "compare",
        "counterfactual",
    ),
    "causal_qwen.decoder": ("Engine",),
    "causal_qwen.generation": ("CausalGenerateOutput", "Inferencer", "NumberStreamer"),
    "causal_qwen.individual": ("Individual",),
    "causal_qwen.modeling_causal_qwen2": ("CausalQwen2ForCausalLM",),
    "causal_qwen.modeling_causal_qwen3": ("CausalQwen3Config", "CausalQwen3ForCausalLM"),
    "causal_qwen.numbers": ("Number", "format_number", "scan"),
    "causal_qwen.outputs": ("CausalLMOutput", "NumberPrediction"),
    "causal_qwen.processing_causal_qwen2": ("CausalQwen2Processor",),
    "causal_qwen.value_space": ("ValueSpace",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "__version__",
    *sorted(_HOME_OF),
]

if TYPE_CHECKING:
    from causal_qwen.cauchy import Cauchy
    from causal_qwen.configuration_causal_qwen2 import CausalQwen2Config
    from causal_qwen.conversion import convert
    from causal_qwen.counterfactual import (
        Abduction,
        AbductionError,
        ComparisonResult,
        Counterfactual,
        Side,
        abduct,
        compare,
        counterfactual,
    )
    from causal_qwen.decoder import Engine
    from causal_qwen.generation import CausalGenerateOutput, Inferencer, NumberStreamer
    from causal_qwen.individual import Individual
    from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
    from causal_qwen.modeling_causal_qwen3 import CausalQwen3Config, CausalQwen3ForCausalLM
    from causal_qwen.numbers import Number, format_number, scan
    from causal_qwen.outputs import CausalLMOutput, NumberPrediction
    from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
    from causal_qwen.value_space import ValueSpace


def __getattr__(name: str) -> Any:
    if name == "InferenceEngine":  # its name in 0.1
        warnings.warn("InferenceEngine is called Inferencer now", DeprecationWarning, stacklevel=2)
        name = "Inferencer"
    if name not in _HOME_OF:
        raise AttributeError(f"module 'causal_qwen' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# The command line imports late, so that it answers at once: the models register when it needs them.
if "causal_qwen_command" not in sys.modules:
    from causal_qwen import modeling_causal_qwen2, modeling_causal_qwen3
    from causal_qwen.counterfactual import counterfactual  # the function, not the package of the same name
