"""The causal heads on a backbone of vLLM's: the difference between Qwen2 there and CausalQwen2 there.

A mixin before one of vLLM's ForCausalLM classes. It gives hidden states the laws (U, U₀) and a `ReadOut` to
act on them, and reads the values of numbers into embeddings. It does not know how a token is decided.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import maybe_prefix

from causal_qwen.conversion import load_processor
from causal_qwen.counterfactual.comparison.gumbel import Keys, text_ends, token_keys
from causal_qwen.generation.readout import ReadOut
from causal_qwen.generation.stepping import Causes
from causal_qwen.heads import NUM_BIAS, AbductionNetwork, ActionNetwork, NumericEmbedding, exact
from causal_qwen.kernels.products import Matrix
from causal_qwen.serving.vllm.requests import Rows
from causal_qwen.serving.vllm.sharding import ShardedReadOut, gathered
from causal_qwen.value_space import ValueSpace

__all__ = ["CausalHeads"]

OURS = ("numeric_embedding", "abduction", "action")
PER_TOKEN = ("bias", "balance", "threshold")  # (V,) of the action, sharded as W is


class CausalHeads:
    """Goes before a ForCausalLM of vLLM whose backbone is ``model`` and whose W is ``lm_head.weight``.

    Attributes:
        rows: The requests of the batch, which `CausalRequests` sets before each forward pass.
        features: Hidden states (N, H) whose logits were asked for last: the next decision is about them.
        untouched: These logits, (N, V), where vLLM's own processors change some before we see them.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        config = self.config = vllm_config.model_config.hf_config
        if config.causal_size != config.hidden_size:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.causal_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
        shard = self.lm_head.shard_indices
        self.first_token, self.last_token = shard.org_vocab_start_index, shard.org_vocab_end_index
        self.numeric_embedding = NumericEmbedding(config.hidden_size, encoding=config.numeric_encoding)
        self.abduction = AbductionNetwork(
            config.hidden_size, config.causal_size, scale_activation=config.scale_activation
        )
        self.action = ActionNetwork(
            self.last_token - self.first_token,
            config.causal_size,
            folds=config.number_folds,
            support_rank=config.number_support,
        )
        self.rows = Rows()
        self.features: Tensor | None = None
        self.untouched: Tensor | None = None
        self._readout: ReadOut | None = None
        self._source = str(vllm_config.model_config.model)
        self._prefix_caching = bool(vllm_config.cache_config.enable_prefix_caching)
        # Where `CausalRequests`, which vLLM makes from the same configuration, finds us.
        vllm_config.compilation_config.static_forward_context[Rows.HEADS] = self

    @property
    def value_space(self) -> ValueSpace:
        """Where this model's numbers live."""
        return ValueSpace(self.config.value_space, self.config.value_center, self.config.value_spread)

    @property
    def readout(self) -> ReadOut:
        """W and what belongs to it, as decisions ask for them."""
        if self._readout is None:
            weight = self.lm_head.weight
            if not weight.is_floating_point():
                raise ValueError(f"W is {weight.dtype}; serve this model without quantizing lm_head")
            rows = Matrix(weight.data[: self.last_token - self.first_token])
            heads: Any = self  # a CausalModel but for transformers' machinery
            self._readout = ShardedReadOut(heads, rows) if self.lm_head.tp_size > 1 else ReadOut(heads, rows)
        return self._readout

    @functools.cached_property
    def token_keys(self) -> Keys:
        """Keys of the vocabulary's rows, by which Gumbel noise knows tokens; the first request reads them."""
        ends = GenerationConfig.from_pretrained(self._source).eos_token_id
        rows, tokenizer = int(self.config.vocab_size), load_processor(self._source).tokenizer
        return token_keys(tokenizer, rows, text_ends(ends))

    def causes(self, hidden_states: Tensor) -> Causes:
        """U (N, D) and U₀ (N,)."""
        return Causes(*self.abduction(hidden_states))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Any:
        """As the base's. Embeddings are always made here, so that a compiled backbone is one graph."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)  # type: ignore[attr-defined]
            metadata = get_forward_context().attn_metadata
            if self.rows.has_numbers and isinstance(metadata, dict):
                bounds = next(iter(metadata.values())).query_start_loc.tolist()
                values = self.rows.values(input_ids, positions, bounds)
                is_number = input_ids == self.config.num_token_id
                inputs_embeds = self.numeric_embedding(inputs_embeds, values, is_number)
        return self.model(None, positions, intermediate_tensors, inputs_embeds)  # type: ignore[attr-defined]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """W loc_U + b, (N, V) float32; unset where all rows are decided without."""
        self.features = hidden_states
        if self.rows.decide_alone:
            return torch.empty(
                len(hidden_states), self.config.vocab_size, dtype=torch.float32, device=hidden_states.device
            )
        logits = self.logits(hidden_states)
        self.untouched = logits.clone() if self.rows.adjusted else None
        return logits

    def logits(self, hidden_states: Tensor) -> Tensor:
        """W loc_U + b, (N, V) float32, by vLLM's own product."""
        loc_U = self.causes(hidden_states).U.loc
        head = self.logits_processor(self.lm_head, loc_U.to(self.lm_head.weight.dtype))  # type: ignore[attr-defined]
        logits = exact(head) + self._full_bias
        num_token_id = self.config.num_token_id
        if num_token_id is not None and not self.writes_numbers:
            logits[:, num_token_id] = -torch.inf  # what the base does not have takes no part
        return logits

    @property
    def writes_numbers(self) -> bool:
        """Whether <NUM> can be chosen: it exists, and training has moved its bias."""
        return self._writes_numbers

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Our heads here, the backbone and W as the base does.

        Raises:
            ValueError: If a weight is missing, or has another shape than the configuration says; or numbers
                would meet a cache that cannot tell them apart.
        """
        tensors = {
            name: tensor
            for head in OURS
            for name, tensor in getattr(self, head).state_dict(prefix=f"{head}.").items()
        }
        missing, base = set(tensors), []

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, loaded in weights:
                if name.partition(".")[0] not in OURS:
                    yield name, loaded
                    continue
                self._load(name, tensors.get(name), loaded)
                missing.discard(name)

        base = super().load_weights(others())  # type: ignore[misc]
        if missing:
            raise ValueError(
                f"the checkpoint has no {', '.join(sorted(missing)[:3])}; `convert` the base again"
            )
        self._full_bias = exact(self.action.bias.data)
        if self.lm_head.tp_size > 1:
            self._full_bias = gathered(self._full_bias, self)
        num_token_id = self.config.num_token_id
        self._writes_numbers = num_token_id is not None and self._full_bias[num_token_id].item() != NUM_BIAS
        if self._writes_numbers and self._prefix_caching:
            raise ValueError(
                "this model writes numbers, and prefix caching knows blocks by their ids alone; "
                "add --no-enable-prefix-caching"
            )
        return set(base) | set(tensors)

    def _load(self, name: str, own: Tensor | None, loaded: Tensor) -> None:
        if own is None:
            raise ValueError(f"the checkpoint has {name}, which the configuration does not name")
        head, _, rest = name.partition(".")
        if head == "action" and rest in PER_TOKEN:
            loaded = loaded[self.first_token : self.last_token]
        if own.shape != loaded.shape:
            raise ValueError(
                f"{name} has shape {tuple(loaded.shape)}; the configuration says {tuple(own.shape)}"
            )
        own.data.copy_(loaded)
