"""The causal language model: a backbone that infers the cause of what comes next, then acts.

Backbone, vocabulary matrix, caches and attention are those of the base's class in transformers; `CausalLM` is
mixed into it and states the difference. It knows no family of models, nor how one is converted or calibrated.
"""

import torch
import transformers.initialization as init
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from causal_qwen.auto_module import SavedWithModule
from causal_qwen.cauchy import Cauchy
from causal_qwen.causal_reading import CausalReading
from causal_qwen.generation.mixin import CausalGenerationMixin
from causal_qwen.heads import (
    AbductionNetwork,
    ActionNetwork,
    NumericEmbedding,
    exact,
    make_heads,
    without_num_row,
)
from causal_qwen.losses import IGNORE_INDEX, number_gate, number_loss, ovr_loss
from causal_qwen.outputs import CausalLMOutput

__all__ = ["CausalLM", "shifted"]


class CausalLM(SavedWithModule, CausalReading, CausalGenerationMixin):
    """Abduction (z → U), action (U → S, Y) and numbers as numbers; goes before a ForCausalLM of transformers.

    ``lm_head.weight`` is W, of shape (V, D): tied to the embedding where the base ties it, and never copied.
    """

    # The Cauchy law needs float32 whatever the backbone's dtype is.
    _keep_in_fp32_modules_strict = {"numeric_embedding", "abduction", "action"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        if config.causal_size != config.hidden_size:
            self.lm_head = nn.Linear(config.causal_size, config.vocab_size, bias=False)
        self.numeric_embedding, self.abduction, self.action = make_heads(config)
        # The parent's post_init ran before these modules existed; what it has initialised is left alone.
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
            hide_num_token: Whether ``logits`` leave out a <NUM> row that conversion added, to be the base's.
            **kwargs: Passed to the backbone, except what the loss reads: ``labels_values``, (B, T) values
                that belong to ``labels`` (``numeric_values`` by default), ``shift_labels`` and
                ``shift_labels_values`` (already shifted), ``num_items_in_batch`` and ``num_numbers_in_batch``
                (what the two sums are divided by).
        """
        # Not a named argument: Trainer takes every argument with "label" in its name for a required label.
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
        logits = self.token_logits(U.loc) if output_logits else None
        if hide_num_token and logits is not None:
            logits = without_num_row(logits, self.config.num_token_id)
        S = None
        if output_scores:
            impl = "reference" if torch.is_grad_enabled() else "fused"
            S = self.action.scores(U_noisy, U0, self.lm_head.weight, impl=impl)
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
        U_words, U0_words = U, U0
        if not config.number_token_gradient and config.num_token_id is not None:
            is_num = labels == config.num_token_id
            U_words, U0_words = U.held(is_num[:, None]), U0.held(is_num)
        cls_loss = ovr_loss(
            U_words,
            U0_words,
            self.lm_head.weight,
            labels,
            bias=action.bias,
            balance=action.balance,
            threshold=action.threshold,
            num_items=num_items,
            gradient_bound=config.ovr_gradient_bound,
            rivals=config.ovr_rivals,
            rival_scale=config.ovr_rival_scale,
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
            logits = exact(self.token_logits(U_words.loc))  # (N, V)
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

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """As the base's, with b, balance and C following W."""
        num_token_id = self.config.num_token_id
        if new_num_tokens is not None and num_token_id is not None and new_num_tokens <= num_token_id:
            least = num_token_id + 1
            raise ValueError(
                f"{new_num_tokens} rows would cut off <NUM>, id {least - 1}; keep at least {least}"
            )
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.action.resize(self.lm_head.weight)
        return embeddings


def shifted(tensor: Tensor, fill: float) -> Tensor:
    """Each position gets its successor's entry, the last one ``fill``."""
    return nn.functional.pad(tensor, (0, 1), value=fill)[..., 1:]
