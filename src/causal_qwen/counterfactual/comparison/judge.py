"""A judge: nats per token of a text after its prompt, under a model that may be neither of the two.

The text is read anew by the judge's own tokenizer, numbers as digits, so that texts of any model can be
judged; the end of a text counts as a token where the text ended by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.counterfactual.comparison.gumbel import text_ends
from causal_qwen.counterfactual.comparison.scores import Said
from causal_qwen.counterfactual.comparison.speakers import PlainSpeaker, Talker, talker_of
from causal_qwen.data import prompt_row
from causal_qwen.generation.native import NativeFeatures
from causal_qwen.generation.readout import ReadOut
from causal_qwen.prompting import Speaker

__all__ = ["Judge"]

ROWS = 32  # texts per forward pass
LOGITS = 256  # positions whose logits are in memory together


class _Prompt(NamedTuple):
    ids: tuple[int, ...]
    values: tuple[float, ...]


class Judge:
    """−1/n Σ log softmax(logits)_token over the n tokens of a text, given its prompt.

    Args:
        talker: Whose logits judge.
    """

    def __init__(self, talker: Talker | Speaker) -> None:
        if not isinstance(talker, Speaker | PlainSpeaker):
            raise TypeError(f"{type(talker).__name__} has no logits that are known here")
        self.talker: Speaker | PlainSpeaker = talker

    def fingerprint(self) -> str:
        """The model's."""
        return talker_of(self.talker).fingerprint()

    @torch.no_grad()
    def __call__(self, texts: Sequence[Said]) -> list[float]:
        """Nats per token of each; NaN for a text without a token."""
        values = [float("nan")] * len(texts)
        by_prompt: dict[_Prompt, dict[tuple[int, ...], list[int]]] = {}
        for index, said in enumerate(texts):
            places = by_prompt.setdefault(self._prompt(said), {})
            places.setdefault(tuple(self._said(said)), []).append(index)
        for prompt, places in by_prompt.items():
            # Individuals often say the same: each text is read once, beside others of its length.
            spoken = sorted(places, key=len)
            for start in range(0, len(spoken), ROWS):
                batch = spoken[start : start + ROWS]
                for text, value in zip(batch, self._batch(prompt, batch), strict=True):
                    for index in places[text]:
                        values[index] = value
        return values

    def _batch(self, prompt: _Prompt, texts: Sequence[tuple[int, ...]]) -> list[float]:
        """Of texts behind one prompt."""
        longest = max(map(len, texts))
        if longest == 0:
            return [float("nan")] * len(texts)
        said = torch.tensor([text + (0,) * (longest - len(text)) for text in texts])  # (B, T)
        there = torch.arange(longest) < torch.tensor([len(text) for text in texts])[:, None]  # (B, T)
        nats = torch.zeros(said.shape, dtype=torch.float64)
        nats[there] = self._nats(prompt, said, there)
        return (nats.sum(1) / there.sum(1)).tolist()  # 0/0 is NaN

    def _nats(self, asked: _Prompt, said: Tensor, there: Tensor) -> Tensor:
        """−log p of the tokens that are there, in the order of ``said[there]``."""
        talker, prompt = self.talker, torch.tensor([asked.ids])  # (1, P)
        values = torch.tensor([asked.values], dtype=torch.float64) if any(asked.values) else None
        if not isinstance(talker, Speaker) or talker.engine is None:
            whole = torch.cat([prompt.expand(len(said), -1), said], dim=1).to(talker.model.device)
            mask = torch.cat([torch.ones_like(prompt).expand(len(said), -1), there.long()], dim=1)
            options: dict[str, Any] = {"attention_mask": mask.to(whole.device)}
            if values is not None:
                padded = F.pad(values, (0, said.shape[1])).expand(len(said), -1)
                options["numeric_values"] = padded.to(whole.device)
            model = cast(Any, talker.model)  # a packed one has an engine
            logits = model(whole, **options).logits[:, prompt.shape[1] - 1 : -1]  # (B, T, V)
            return F.cross_entropy(logits.cpu()[there].float(), said[there], reduction="none").double()
        # The prompt is read once.
        engine, features = talker.engine, NativeFeatures(talker.model, talker.engine)
        first = engine.new_cache(1, prompt.shape[1])
        before = features(prompt, None, values, first)[:, -1:].expand(len(said), -1, -1)  # (B, 1, H)
        cache = engine.new_cache(len(said), prompt.shape[1] + said.shape[1])
        cache.repeat(first)
        mask = torch.cat([torch.ones_like(prompt).expand(len(said), -1), there.long()], dim=1)
        after = features(said, mask, None, cache)[:, :-1]  # (B, T - 1, H)
        readout, parts = ReadOut(talker.model, engine.weights.head), []
        states = torch.cat([before, after], dim=1)[there]  # (n, H)
        for part, chosen in zip(states.split(LOGITS), said[there].split(LOGITS), strict=True):
            logits = readout.logits(talker.model.abduction(part)[0].loc)  # (n, V)
            parts.append(F.cross_entropy(logits, chosen, reduction="none"))
        return torch.cat(parts).double()

    def _prompt(self, said: Said) -> _Prompt:
        if isinstance(self.talker, PlainSpeaker):
            return _Prompt(tuple(self.talker.ids(said.prompt)), ())
        row = prompt_row(self.talker.processor, said.prompt)
        return _Prompt(tuple(row.input_ids), tuple(row.numeric_values))

    def _said(self, said: Said) -> list[int]:
        """The text's tokens, with the end where it ended by itself."""
        if isinstance(self.talker, PlainSpeaker):
            tokenizer, ends = self.talker.tokenizer, self.talker.ends[:1]
        else:
            tokenizer = self.talker.processor.tokenizer
            ends = list(text_ends(self.talker.processor.eos_token_id))
        ids: list[int] = tokenizer(said.text, add_special_tokens=False)["input_ids"]
        return ids + ends if said.answer.finish_reason == "eos" else ids
