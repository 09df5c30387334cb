"""A causal model on our own decoder: features by the `Engine`, causes by the model's own abduction.

generate(engine=...) keeps its processors, stopping criteria, numbers and streaming, evaluation its metrics
and intervals; only the forward pass is another. This module does not know how a decision is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy, magnitude
from causal_qwen.context import check_context
from causal_qwen.decoder.cache import KVCache
from causal_qwen.decoder.engine import Engine
from causal_qwen.generation.protocol import CausalHeads
from causal_qwen.generation.readout import ReadOut
from causal_qwen.generation.stepping import Causes
from causal_qwen.heads import EXPONENT_BOUND, exact
from causal_qwen.kernels.native import NativeAbduction, runs_native

__all__ = ["NativeCauses", "NativeFeatures", "NativeStepper"]


class NativeFeatures:
    """Features z by an `Engine`, of tokens and of the numbers among them.

    Args:
        model: Whose heads act; the engine was made from it.
        engine: Its backbone and W, in any precision. Later changes of the model's weights are not seen.

    Raises:
        ValueError: If the engine was made from another model.
    """

    def __init__(self, model: CausalHeads, engine: Engine) -> None:
        sizes = [(c.hidden_size, c.num_hidden_layers, c.vocab_size) for c in (model.config, engine.config)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the engine has (hidden size, layers, vocabulary) {sizes[1]}, the model {sizes[0]}; "
                "make it with Engine.from_model(model)"
            )
        self.model, self.engine = model, engine

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        numeric_values: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """(B, T, H) of new tokens (B, T); padding on either side, and behind a cache on the left."""
        embeddings = self.embed(input_ids, numeric_values)
        return self.engine.hidden(input_ids, attention_mask, cache, embeddings=embeddings)

    def embed(self, input_ids: Tensor, numeric_values: Tensor | None) -> Tensor:
        """Tokens (B, T) with the numbers among them read in, (B, T, H)."""
        embeddings = self.engine.embed(input_ids)
        if numeric_values is None:
            return embeddings
        is_number = input_ids == self.model.config.num_token_id
        read: Tensor = self.model.numeric_embedding(embeddings, numeric_values, is_number)
        return read


class NativeCauses:
    """Causes of features: the model's own abduction, in native code where there is any.

    Args:
        model: Whose abduction it is.
    """

    @torch.no_grad()
    def __init__(self, model: CausalHeads) -> None:
        self._abduction = model.abduction
        self._scale_U0 = exact(magnitude(model.abduction.common_scale))
        maps, bias = model.abduction.stacked()
        self._native = None
        if runs_native(maps, None):
            activation = model.abduction.scale_activation
            self._native = NativeAbduction(maps, bias, activation, EXPONENT_BOUND)

    def __call__(self, features: Tensor) -> Causes:
        """(N, H) → U (N, D) and U₀ (N,)."""
        if self._native is None:
            return Causes(*self._abduction(features))
        loc_U, scale_U, loc_U0 = self._native(features)
        return Causes(Cauchy(loc_U, scale_U), Cauchy(loc_U0, self._scale_U0.expand_as(loc_U0)))

    def each(self, features: Tensor) -> list[Causes]:
        """Those of each row, (1, H) → U (1, D) and U₀ (1,), as if it came alone."""
        if self._native is None:
            return [self(row[None]) for row in features]
        U, U0 = self(features)
        return [Causes(U[row : row + 1], U0[row : row + 1]) for row in range(len(features))]


def _is_one(rows: Tensor | None) -> bool:
    """Whether all rows are the same."""
    return rows is None or bool((rows == rows[:1]).all())


class NativeStepper:
    """A causal model whose backbone runs in an `Engine`; its heads are the model's own modules.

    Args:
        model: As for `NativeFeatures`.
        engine: As for `NativeFeatures`.
        attention_mask: (B, T), 0 at padding, which is on the left; None where there is none.
        max_length: Most tokens of a row; the last one needs no slot.

    Raises:
        ValueError: If the engine was made from another model; in `prefill`, if ``max_length`` does not fit
            the context, which the engine cannot leave.
    """

    @torch.no_grad()
    def __init__(
        self, model: CausalHeads, engine: Engine, attention_mask: Tensor | None, *, max_length: int
    ) -> None:
        self.features = NativeFeatures(model, engine)
        self.model, self.engine = model, engine
        self.readout = ReadOut(model, engine.weights.head)
        self._mask, self._max_length = attention_mask, max_length
        self._causes = NativeCauses(model)

    def prefill(self, input_ids: Tensor, numeric_values: Tensor | None) -> Causes:
        """As in `Stepper`."""
        rows, length = input_ids.shape
        new_tokens = max(self._max_length - length, 1)
        check_context(self.engine.config.max_position_embeddings, length, new_tokens)
        self._cache = self.engine.new_cache(rows, length + new_tokens - 1)
        if rows > 1 and _is_one(input_ids) and _is_one(self._mask) and _is_one(numeric_values):
            return self._prefill_once(input_ids, numeric_values)
        return self._read(input_ids, self._mask, numeric_values)

    def _prefill_once(self, input_ids: Tensor, numeric_values: Tensor | None) -> Causes:
        """One prompt for all rows, as when many individuals answer it: it is read once."""
        rows, cache = len(input_ids), self._cache
        self._cache = self.engine.new_cache(1, input_ids.shape[1])
        mask, values = (None if given is None else given[:1] for given in (self._mask, numeric_values))
        U, U0 = self._read(input_ids[:1], mask, values)
        cache.repeat(self._cache)
        self._cache = cache
        spread = [law.expand(rows, *law.shape[1:]).contiguous() for law in (U.loc, U.scale, U0.loc, U0.scale)]
        return Causes(Cauchy(*spread[:2]), Cauchy(*spread[2:]))

    def step(self, tokens: Tensor, numeric_values: Tensor | None, ended: Tensor | None = None) -> Causes:
        """As in `Stepper`; in native code, rows that have ended are passed over."""
        values = None if numeric_values is None else numeric_values[:, None]
        running = [] if ended is None else [row for row, end in enumerate(ended.tolist()) if not end]
        if len(running) == len(tokens) or not self.engine.reads_some(len(running)):
            return self._read(tokens[:, None], None, values)
        embeddings = self.features.embed(tokens[running, None], None if values is None else values[running])
        U, U0 = self._causes(self.engine.some(embeddings, self._cache, running)[:, -1])
        rows = torch.zeros(len(tokens), dtype=torch.long)  # what has ended repeats the first that goes on
        rows[running] = torch.arange(len(running))
        return Causes(U[rows], U0[rows])

    def _read(self, input_ids: Tensor, mask: Tensor | None, values: Tensor | None) -> Causes:
        return self._causes(self.features(input_ids, mask, values, self._cache).select(1, -1))
