"""The known model over `causal_qwen.CausalQwen2ForCausalLM`; configuration and networks are beside it.

Nothing is computed here that `causal_qwen` does not compute.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM
from transformers.utils import can_return_tuple

from causal_qwen.conversion import load_base
from causal_qwen.generation import Inferencer
from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
from causal_qwen.outputs import CausalLMOutput
from causal_qwen_mvp.config import CausalQwen2Config
from causal_qwen_mvp.networks import AbductionNetwork, ActionNetwork, CauchyMath, OvRClassifier

__all__ = [
    "AbductionNetwork",
    "ActionNetwork",
    "CauchyMath",
    "CausalMVPOutput",
    "CausalQwen2Config",
    "CausalQwenMVPForCausalLM",
    "OvRClassifier",
]

logger = logging.getLogger(__name__)


@dataclass
class CausalMVPOutput(CausalLMOutput):
    """`causal_qwen.CausalLMOutput`, and the decision.

    Args:
        loss: As in `CausalLMOutput`.
        next_token_ids: (B, 1) the chosen token, from `CausalQwenMVPForCausalLM.inference`.
    """

    next_token_ids: Tensor | None = None


class CausalQwenMVPForCausalLM(CausalQwen2ForCausalLM):
    """`causal_qwen.CausalQwen2ForCausalLM` with the older methods.

    The parameters have the same names, so checkpoints of one load into the other; generate() is the same.
    """

    config_class = CausalQwen2Config

    @classmethod
    def from_modern(cls, model: CausalQwen2ForCausalLM, **config_kwargs) -> "CausalQwenMVPForCausalLM":
        """``model`` under its older name, in evaluation mode; ``config_kwargs`` change its configuration."""
        named, _ = cls.from_pretrained(
            None,
            config=CausalQwen2Config(**(model.config.to_dict() | config_kwargs)),
            state_dict=model.state_dict(),
            dtype=model.dtype,
            output_loading_info=True,
        )
        named.generation_config = model.generation_config
        return named.to(model.device).eval()

    @property
    def abduction_network(self) -> AbductionNetwork:
        """This model's abduction. Modern: ``model.abduction``."""
        return AbductionNetwork(self.config, network=self.abduction)

    @property
    def action_network(self) -> ActionNetwork:
        """This model's action, without U₀ unless it is given. Modern: ``model.action``."""
        return ActionNetwork(self.config, network=self.action, lm_head=self.lm_head)

    @property
    def ovr_classifier(self) -> OvRClassifier:
        """This model's thresholds. Modern: ``model.action.threshold``."""
        return OvRClassifier(self.config, threshold=self.action.threshold)

    @can_return_tuple
    @wraps(CausalQwen2ForCausalLM.forward, assigned=())  # generate() and Trainer read its signature
    def forward(
        self,
        *args,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool | None = None,
        output_scores: bool | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        **kwargs,
    ) -> CausalMVPOutput:
        """As `CausalQwen2ForCausalLM.forward`, with loc_S and scale_S by default.

        Arguments that are not explained here are the modern model's.

        Args:
            *args: From ``input_ids`` on.
            logits_to_keep: 0 is all positions.
            output_logits: None decides as the modern model does.
            output_scores: Whether loc_S and scale_S are returned; None does, except in a training pass with
                labels and in the steps of generate().
            do_sample: Whether noise moves the location of the cause behind S, instead of widening it. The
                loss is a function of the law and never samples.
            temperature: T of that noise.
            **kwargs: All others.
        """
        outputs = super().forward(
            *args, logits_to_keep=logits_to_keep, output_logits=output_logits, return_dict=True, **kwargs
        )
        if output_scores is None:
            narrowed = not isinstance(logits_to_keep, int) or logits_to_keep != 0 or output_logits is not None
            output_scores = not narrowed and not (outputs.loss is not None and self.training)
        result = CausalMVPOutput(**outputs)
        if output_scores:
            result.loc_S, result.scale_S = self.action_network(
                outputs.loc_U, outputs.scale_U, do_sample, temperature, common=outputs.U0
            )
        return result

    @torch.no_grad()
    def inference(self, input_ids: Tensor, mode: str | None = "standard", **options) -> CausalMVPOutput:
        """The laws at every position, and the decision for the next token in ``next_token_ids`` (B, 1).

        Modern: `causal_qwen.Inferencer`, whose `Inference` also has the number and its interval.

        Args:
            input_ids: (B, T).
            mode: "standard", "causal" or "compatible"; None is the configuration's.
            **options: As for `Inferencer`: do_sample, temperature, individual.
        """
        outputs = self(input_ids, output_logits=mode == "compatible", output_scores=True)
        outputs.next_token_ids = Inferencer(self, mode, **options).infer(input_ids).tokens[:, None]
        return outputs

    def generate_step_by_step(  # type: ignore[override]
        self,
        input_ids: Tensor,
        max_length: int = 50,
        mode: str = "standard",
        *,
        max_new_tokens: int | None = None,
        **options,
    ) -> Tensor:
        """The text (B, T') grown token by token until it is ``max_length`` long, or every row has ended.

        Modern: generate(), or `Inferencer.steps`, which hands out the laws behind each token.

        Args:
            input_ids: (B, T).
            max_length: Longest text, prompt included.
            mode: "standard", "causal" or "compatible".
            max_new_tokens: How many tokens to add, instead of ``max_length``.
            **options: As for `Inferencer`.
        """
        room = max_length - input_ids.shape[1] if max_new_tokens is None else max_new_tokens
        ends = self.generation_config.eos_token_id
        ends = torch.as_tensor([] if ends is None else ends, device=input_ids.device).flatten()
        ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for inference in Inferencer(self, mode, **options).steps(input_ids, max(room, 0)):
            input_ids = torch.cat([input_ids, inference.tokens[:, None]], dim=1)
            ended |= torch.isin(inference.tokens, ends)
            if ended.all():
                break
        return input_ids

    def training_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of a batch, with its graph; ``labels`` default to ``input_ids``.

        Modern: ``model(**batch).loss``, or transformers' Trainer.
        """
        return self(**({"labels": batch["input_ids"]} | dict(batch))).loss

    @torch.no_grad()
    def debug_forward_pass(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """loc_S and scale_S, with the median of every stage logged: logging.basicConfig(level="INFO") shows.

        Modern: ``model(input_ids, output_scores=True)``.
        """
        outputs = self(input_ids, output_scores=True, output_hidden_states=True)
        stages = {"hidden_states": outputs.hidden_states[-1]}
        stages |= {name: outputs[name] for name in ("loc_U", "scale_U", "loc_S", "scale_S")}
        for name, values in stages.items():
            logger.info("%s %s: median %.4g", name, tuple(values.shape), values.float().median().item())
        return outputs.loc_S, outputs.scale_S

    @torch.no_grad()
    def copy_pretrained_weights(self, qwen_model_path_or_model: str | Path | Qwen2ForCausalLM) -> None:
        """Copy backbone and vocabulary from a Qwen2 model of the same sizes, or from where one is.

        Modern: `causal_qwen.convert`, which also adds <NUM> and calibrates the heads.

        Raises:
            ValueError: If the sizes differ.
        """
        source = qwen_model_path_or_model
        if isinstance(source, str | Path):
            source = load_base(source).model
        mine, theirs = self.state_dict(), source.state_dict()
        for name, tensor in theirs.items():
            if name not in mine or mine[name].shape != tensor.shape:
                own = tuple(mine[name].shape) if name in mine else "missing"
                raise ValueError(
                    f"{name} is {own} here and {tuple(tensor.shape)} there; "
                    "make the configuration with CausalQwen2Config(**base.config.to_dict()), or use `convert`"
                )
            mine[name].copy_(tensor)
