"""CausalQwen2ForCausalLM: a Qwen2 that infers the cause of what comes next, then acts.

Backbone, vocabulary matrix, caches, attention backends and generate() are Qwen2's own; this file states the
difference. It does not know how a model is converted or calibrated.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import transformers.initialization as init
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2ForCausalLM
from transformers.cache_utils import Cache
from transformers.generation.logits_process import (
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)
from transformers.modeling_outputs import ModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from causal_qwen.cauchy import Cauchy
from causal_qwen.configuration_causal_qwen2 import CausalQwen2Config
from causal_qwen.generation import Inference, InferenceEngine, NativeEngine, decode
from causal_qwen.generation.planning import Individuals, plan
from causal_qwen.heads import NUM_BIAS, AbductionNetwork, ActionNetwork, NumericEmbedding, exact
from causal_qwen.intervals import interval
from causal_qwen.losses import IGNORE_INDEX, number_gate, number_loss, ovr_loss
from causal_qwen.value_space import ValueSpace

__all__ = ["CausalLMOutput", "CausalQwen2ForCausalLM", "NumberPrediction"]


@dataclass
class CausalLMOutput(ModelOutput):
    """What one forward pass infers. K positions are kept (``logits_to_keep``; all T by default).

    Args:
        loss: Scalar, with labels: classification + λ·regression (+ softmax).
        cls_loss: Scalar One-vs-Rest part.
        reg_loss: Scalar gated number part.
        logits: (B, K, V) W loc_U + b; None in training with labels, unless asked for.
        loc_U: (B, K, D) location of the individual.
        scale_U: (B, K, D) scale of the individual.
        loc_U0: (B, K) location of the common cause.
        scale_U0: (B, K) scale of the common cause.
        loc_S: (B, K, V) location of the token scores, with ``output_scores=True``.
        scale_S: (B, K, V) scale of the token scores, with ``output_scores=True``.
        loc_Y: (B, K) location of the number in value space.
        scale_Y: (B, K) scale of the number in value space.
        past_key_values: Cache of keys and values.
        hidden_states: Backbone states, when asked for.
        attentions: Attention weights, when asked for.
    """

    loss: Tensor | None = None
    cls_loss: Tensor | None = None
    reg_loss: Tensor | None = None
    logits: Tensor | None = None
    loc_U: Tensor | None = None
    scale_U: Tensor | None = None
    loc_U0: Tensor | None = None
    scale_U0: Tensor | None = None
    loc_S: Tensor | None = None
    scale_S: Tensor | None = None
    loc_Y: Tensor | None = None
    scale_Y: Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def U(self) -> Cauchy:
        """The individual, (B, K, D)."""
        return Cauchy(self.loc_U, self.scale_U)

    @property
    def U0(self) -> Cauchy:
        """The common cause, (B, K)."""
        return Cauchy(self.loc_U0, self.scale_U0)

    @property
    def S(self) -> Cauchy:
        """The token scores, (B, K, V), with ``output_scores=True``."""
        return Cauchy(self.loc_S, self.scale_S)

    @property
    def Y(self) -> Cauchy:
        """The number in value space, (B, K)."""
        return Cauchy(self.loc_Y, self.scale_Y)


@dataclass(frozen=True)
class NumberPrediction:
    """The number that would come next, one per row, in float64.

    Args:
        median: (B,) point prediction.
        lower: (B,) lower end of the interval.
        upper: (B,) upper end of the interval.
        prob_num: (B,) P_<NUM>, that the next token is a number at all.
        level: Probability of the interval.
    """

    median: Tensor
    lower: Tensor
    upper: Tensor
    prob_num: Tensor
    level: float


class CausalQwen2ForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with abduction (z → U), action (U → S, Y) and numbers that are numbers.

    ``lm_head.weight`` is W, of shape (V, D): tied to the embedding where the base ties it, and never copied.
    """

    config_class = CausalQwen2Config
    config: CausalQwen2Config
    # The Cauchy law needs float32 whatever the backbone's dtype is.
    _keep_in_fp32_modules_strict = {"numeric_embedding", "abduction", "action"}  # noqa: RUF012

    def __init__(self, config: CausalQwen2Config):
        super().__init__(config)
        if config.causal_size != config.hidden_size:
            self.lm_head = nn.Linear(config.causal_size, config.vocab_size, bias=False)
        self.numeric_embedding = NumericEmbedding(
            config.hidden_size,
            encoding=config.numeric_encoding,
            learn_direction=config.learn_numeric_direction,
        )
        self.abduction = AbductionNetwork(
            config.hidden_size, config.causal_size, scale_activation=config.scale_activation
        )
        self.action = ActionNetwork(
            config.vocab_size, config.causal_size, learn_threshold=config.learn_threshold
        )
        # The parent's post_init ran before these modules existed; modules that it has initialised are left
        # alone.
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in transformers, which makes every loaded weight trainable: what the configuration holds stays
        held.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        model.numeric_embedding.direction.requires_grad_(model.config.learn_numeric_direction)
        model.action.threshold.requires_grad_(model.config.learn_threshold)
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Fill what a checkpoint did not bring. Children come first, so a head overrides what its Linear
        layers got.
        """
        config = self.config
        if isinstance(module, NumericEmbedding):
            module.reset_parameters(init)
        elif isinstance(module, AbductionNetwork):
            module.reset_parameters(init, gamma=config.gamma_init, strategy=config.abduction_init_strategy)
        elif isinstance(module, ActionNetwork):
            module.reset_parameters(
                init,
                b_noise=config.b_noise_init,
                threshold=config.ovr_threshold_init,
                jitter=config.ovr_threshold_jitter,
            )
        else:
            super()._init_weights(module)

    @property
    def value_space(self) -> ValueSpace:
        """Where this model's numbers live."""
        return ValueSpace(self.config.value_space, self.config.value_center, self.config.value_spread)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        numeric_values: Tensor | None = None,
        output_logits: bool | None = None,
        output_scores: bool = False,
        hide_num_token: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutput:
        """Infer U for each position, and from it the token scores and the number.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: As for Qwen2.
            position_ids: As for Qwen2.
            past_key_values: As for Qwen2.
            inputs_embeds: (B, T, H) instead of ``input_ids``; `embed` makes them from ids and values.
            labels: (B, T) as ``input_ids``, −100 ignored; shifted here.
            use_cache: As for Qwen2.
            logits_to_keep: How many last positions (or which) the outputs cover; 0 is all.
            numeric_values: (B, T) value at each <NUM>, ignored elsewhere.
            output_logits: Whether to compute ``logits``; by default unless training with labels.
            output_scores: Whether to return loc_S and scale_S, (B, K, V) each.
            hide_num_token: Whether ``logits`` leave out a <NUM> row that conversion added, to be the base's;
                then they are all that is computed, unless anything else is asked for.
            **kwargs: Passed to the backbone, except what the loss reads: ``labels_values``, (B, T) values
                that belong to ``labels`` (``numeric_values`` by default), ``shift_labels`` and
                ``shift_labels_values`` (already shifted), ``num_items_in_batch`` and ``num_numbers_in_batch``
                (what the two sums are divided by).
        """
        # Not a named argument: Trainer takes every argument with "label" in its name for a label that must be
        # there.
        labels_values = kwargs.pop("labels_values", None)
        shift_labels = kwargs.pop("shift_labels", None)
        shift_values = kwargs.pop("shift_labels_values", None)
        divisors = {name: kwargs.pop(name, None) for name in ("num_items_in_batch", "num_numbers_in_batch")}
        has_labels = labels is not None or shift_labels is not None
        if numeric_values is not None:
            if input_ids is None:
                raise ValueError(
                    "numeric_values go with input_ids; for inputs_embeds use model.embed(ids, values)"
                )
            input_ids, inputs_embeds = None, self.embed(input_ids, numeric_values)

        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        # A loss needs every position; without one, the heads only see the positions that are asked for.
        hidden_states = outputs.last_hidden_state if has_labels else outputs.last_hidden_state[:, kept]
        if hide_num_token and output_logits is None and not (has_labels or output_scores):
            # A step of transformers' own loops, which read nothing but logits.
            return CausalLMOutput(
                logits=self.visible_logits(self.abduction.location(hidden_states), hide_num_token=True),
                past_key_values=outputs.past_key_values,
                hidden_states=outputs.hidden_states,
                attentions=outputs.attentions,
            )
        U, U0 = self.abduction(hidden_states)  # (B, K, D), (B, K)
        U_noisy = self.action.exogenous(U)
        Y = self.action.numbers(U_noisy)  # (B, K)

        loss = cls_loss = reg_loss = None
        if has_labels:
            if shift_labels is None:
                shift_labels = shifted(labels, IGNORE_INDEX)
                values = numeric_values if labels_values is None else labels_values
                shift_values = None if values is None else shifted(values, 0.0)
            loss, cls_loss, reg_loss = self.causal_loss(
                U_noisy, U0, Y, shift_labels, shift_values, **divisors
            )
            U, U_noisy, U0, Y = (law[:, kept] for law in (U, U_noisy, U0, Y))

        if output_logits is None:
            output_logits = not (has_labels and self.training)
        logits = self.visible_logits(U.loc, hide_num_token=hide_num_token) if output_logits else None
        S = self.action.scores(U_noisy, U0, self.lm_head.weight) if output_scores else None
        return CausalLMOutput(
            loss=loss,
            cls_loss=cls_loss,
            reg_loss=reg_loss,
            logits=logits,
            loc_U=U.loc,
            scale_U=U.scale,
            loc_U0=U0.loc,
            scale_U0=U0.scale,
            loc_S=S.loc if S else None,
            scale_S=S.scale if S else None,
            loc_Y=Y.loc,
            scale_Y=Y.scale,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def embed(self, input_ids: Tensor, numeric_values: Tensor) -> Tensor:
        """embed(x) + φ(v), (B, T, H).

        Raises:
            ValueError: If this model has no <NUM> token, or the shapes differ.
        """
        if self.config.num_token_id is None:
            raise ValueError(
                "numeric_values given, but config.num_token_id is None: `convert` the base to get a <NUM> row"
            )
        if input_ids.shape != numeric_values.shape:
            raise ValueError(
                f"numeric_values has shape {tuple(numeric_values.shape)}, "
                f"input_ids {tuple(input_ids.shape)}; they are aligned, one value per token"
            )
        embeds = self.get_input_embeddings()(input_ids)  # (B, T, H)
        return self.numeric_embedding(embeds, numeric_values, input_ids == self.config.num_token_id)

    def token_logits(self, loc_U: Tensor) -> Tensor:
        """W loc_U + b, in the dtype of W, so that at conversion it is what the base computes, bit for bit."""
        logits = self.lm_head(loc_U.to(self.lm_head.weight.dtype))
        bias = self.action.bias.to(logits.dtype)
        return logits + bias if torch.is_grad_enabled() else logits.add_(bias)

    def visible_logits(self, loc_U: Tensor, *, hide_num_token: bool) -> Tensor:
        """`token_logits`, without a <NUM> row that conversion added if it is to be hidden."""
        logits = self.token_logits(loc_U)
        if hide_num_token and self.config.num_token_id == logits.shape[-1] - 1:
            # Not only can it not be chosen: it must not take part in the random draws of a sampler either.
            return logits[..., :-1]
        return logits

    def prob_num(self, U: Cauchy, U0: Cauchy) -> Tensor:
        """P_<NUM> = P(S_<NUM> > C_<NUM>) for U' (..., D), from one row of W."""
        row = slice(self.config.num_token_id, self.config.num_token_id + 1)
        return (
            self.action.scores(U, U0, self.lm_head.weight, row)
            .sf(exact(self.action.threshold[row]))
            .squeeze(-1)
        )

    def causal_loss(
        self,
        U: Cauchy,
        U0: Cauchy,
        Y: Cauchy,
        labels: Tensor,
        values: Tensor | None,
        *,
        num_items_in_batch: Tensor | int | None = None,
        num_numbers_in_batch: Tensor | int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """L = L_cls + λ·L_reg (+ cross-entropy), L_cls and L_reg, each reduced on its own.

        Args:
            U: U', (B, T, D).
            U0: (B, T).
            Y: (B, T).
            labels: (B, T), shifted: the next token of each position, or −100.
            values: (B, T), shifted with the labels; None when no label is <NUM>.
            num_items_in_batch: Valid labels of all accumulated batches; None for this batch alone.
            num_numbers_in_batch: <NUM> labels of all accumulated batches. None with ``num_items_in_batch``
                weighs this batch's mean by its share of the valid labels.
        """
        config, action = self.config, self.action
        valid = labels != IGNORE_INDEX
        labels, U, U0, Y = labels[valid], U[valid], U0[valid], Y[valid]  # (N,), (N, D), (N,), (N,)
        share = 1.0 if num_items_in_batch is None else labels.numel() / num_items_in_batch
        num_items = max(labels.numel(), 1) if num_items_in_batch is None else num_items_in_batch
        cls_loss = ovr_loss(
            U,
            U0,
            self.lm_head.weight,
            labels,
            bias=action.bias,
            balance=action.balance,
            threshold=action.threshold,
            num_items=num_items,
            impl=config.loss_impl,
            num_negatives=config.num_negatives,
            num_token_id=config.num_token_id,
        )

        reg_loss = self.regression_loss(
            U, U0, Y, labels, None if values is None else values[valid], num_numbers_in_batch
        )
        if num_numbers_in_batch is None:
            reg_loss = reg_loss * share

        loss = config.classification_loss_weight * cls_loss + config.reg_loss_weight * reg_loss
        if config.softmax_loss_weight:
            logits = exact(self.token_logits(U.loc))  # (N, V)
            softmax_loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items
            loss = loss + config.softmax_loss_weight * softmax_loss
        return loss, cls_loss, reg_loss

    def regression_loss(
        self,
        U: Cauchy,
        U0: Cauchy,
        Y: Cauchy,
        labels: Tensor,
        values: Tensor | None,
        num_items: Tensor | int | None,
    ) -> Tensor:
        """L_reg over the valid positions (N,) whose label is <NUM>; 0, still connected to the heads, where
        none is.
        """
        config = self.config
        if config.num_token_id is None:
            return 0.0 * (Y.loc.sum() + Y.scale.sum())
        is_num = labels == config.num_token_id
        if values is None:
            if is_num.any():
                raise ValueError(
                    "labels contain <NUM>, but neither numeric_values nor labels_values were given"
                )
            values = torch.zeros_like(Y.loc)
        target = self.value_space.encode(values[is_num])  # (M,)
        gate = number_gate(
            self.prob_num(U[is_num], U0[is_num]), alpha=config.gate_alpha, gradient=config.gate_gradient
        )
        return number_loss(Y[is_num], target, gate, num_items=num_items)

    @torch.no_grad()
    def predict_number(
        self, batch: Mapping[str, Tensor], level: float = 0.9, *, raw: bool = False
    ) -> NumberPrediction:
        """The number that would come next in each row: g⁻¹(loc_Y) and g⁻¹(loc_Y ± multiple·scale_Y).

        Args:
            batch: ``input_ids`` and, where there are any, ``attention_mask`` (padding on either side) and
                ``numeric_values``.
            level: Probability of the interval, in (0, 1).
            raw: Whether the interval is the Cauchy law's own, instead of the one that training has checked
                against numbers set aside (``config.conformal_scores``; without them it is the law's anyway).
        """
        if self.config.num_token_id is None:
            raise ValueError("this model has no <NUM> token; `convert` its base first")
        outputs = self(**batch, output_logits=False)
        length = outputs.loc_Y.shape[1]
        last = torch.full((outputs.loc_Y.shape[0],), length - 1, device=outputs.loc_Y.device)
        if batch.get("attention_mask") is not None:
            last = length - 1 - batch["attention_mask"].flip(-1).argmax(-1).to(last.device)
        row = torch.arange(len(last), device=last.device)
        U = self.action.exogenous(Cauchy(outputs.loc_U[row, last], outputs.scale_U[row, last]))
        U0 = Cauchy(outputs.loc_U0[row, last], outputs.scale_U0[row, last])
        Y = Cauchy(outputs.loc_Y[row, last], outputs.scale_Y[row, last])
        lower, upper = interval(Y, level, None if raw else self.config.conformal_scores)
        decode = self.value_space.decode
        return NumberPrediction(decode(Y.loc), decode(lower), decode(upper), self.prob_num(U, U0), level)

    @property
    def writes_numbers(self) -> bool:
        """Whether <NUM> can be chosen: it exists, and training has moved its bias from where conversion
        put it.
        """
        num_token_id = self.config.num_token_id
        return num_token_id is not None and self.action.bias[num_token_id].item() != NUM_BIAS

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        inference_mode: str | None = None,
        individual: Individuals | None = None,
        noise_gain: float | None = None,
        density_floor: float | None = None,
        persistence: float | None = None,
        interval_level: float = 0.9,
        raw_intervals: bool = False,
        normalisation: str = "softmax",
        suppress_unused: bool = False,
        engine: NativeEngine | None = None,
        **kwargs,
    ):
        """transformers' generate(), deciding by causes.

        Everything that generate() takes works in every mode, but for beams and assistants, which need
        ``inference_mode="compatible"``. The temperature scales noise, except in "compatible".

        Args:
            inputs: Token ids (B, T).
            generation_config: May also carry the settings below.
            inference_mode: "standard" (do_sample=False: the law of U decides; True: noise moves the cause),
                "causal" (one concrete individual decides) or "compatible" (what Qwen does). The
                configuration's by default.
            individual: Who is sampled: an `Individual`, a seed, or one per row. New ones by default; the
                output with ``return_dict_in_generate=True`` says who.
            noise_gain: κ.
            density_floor: Truncation of the noise.
            persistence: ρ for individuals that have none of their own.
            interval_level: Probability of the interval of each number.
            raw_intervals: Whether intervals are the Cauchy law's own, as in `predict_number`.
            normalisation: In "compatible", "softmax" or "ovr": draw from P_k/ΣP.
            suppress_unused: Whether vocabulary rows that no token uses are excluded.
            engine: Runs the forward passes on the CPU, fast; it decides as the model does.
            **kwargs: As for transformers.

        Returns:
            Ids (B, T'), or with ``return_dict_in_generate=True`` a `CausalGenerateOutput`.
        """
        if kwargs.get("custom_generate") is not None:  # somebody's own loop decides by its own rules
            return super().generate(inputs, generation_config, **kwargs)
        given = {"noise_gain": noise_gain, "density_floor": density_floor, "persistence": persistence}
        decision = plan(
            self,
            inputs,
            generation_config,
            kwargs,
            settings=given | {"inference_mode": inference_mode},
            individual=individual,
            interval_level=interval_level,
            raw_intervals=raw_intervals,
            normalisation=normalisation,
            suppress_unused=suppress_unused,
            own_loop=engine is not None,
        )
        if decision is not None:
            # transformers hands neither to a loop that is not its own.
            loop = {"streamer": kwargs.get("streamer"), "synced_gpus": bool(kwargs.get("synced_gpus"))}
            loop["engine"] = engine
            kwargs["custom_generate"] = functools.partial(decode, decision=decision, **loop)
        elif engine is not None:
            raise ValueError("beams and assistants run in transformers' own loops: leave out engine=")
        return super().generate(inputs, generation_config, **kwargs)

    def inference(self, input_ids: Tensor, mode: str | None = None, **options) -> Inference:
        """The laws and the decision for the token after ``input_ids``; options as for `InferenceEngine`."""
        return InferenceEngine(self, mode, **options).infer(input_ids)

    def generate_step_by_step(
        self, input_ids: Tensor, max_new_tokens: int = 20, mode: str | None = None, **options
    ) -> Iterator[Inference]:
        """Token after token, each with its laws; options as for `InferenceEngine`."""
        return InferenceEngine(self, mode, **options).steps(input_ids, max_new_tokens)

    def prepare_inputs_for_generation(self, input_ids, *args, numeric_values=None, **kwargs):
        """As Qwen2's, with the values of the tokens that are fed; tokens beyond the given values have
        none.
        """
        model_inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        fed = model_inputs.get("input_ids")
        if numeric_values is not None and fed is not None:
            values = nn.functional.pad(numeric_values, (0, input_ids.shape[1] - numeric_values.shape[1]))
            model_inputs["numeric_values"] = values[:, values.shape[1] - fed.shape[1] :]
        return model_inputs

    def _get_logits_processor(self, generation_config, *args, model_kwargs=None, **kwargs):
        """As Qwen2's; where an added <NUM> is hidden, a processor that calls the model or knows V sees the
        base's vocabulary.
        """
        processors = super()._get_logits_processor(
            generation_config, *args, model_kwargs=model_kwargs, **kwargs
        )
        num_token_id, watermark = self.config.num_token_id, generation_config.watermarking_config
        if not (model_kwargs or {}).get("hide_num_token") or num_token_id != self.config.vocab_size - 1:
            return processors
        for index, processor in enumerate(processors):
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                processor.model = functools.partial(self.__call__, hide_num_token=True)
            elif isinstance(processor, WatermarkLogitsProcessor) and watermark is not None:
                processors[index] = watermark.construct_processor(num_token_id, self.device)
        return processors

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """As Qwen2's, with b, balance and C following W."""
        num_token_id = self.config.num_token_id
        if new_num_tokens is not None and num_token_id is not None and new_num_tokens <= num_token_id:
            raise ValueError(
                f"{new_num_tokens} rows would cut off <NUM>, id {num_token_id}; "
                f"keep at least {num_token_id + 1}"
            )
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.action.resize(self.lm_head.weight)
        return embeddings


def shifted(tensor: Tensor, fill: float) -> Tensor:
    """Each position gets its successor's entry, the last one ``fill``."""
    return nn.functional.pad(tensor, (0, 1), value=fill)[..., 1:]


AutoModelForCausalLM.register(CausalQwen2Config, CausalQwen2ForCausalLM, exist_ok=True)
