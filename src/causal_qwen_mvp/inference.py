"""The known inference names: an engine over generate(), and validators that return plain dictionaries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from causal_qwen.cauchy import magnitude
from causal_qwen.heads import exact
from causal_qwen_mvp.models import CauchyMath, CausalMVPOutput, CausalQwenMVPForCausalLM

__all__ = ["CausalInferenceEngine", "InferenceValidator"]

CLOSE = 1e-4


class CausalInferenceEngine:
    """generate() under its older names. Modern: ``model.generate``, or `causal_qwen.Inferencer`.

    Args:
        model: In evaluation mode.
    """

    def __init__(self, model: CausalQwenMVPForCausalLM) -> None:
        self.model = model
        self.config = model.config

    def __call__(self, input_ids: Tensor, **options: Any) -> CausalMVPOutput:
        """One forward pass; options as for the model."""
        outputs: CausalMVPOutput = self.model(input_ids, **options)
        return outputs

    def inference(self, input_ids: Tensor, mode: str = "standard", **options: Any) -> CausalMVPOutput:
        """As `CausalQwenMVPForCausalLM.inference`."""
        return self.model.inference(input_ids, mode, **options)

    def generate_next_token(
        self,
        input_ids: Tensor,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 0.9,
        **options: Any,
    ) -> Tensor:
        """The next token of each row, (B, 1); arguments as for `generate`."""
        return self.generate(input_ids, 1, do_sample, temperature, top_k, top_p, **options)[:, -1:]

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 20,
        do_sample: bool = True,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 0.9,
        **options: Any,
    ) -> Tensor:
        """The texts (B, T') with at most ``max_new_tokens`` more; it samples unless told otherwise.

        Args:
            input_ids: (B, T).
            max_new_tokens: How many tokens to add.
            do_sample: Whether noise moves the cause. Without it, only the temperature 0 changes anything.
            temperature: T of the noise.
            top_k: Sampled tokens are among the k best; 0 allows all.
            top_p: And in the nucleus of this probability.
            **options: As for the model's generate(), such as inference_mode, individual or eos_token_id.
        """
        if do_sample:
            options |= {"top_k": top_k, "top_p": top_p}
        options = {"attention_mask": torch.ones_like(input_ids)} | options
        ids: Tensor = self.model.generate(
            input_ids, max_new_tokens=max_new_tokens, do_sample=do_sample, temperature=temperature, **options
        )
        return ids


class InferenceValidator:
    """What noise does to this model, and how far it is from its base.

    Modern: the scripts in scripts/, and `causal_qwen.conversion.measure_parity`.

    Args:
        model: In evaluation mode.
    """

    def __init__(self, model: CausalQwenMVPForCausalLM) -> None:
        self.model = model
        self.engine = CausalInferenceEngine(model)

    @torch.no_grad()
    def validate_v2_principles(self, input_ids: Tensor, temperature: float = 1.0) -> dict[str, Any]:
        """Without sampling noise widens the scale of S; with sampling it moves its location.

        Returns:
            ``base_representations`` with loc_U and scale_U; ``deterministic_mode`` and ``sampling_mode`` with
            loc_S and scale_S each; ``position_difference`` and ``scale_difference``, scalar tensors: the
            median |Δ| between the modes; and ``principles``, the name of each principle with whether it
            holds.
        """
        model = self.model
        still = model(input_ids, do_sample=False)
        moved = model(input_ids, do_sample=True, temperature=temperature)
        heated = model(input_ids, do_sample=False, temperature=3.0 * temperature)
        frozen = model(input_ids, do_sample=True, temperature=0.0)
        weight = exact(model.lm_head.weight)
        # |W|·|b_noise| and the read-out of its mean: by how much noise widens each score.
        noise = exact(magnitude(model.action.b_noise))
        widening = CauchyMath.cauchy_linear_stable_scale(noise, weight)
        widening = widening + exact(magnitude(model.action.balance)) * noise.mean()
        location = CauchyMath.cauchy_linear_stable_loc(still.loc_U, weight, exact(model.action.bias))
        position = (still.loc_S - moved.loc_S).abs().median()
        scale = (still.scale_S - moved.scale_S).abs().median()
        has_noise = bool(noise.any()) and temperature > 0
        return {
            "base_representations": {"loc_U": still.loc_U, "scale_U": still.scale_U},
            "deterministic_mode": {"loc_S": still.loc_S, "scale_S": still.scale_S},
            "sampling_mode": {"loc_S": moved.loc_S, "scale_S": moved.scale_S},
            "position_difference": position,
            "scale_difference": scale,
            "principles": {
                "sampling moves the location": bool(position > 0) == has_noise,
                "noise widens the scale without sampling": _close(moved.scale_S + widening, still.scale_S),
                "temperature is inert without sampling": torch.equal(heated.loc_S, still.loc_S)
                and torch.equal(heated.scale_S, still.scale_S),
                "temperature 0 is noise-free": _close(frozen.loc_S, still.loc_S),
                "the location is linear in the cause": _close(
                    location + still.loc_U0[..., None], still.loc_S
                ),
            },
        }

    @torch.no_grad()
    def compare_with_qwen(
        self, input_ids: Tensor, qwen_model: Qwen2ForCausalLM | None = None
    ) -> dict[str, Any] | None:
        """How far the model is from its base on these tokens; None without a base.

        Returns:
            ``logits_difference``, the largest |Δlogit| over the tokens that both have;
            ``prediction_match_rate``, the share of rows whose deterministic choice is the base's favourite;
            ``causal_prediction`` and ``qwen_prediction``, one token per row.
        """
        if qwen_model is None:
            return None
        model = self.model
        expected = exact(qwen_model(input_ids).logits)  # (B, T, V)
        outputs = model(input_ids, output_logits=True, output_scores=True)
        shared = torch.arange(min(expected.shape[-1], outputs.logits.shape[-1]), device=expected.device)
        if model.config.num_token_id is not None:
            shared = shared[shared != model.config.num_token_id]
        difference = (exact(outputs.logits)[..., shared] - expected[..., shared]).abs().max()
        chosen = model.action.z_scores(outputs.S[:, -1]).argmax(-1)  # (B,)
        favourite = expected[:, -1].argmax(-1)  # (B,)
        return {
            "logits_difference": difference.item(),
            "prediction_match_rate": (chosen == favourite).double().mean().item(),
            "causal_prediction": chosen.tolist(),
            "qwen_prediction": favourite.tolist(),
        }


def _close(values: Tensor, expected: Tensor) -> bool:
    """Whether the largest difference is below 1e-4 of the largest magnitude."""
    return bool((values - expected).abs().max() <= CLOSE * expected.abs().max())
