"""Who is compared: models of ours through a `Speaker`, any other causal language model by its logits alone.

Both answer prompts with texts in the same words; where a token is drawn by softmax, its noise is a Gumbel per
token of the vocabulary. This module knows nothing of pairs or scores.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from causal_qwen.context import check_context
from causal_qwen.counterfactual.comparison.gumbel import Keys, gumbel_choice, token_keys
from causal_qwen.data import Prompt
from causal_qwen.decoder.packed import MATRICES
from causal_qwen.individual import Individual
from causal_qwen.kernels.products import Matrix
from causal_qwen.native_model import NativeModel
from causal_qwen.prompting import Answer, Settings, Speaker
from causal_qwen.prompting.answers import before_stop

__all__ = ["PlainSpeaker", "Talker", "check_cause_space", "fingerprint", "keys_of", "speak"]

ROWS_COMPARED = 512  # of W, where two models are asked whether their causes mean the same
LEAST_COSINE = 0.5  # half of these rows' pairs; unrelated models of the same size have 0
ENTRIES_HASHED = 64  # of each tensor


class Talker(Protocol):
    """Who answers prompts: `Speaker` and `PlainSpeaker`."""

    def check(self, prompt: Prompt, settings: Settings) -> None:
        """Refuse what cannot be answered."""
        ...

    def answer(
        self,
        prompts: Sequence[Prompt],
        settings: Settings,
        people: Sequence[Individual],
        *,
        processors: LogitsProcessorList | None = None,
    ) -> list[Answer]:
        """One answer per prompt."""
        ...


class PlainSpeaker:
    """A causal language model of transformers that is not ours; it answers in mode "compatible" alone.

    Args:
        model: In evaluation mode.
        tokenizer: The model's.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        ends = model.generation_config.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends or ())

    @classmethod
    def load(
        cls, source: str, *, dtype: torch.dtype | str = "auto", device: torch.device | str | None = None
    ) -> PlainSpeaker:
        """A directory or a hub id, as transformers loads it; no code that came with it runs."""
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(source)
        return cls(model if device is None else model.to(device), tokenizer)

    def check(self, prompt: Prompt, settings: Settings) -> None:
        """As in `Speaker`."""
        if not isinstance(prompt, str) and self.tokenizer.chat_template is None:
            raise ValueError("the model has no chat template; give plain text, without --chat and --system")
        length = len(self.ids(prompt))
        context = getattr(self.model.config, "max_position_embeddings", None)  # some models have no bound
        if context is not None:
            check_context(context, length, settings.max_new_tokens)

    def answer(
        self,
        prompts: Sequence[Prompt],
        settings: Settings,
        people: Sequence[Individual],
        *,
        processors: LogitsProcessorList | None = None,
    ) -> list[Answer]:
        """As in `Speaker`, greedy but for what the processors do."""
        rows = [self.ids(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        device, filler = self.model.device, self.ends[0] if self.ends else 0
        ids = torch.tensor([[filler] * (longest - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        criteria = [StopStringCriteria(self.tokenizer, list(settings.stop))] if settings.stop else []
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=settings.max_new_tokens,
            do_sample=False,
            repetition_penalty=settings.repetition_penalty or 1.0,
            pad_token_id=filler,
            logits_processor=processors or LogitsProcessorList(),
            stopping_criteria=StoppingCriteriaList(criteria),
        )
        return [self._answer(row, settings) for row in output[:, longest:].tolist()]

    def _answer(self, tokens: list[int], settings: Settings) -> Answer:
        end = next((index for index, token in enumerate(tokens) if token in self.ends), None)
        said = tokens if end is None else tokens[: end + 1]
        text, stopped = before_stop(self.tokenizer.decode(said, skip_special_tokens=True), settings.stop)
        reason = "stop_string" if stopped else "length" if end is None else "eos"
        return Answer(text, (), None, reason, len(said), tuple(said))

    def ids(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt."""
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
        else:
            ids = self.tokenizer.apply_chat_template(
                [dict(turn) for turn in prompt], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        if not ids:
            raise ValueError("the prompt is empty; give some text to continue")
        return ids


def speak(
    talker: Talker, prompts: Sequence[Prompt], settings: Settings, people: Sequence[Individual]
) -> list[Answer]:
    """One answer per prompt, each by its individual: noise in cause space, or, in mode "compatible", one
    Gumbel per token.
    """
    if settings.mode != "compatible":
        return talker.answer(prompts, settings, people)
    noise = gumbel_choice(
        keys_of(talker),
        people,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
    )
    greedy = replace(settings, sample=False, temperature=None, top_k=None, top_p=None)
    return talker.answer(prompts, greedy, people, processors=noise)


def keys_of(talker: Talker) -> Keys:
    """The keys of a talker's vocabulary."""
    if isinstance(talker, Speaker):
        ends = talker.model.generation_config.eos_token_id
        whole = [ends] if isinstance(ends, int) else list(ends or ())
        return _keys(talker.processor.tokenizer, int(talker.model.config.vocab_size), tuple(whole))
    if isinstance(talker, PlainSpeaker):
        rows = int(talker.model.get_output_embeddings().weight.shape[0])
        return _keys(talker.tokenizer, rows, tuple(talker.ends))
    raise TypeError(f"{type(talker).__name__} has no vocabulary that is known here")


@functools.lru_cache(maxsize=8)
def _keys(tokenizer: PreTrainedTokenizerBase, rows: int, ends: tuple[int, ...]) -> Keys:
    return token_keys(tokenizer, rows, ends)


def check_cause_space(one: Talker, other: Talker) -> None:
    """Refuse to couple by individuals what does not share a cause space: ε_j must mean the same in both.

    Raises:
        ValueError: If one is not a causal model, or their causes have other sizes or other directions.
    """
    remedy = "compare them with --coupling gumbel, which needs only logits"
    if not (isinstance(one, Speaker) and isinstance(other, Speaker)):
        raise ValueError(
            "coupling 'individual' is noise in the space of causes, and one of the models has none; convert "
            f"it (causal-qwen convert), or {remedy}"
        )
    if one.model is other.model:
        return
    weights = [_vocabulary(speaker) for speaker in (one, other)]
    sizes = [weight.columns for weight in weights]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the causes have {sizes[0]} and {sizes[1]} dimensions, so no individual can be the same in "
            f"both; {remedy}"
        )
    rows = torch.linspace(0, min(len(one.weight) for one in weights) - 1, ROWS_COMPARED).long().unique()
    first, second = (weight.rows(rows.to(weight.weight.device)).dense().float().cpu() for weight in weights)
    cosine = float(torch.cosine_similarity(first, second).median())
    if cosine < LEAST_COSINE:
        raise ValueError(
            f"the rows of W point elsewhere (median cosine {cosine:.2f}): the models are not of one origin, "
            f"and a direction of their causes does not mean the same in both; {remedy}"
        )


def fingerprint(talker: Talker) -> str:
    """What tells a model from another one: a hash of its configuration and of a part of every tensor."""
    if not isinstance(talker, Speaker | PlainSpeaker):
        return type(talker).__name__
    digest = hashlib.blake2b(digest_size=8)
    model = talker.model
    config = asdict(model.config) if isinstance(model, NativeModel) else model.config.to_dict()
    fields = {name: value for name, value in config.items() if name[0] != "_"}
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    for name, tensor in sorted(_tensors(model).items()):
        part = tensor.detach().flatten()[:ENTRIES_HASHED].float().cpu()
        digest.update(name.encode() + part.numpy().tobytes())
    if isinstance(talker, Speaker) and talker.engine is not None:
        packed = talker.engine.weights.head.weight
        digest.update(f"{packed.dtype} {tuple(packed.shape)}".encode())
    return digest.hexdigest()


def _vocabulary(speaker: Speaker) -> Matrix:
    """W, as whoever runs the forward passes has it."""
    if isinstance(speaker.model, NativeModel):
        assert speaker.engine is not None  # it has no other weights
        return speaker.engine.weights.head
    return Matrix(speaker.model.lm_head.weight.detach())


def _tensors(model: Any) -> dict[str, Tensor]:
    """All of a model's by name; a packed one's heads, and the matrices of its blocks."""
    if not isinstance(model, NativeModel):
        tensors: dict[str, Tensor] = model.state_dict()
        return tensors
    heads = {"abduction": model.abduction, "action": model.action, "numbers": model.numeric_embedding}
    named = {f"{name}.{key}": one for name, head in heads.items() for key, one in head.state_dict().items()}
    assert model.engine is not None  # it has no other weights
    for index, block in enumerate(model.engine.weights.blocks):
        named |= {f"blocks.{index}.{name}": getattr(block, name).weight for name in MATRICES}
    return named
