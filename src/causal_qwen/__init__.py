"""CausalQwen: causal language models on Qwen2 and Hugging Face transformers.

``import causal_qwen`` is cheap: names are resolved on first use, and the model, its configuration and its
processor are announced to transformers' Auto classes as soon as those are imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from causal_qwen import registration

__version__ = "0.1.0"

_HOMES = {
    "causal_qwen.cauchy": ("Cauchy",),
    "causal_qwen.configuration_causal_qwen2": ("CausalQwen2Config",),
    "causal_qwen.conversion": ("convert",),
    "causal_qwen.generation": ("CausalGenerateOutput", "InferenceEngine", "NumberStreamer"),
    "causal_qwen.generation.abduction": ("Abduction", "AbductionError", "abduct"),
    "causal_qwen.generation.counterfactual": ("Counterfactual", "counterfactual"),
    "causal_qwen.individual": ("Individual",),
    "causal_qwen.modeling_causal_qwen2": ("CausalLMOutput", "CausalQwen2ForCausalLM", "NumberPrediction"),
    "causal_qwen.numbers": ("Number", "format_number", "scan"),
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
    from causal_qwen.generation import CausalGenerateOutput, InferenceEngine, NumberStreamer
    from causal_qwen.generation.abduction import Abduction, AbductionError, abduct
    from causal_qwen.generation.counterfactual import Counterfactual, counterfactual
    from causal_qwen.individual import Individual
    from causal_qwen.modeling_causal_qwen2 import CausalLMOutput, CausalQwen2ForCausalLM, NumberPrediction
    from causal_qwen.numbers import Number, format_number, scan
    from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
    from causal_qwen.value_space import ValueSpace


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'causal_qwen' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


registration.follow_auto_classes()
