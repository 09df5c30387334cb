"""The names that users of the first CausalQwen know, over the one implementation in `causal_qwen`.

Everything here is an adapter: older signatures, no mathematics of its own. New code says `causal_qwen`; each
docstring names the modern equivalent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from causal_qwen import __version__
from causal_qwen.conversion import convert
from causal_qwen_mvp.inference import CausalInferenceEngine, InferenceValidator
from causal_qwen_mvp.models import (
    AbductionNetwork,
    ActionNetwork,
    CauchyMath,
    CausalMVPOutput,
    CausalQwen2Config,
    CausalQwenMVPForCausalLM,
    OvRClassifier,
)
from causal_qwen_mvp.training import CausalTrainer, LossComputer, TrainingValidator

__all__ = [
    "AbductionNetwork",
    "ActionNetwork",
    "CauchyMath",
    "CausalInferenceEngine",
    "CausalMVPOutput",
    "CausalQwen2Config",
    "CausalQwenMVPForCausalLM",
    "CausalTrainer",
    "InferenceValidator",
    "LossComputer",
    "OvRClassifier",
    "TrainingValidator",
    "__version__",
    "create_mvp_model",
    "get_model_info",
]

# What can be changed on a finished model; the other fields shape or initialise it.
CHANGEABLE = (
    "inference_mode",
    "noise_gain",
    "density_floor",
    "persistence",
    "gate_alpha",
    "gate_gradient",
    "reg_loss_weight",
    "classification_loss_weight",
    "softmax_loss_weight",
    "ovr_gradient_bound",
    "ovr_rivals",
    "ovr_rival_scale",
    "loss_impl",
    "num_negatives",
)


def create_mvp_model(
    model_name_or_path: str | Path = "smollm2", **config_kwargs: Any
) -> CausalQwenMVPForCausalLM:
    """A base checkpoint as a causal model, calibrated. Modern: `causal_qwen.convert`, with its processor.

    Noise is untruncated, as in every configuration of this package, unless ``density_floor`` is given.

    Args:
        model_name_or_path: "smollm2" (embedded), a directory, a .gguf file or a hub id.
        **config_kwargs: Fields of the configuration to change, such as ``inference_mode`` or ``persistence``.

    Raises:
        ValueError: If a field shapes or initialises the model, so that changing it afterwards means nothing.
    """
    for name in config_kwargs:
        if name not in CHANGEABLE:
            raise ValueError(
                f"{name} cannot be changed after conversion (these can: {', '.join(CHANGEABLE)}); for "
                "start make CausalQwenMVPForCausalLM(CausalQwen2Config(...)) and copy_pretrained_weights"
            )
    model = convert(model_name_or_path).model
    return CausalQwenMVPForCausalLM.from_modern(model, **({"density_floor": 0.0} | config_kwargs))


def get_model_info(model: CausalQwenMVPForCausalLM | None = None) -> dict[str, Any]:
    """What this package is and, with a model, how large that is. Modern: ``causal-qwen info``.

    Returns:
        ``name``, ``version``, ``description``, ``features`` and ``inference_modes``; with a model also
        ``parameters``, ``causal_parameters``, ``hidden_size``, ``causal_size`` and ``vocab_size``.
    """
    info: dict[str, Any] = {
        "name": "CausalQwen",
        "version": __version__,
        "description": "Qwen2 checkpoints as causal language models",
        "features": [
            "a Qwen2ForCausalLM: the same checkpoints, the same generate()",
            "noise widens the scale of the cause, or moves its location when sampled",
            "One-vs-Rest probabilities in closed form",
            "numbers as numbers, with intervals",
        ],
        "inference_modes": ["standard", "causal", "compatible"],
    }
    if model is None:
        return info
    causal = [
        p for head in (model.abduction, model.action, model.numeric_embedding) for p in head.parameters()
    ]
    return info | {
        "parameters": model.num_parameters(),
        "causal_parameters": sum(parameter.numel() for parameter in causal),
        "hidden_size": model.config.hidden_size,
        "causal_size": model.config.causal_size,
        "vocab_size": model.config.vocab_size,
    }
