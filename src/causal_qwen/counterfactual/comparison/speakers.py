"""Who is compared: models of ours through a `Speaker`, any other causal language model by its logits alone.

Whoever is a `Talker` can be compared, on whatever engine: it answers prompts with texts in the same words;
where a token is drawn by softmax, its noise is a Gumbel per token of the vocabulary. This module knows
nothing of pairs or scores.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
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
from causal_qwen.counterfactual.comparison.gumbel import Keys, gumbel_choice, text_ends, token_keys
from causal_qwen.data import Prompt, prompt_batch
from causal_qwen.decoder.packed import MATRICES
from causal_qwen.generation.settings import resolve
from causal_qwen.individual import Individual
from causal_qwen.kernels.products import Matrix
from causal_qwen.native_model import NativeModel
from causal_qwen.packed_tokenizer import PackedTokenizer
from causal_qwen.prompting import Answer, Settings, Speaker
from causal_qwen.prompting.answers import before_stop

__all__ = ["CausalTalker", "PlainSpeaker", "Talker", "check_cause_space", "speak", "talker_of"]

ROWS_COMPARED = 512  # of W, where two models are asked whether their causes mean the same
LEAST_COSINE = 0.5  # half of these rows' pairs; unrelated models of the same size have 0
ENTRIES_HASHED = 64  # of each tensor
PROMPTS_MEASURED = 32  # behind which the width of noise is taken


class Talker(Protocol):
    """Who answers prompts, and what a comparison asks of a model."""

    has_causes: bool

    def check(self, prompt: Prompt, settings: Settings) -> None:
        """Refuse what cannot be answered."""
        ...

    def answer(
        self, prompts: Sequence[Prompt], settings: Settings, people: Sequence[Individual]
    ) -> list[Answer]:
        """One answer per prompt, each by its individual: noise in cause space."""
        ...

    def draw(
        self, prompts: Sequence[Prompt], settings: Settings, people: Sequence[Individual]
    ) -> list[Answer]:
        """One answer per prompt, drawn from softmax: argmax_k logits_k/T + g_k by `gumbel`."""
        ...

    def fingerprint(self) -> str:
        """What tells the model from another one, and from itself in another precision."""
        ...

    def cause_weights(self) -> Matrix | None:
        """W, whose columns are the directions of causes; None where the model has none."""
        ...

    def noise_width(self, prompts: Sequence[Prompt]) -> float | None:
        """How far noise moves the cause at T = 1 behind these prompts; None where nobody can tell."""
        ...


class CausalTalker:
    """A model of ours in a comparison.

    Args:
        speaker: Who is asked.
    """

    has_causes = True

    def __init__(self, speaker: Speaker) -> None:
        self.speaker = speaker

    def check(self, prompt: Prompt, settings: Settings) -> None:
        """As `Speaker.check`."""
        self.speaker.check(prompt, settings)

    def answer(
        self, prompts: Sequence[Prompt], settings: Settings, people: Sequence[Individual]
    ) -> list[Answer]:
        """As `Speaker.answer`."""
        return self.speaker.answer(prompts, settings, people)

    def draw(
        self, prompts: Sequence[Prompt], settings: Settings, people: Sequence[Individual]
    ) -> list[Answer]:
        """By Gumbel noise, which is a logits processor."""
        model = self.speaker.model
        keys = _keys(
            self.speaker.processor.tokenizer,
            int(model.config.vocab_size),
            text_ends(model.generation_config.eos_token_id),
        )
        return _drawn(self.speaker.answer, keys, prompts, settings, people)

    def fingerprint(self) -> str:
        """A hash of the configuration, of a part of every tensor, and of how W is packed."""
        if self.speaker.engine is None:
            return _digest(self.speaker.model)
        packed = self.speaker.engine.weights.head.weight
        return _digest(self.speaker.model, f"{packed.dtype} {tuple(packed.shape)}")

    def cause_weights(self) -> Matrix | None:
        """W, as whoever runs the forward passes has it."""
        model, engine = self.speaker.model, self.speaker.engine
        if isinstance(model, NativeModel):
            assert engine is not None  # it has no other weights
            return engine.weights.head
        return Matrix(model.lm_head.weight.detach())

    @torch.no_grad()
    def noise_width(self, prompts: Sequence[Prompt]) -> float | None:
        """κ·(scale_U + |b_noise|), the median over positions and dimensions."""
        model: Any = self.speaker.model
        scales = []
        for prompt in prompts[:PROMPTS_MEASURED]:
            batch = prompt_batch(self.speaker.processor, [prompt], model.device)
            U = model.causes(batch, self.speaker.engine).U
            scales.append(model.action.exogenous(U).scale.flatten())
        gain: float = resolve(model, noise_gain=None)["noise_gain"]
        return gain * float(torch.cat(scales).median())


class PlainSpeaker:
    """A causal language model of transformers that is not ours; it answers in mode "compatible" alone.

    Args:
        model: In evaluation mode.
        tokenizer: The model's.
    """

    has_causes = False

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.ends = list(text_ends(model.generation_config.eos_token_id))

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

    def draw(
        self, prompts: Sequence[Prompt], settings: Settings, people: Sequence[Individual]
    ) -> list[Answer]:
        """By Gumbel noise, which is a logits processor."""
        rows = int(self.model.get_output_embeddings().weight.shape[0])
        keys = _keys(self.tokenizer, rows, tuple(self.ends))
        return _drawn(self.answer, keys, prompts, settings, people)

    def fingerprint(self) -> str:
        """A hash of the configuration and of a part of every tensor."""
        return _digest(self.model)

    def cause_weights(self) -> Matrix | None:
        """None: logits are all that it has."""
        return None

    def noise_width(self, prompts: Sequence[Prompt]) -> float | None:
        """None: it has no causes."""
        return None

    def _answer(self, tokens: list[int], settings: Settings) -> Answer:
        end = next((index for index, token in enumerate(tokens) if token in self.ends), None)
        said = tokens if end is None else tokens[: end + 1]

        def read(count: int) -> tuple[str, bool]:
            return before_stop(self.tokenizer.decode(said[:count], skip_special_tokens=True), settings.stop)

        text, stopped = read(len(said))
        if stopped:  # what follows is padding, until the batch has ended
            said = said[: bisect.bisect(range(len(said)), False, key=lambda count: read(count)[1])]
            text, _ = read(len(said))
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


def talker_of(asked: Talker | Speaker) -> Talker:
    """Who is compared; a `Speaker` as a `CausalTalker`."""
    return CausalTalker(asked) if isinstance(asked, Speaker) else asked


def speak(
    asked: Talker | Speaker, prompts: Sequence[Prompt], settings: Settings, people: Sequence[Individual]
) -> list[Answer]:
    """One answer per prompt, each by its individual: noise in cause space, or, in mode "compatible", one
    Gumbel per token.
    """
    talker = talker_of(asked)
    say = talker.draw if settings.mode == "compatible" else talker.answer
    return say(prompts, settings, people)


def _drawn(
    answer: Callable[..., list[Answer]],
    keys: Keys,
    prompts: Sequence[Prompt],
    settings: Settings,
    people: Sequence[Individual],
) -> list[Answer]:
    """Greedy answers under the noise of the individuals."""
    noise = gumbel_choice(
        keys, people, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p
    )
    greedy = replace(settings, sample=False, temperature=None, top_k=None, top_p=None)
    return answer(prompts, greedy, people, processors=noise)


@functools.lru_cache(maxsize=8)
def _keys(tokenizer: PreTrainedTokenizerBase | PackedTokenizer, rows: int, ends: tuple[int, ...]) -> Keys:
    return token_keys(tokenizer, rows, ends)


def check_cause_space(one: Talker | Speaker, other: Talker | Speaker) -> None:
    """Refuse to couple by individuals what does not share a cause space: ε_j must mean the same in both.

    Raises:
        ValueError: If one is not a causal model, or their causes have other sizes or other directions.
    """
    remedy = "compare them with --coupling gumbel, which needs only logits"
    first, second = (talker_of(asked).cause_weights() for asked in (one, other))
    if first is None or second is None:
        raise ValueError(
            "coupling 'individual' is noise in the space of causes, and one of the models has none; convert "
            f"it (causal-qwen convert), or {remedy}"
        )
    if first.columns != second.columns:
        raise ValueError(
            f"the causes have {first.columns} and {second.columns} dimensions, so no individual can be the "
            f"same in both; {remedy}"
        )
    last = min(len(first.weight), len(second.weight)) - 1
    rows = torch.linspace(0, last, ROWS_COMPARED).long().unique()
    ours, theirs = (
        weight.rows(rows.to(weight.weight.device)).dense().float().cpu() for weight in (first, second)
    )
    cosine = float(torch.cosine_similarity(ours, theirs).median())
    if cosine < LEAST_COSINE:
        raise ValueError(
            f"the rows of W point elsewhere (median cosine {cosine:.2f}): the models are not of one origin, "
            f"and a direction of their causes does not mean the same in both; {remedy}"
        )


def _digest(model: Any, form: str = "") -> str:
    """A hash of a model's configuration and of a part of every tensor, and of the form that it runs in."""
    digest = hashlib.blake2b(digest_size=8)
    config = asdict(model.config) if isinstance(model, NativeModel) else model.config.to_dict()
    fields = {name: value for name, value in config.items() if name[0] != "_"}
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    for name, tensor in sorted(_tensors(model).items()):
        part = tensor.detach().flatten()[:ENTRIES_HASHED].float().cpu()
        digest.update(name.encode() + part.numpy().tobytes())
    digest.update(form.encode())
    return digest.hexdigest()


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
