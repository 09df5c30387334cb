"""A judge: nats per token of a text after its prompt, under a model that may be neither of the two.

The text is read anew by the judge's own tokenizer, numbers as digits, so that texts of any model can be
judged; the end of a text counts as a token where the text ended by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.causal_lm import CausalLM
from causal_qwen.counterfactual.comparison.scores import Said
from causal_qwen.counterfactual.comparison.speakers import PlainSpeaker, Talker
from causal_qwen.data import prompt_row
from causal_qwen.generation.native import NativeFeatures
from causal_qwen.generation.readout import ReadOut
from causal_qwen.prompting import Speaker

__all__ = ["Judge"]

ROWS = 16  # texts per forward pass
LOGITS = 256  # positions whose logits are in memory together


class Judge:
    """−1/n Σ log softmax(logits)_token over the n tokens of a text, given its prompt.

    Args:
        talker: Whose logits judge.
    """

    def __init__(self, talker: Talker) -> None:
        if not isinstance(talker, Speaker | PlainSpeaker):
            raise TypeError(f"{type(talker).__name__} has no logits that are known here")
        self.talker = talker

    def __call__(self, texts: Sequence[Said]) -> list[float]:
        """Nats per token of each; NaN for a text without a token."""
        values: list[float] = []
        for start in range(0, len(texts), ROWS):
            values += self._batch(texts[start : start + ROWS])
        return values

    @torch.no_grad()
    def _batch(self, texts: Sequence[Said]) -> list[float]:
        prompts = [self._prompt(said) for said in texts]
        said_ids = [self._said(said) for said in texts]
        whole = [[*prompt, *ids] for prompt, ids in zip(prompts, said_ids, strict=True)]
        longest = max(map(len, whole))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in whole])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in whole])
        where = [  # (row, position before the token)
            (row, len(prompt) + index - 1)
            for row, (prompt, tokens) in enumerate(zip(prompts, said_ids, strict=True))
            for index in range(len(tokens))
        ]
        if not where:
            return [float("nan")] * len(texts)
        rows, before = torch.tensor(where).T
        nats = self._nats(ids, mask, rows, before)
        sums = torch.zeros(len(texts), dtype=torch.float64).index_add_(0, rows, nats)
        return (sums / torch.tensor([float(len(tokens)) for tokens in said_ids])).tolist()

    def _nats(self, ids: Tensor, mask: Tensor, rows: Tensor, before: Tensor) -> Tensor:
        """−log p of the token behind each of some positions, (n,) float64."""
        talker, device = self.talker, self.talker.model.device  # type: ignore[attr-defined]
        labels, parts = ids[rows, before + 1], []
        if isinstance(talker, Speaker) and talker.engine is not None:
            model, readout = talker.model, ReadOut(talker.model, talker.engine.weights.head)
            features = NativeFeatures(model, talker.engine)(ids, mask)[rows, before]  # (n, H)
            for part, chosen in zip(features.split(LOGITS), labels.split(LOGITS), strict=True):
                logits = readout.logits(model.abduction(part)[0].loc)  # (n, V)
                parts.append(F.cross_entropy(logits, chosen, reduction="none"))
        else:
            options = {"hide_num_token": True} if isinstance(talker.model, CausalLM) else {}  # type: ignore[attr-defined]
            logits = talker.model(ids.to(device), attention_mask=mask.to(device), **options).logits  # type: ignore[attr-defined]
            chosen = logits[rows.to(device), before.to(device)].float()
            parts.append(F.cross_entropy(chosen, labels.to(device), reduction="none").cpu())
        return torch.cat(parts).double()

    def _prompt(self, said: Said) -> list[int]:
        if isinstance(self.talker, PlainSpeaker):
            return self.talker._ids(said.prompt)
        return prompt_row(self.talker.processor, said.prompt).input_ids  # type: ignore[union-attr]

    def _said(self, said: Said) -> list[int]:
        """The text's tokens, with the end where it ended by itself."""
        if isinstance(self.talker, PlainSpeaker):
            tokenizer, end = self.talker.tokenizer, self.talker.ends[:1]
        else:
            tokenizer, end = self.talker.processor.tokenizer, [self.talker.processor.eos_token_id]  # type: ignore[union-attr]
        ids: list[int] = tokenizer(said.text, add_special_tokens=False)["input_ids"]
        return ids + list(end) if said.answer.finish_reason == "eos" else ids
