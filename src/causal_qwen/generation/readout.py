"""The heads as decisions ask for them: what they hold of W, b, balance and C is looked up once per text.

After a step of the backbone every cache is cold, and each small operation between two tokens costs tens of
microseconds: this module keeps them few. What reads W can be put as a `Question`, so that those of many texts
are answered by one read. It does not know modes, noise or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy, magnitude
from causal_qwen.generation.protocol import CausalHeads, CausalModel
from causal_qwen.heads import exact
from causal_qwen.kernels.decision import TokenScorer
from causal_qwen.kernels.native import LARGEST_NATIVE
from causal_qwen.kernels.products import Linear, Matrix

__all__ = ["Answer", "Question", "ReadOut"]

Answer = tuple[Tensor, ...]


class Question(NamedTuple):
    """What a method of `ReadOut` is to be asked.

    Args:
        method: Its name; "best" is the best of "act".
        parts: What it takes, B rows each: a law is its location and its scale.
        k: How many tokens are allowed, of "among".
    """

    method: Literal["act", "best", "logits", "scores", "z_scores", "among"]
    parts: tuple[Tensor, ...]
    k: int = 0


class ReadOut:
    """From causes to token scores and numbers; without gradients.

    Args:
        model: Whose weights stay as they are meanwhile.
        weight: W in another form, such as integers; the model's own when None.
    """

    @torch.no_grad()
    def __init__(self, model: CausalHeads, weight: Matrix | None = None) -> None:
        matrix = Matrix(cast(CausalModel, model).lm_head.weight) if weight is None else weight
        self.model = model
        self.action = action = model.action
        self.noise = exact(magnitude(action.b_noise))  # (D,)
        self.act = Linear(matrix, exact(action.bias))  # W u + b: (B, D) → (B, V)
        self._own_weight = weight is None
        self._scorer = TokenScorer(
            matrix,
            bias=exact(action.bias),
            balance=exact(magnitude(action.balance)),
            threshold=exact(action.threshold),
        )

    def number(self, U: Cauchy) -> Cauchy:
        """Y (B,) of the widened cause, in value space."""
        return self.action.numbers(self.action.exogenous(U, noise=self.noise))

    def logits(self, loc_U: Tensor) -> Tensor:
        """W loc_U + b, (B, V), float32 or wider; with the model's own W rounded as in its output."""
        if not self._own_weight:
            return self.act(loc_U)
        return exact(cast(CausalModel, self.model).token_logits(loc_U))

    def scores(self, U: Cauchy, U0: Cauchy) -> Cauchy:
        """S, (B, V)."""
        return Cauchy(*self._scorer.scores(U.loc, U.scale, U0.loc, U0.scale))

    def z_scores(self, U: Cauchy, U0: Cauchy) -> tuple[Tensor, Tensor]:
        """(loc_S − C)/scale_S and its argmax, (B, V) and (B,)."""
        return self._scorer.z_scores(U.loc, U.scale, U0.loc, U0.scale)

    def reads_few(self, moved: Tensor, k: int) -> bool:
        """Whether the choice of causes (B, D) among k tokens takes less than all scores."""
        return self._scorer.reads_few(moved, k)

    def among(
        self, k: int, loc_U: Tensor, moved: Tensor, scale_U: Tensor | None = None, U0: Cauchy | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The choice of a moved cause among the k largest logits, where `reads_few` says so.

        Args:
            k: How many tokens are allowed.
            loc_U: (B, D) where the logits are.
            moved: (B, D) location of the cause that decides.
            scale_U: (B, D) its scale; None for a concrete cause, which decides by W u + b.
            U0: (B,), of a cause with a scale.

        Returns:
            Scores (B, V), −inf where not allowed, their argmax (B,), and the logits (B, V).
        """
        logits = self.act(loc_U)
        common = (None, None) if U0 is None else (U0.loc, U0.scale)
        return *self._scorer.among(logits, k, moved, scale_U, *common), logits

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """The answer to each, in their order; those of one kind by one read of W."""
        if len(questions) == 1 or self.act.native is None:  # other products depend on how many there are
            return [self._answer(question) for question in questions]
        answers: dict[int, Answer] = {}
        groups: dict[tuple[str, int, int], list[int]] = {}
        for index, question in enumerate(questions):
            group = groups.setdefault((question.method, question.k, len(question.parts)), [])
            rows = sum(len(questions[other].parts[0]) for other in [*group, index])
            if group and rows > LARGEST_NATIVE:  # beyond it products are rounded otherwise
                answers |= self._answer_together(questions, group)
                group.clear()
            group.append(index)
        for group in groups.values():
            answers |= self._answer_together(questions, group)
        return [answers[index] for index in range(len(questions))]

    def _answer_together(self, questions: Sequence[Question], group: Sequence[int]) -> dict[int, Answer]:
        rows = [len(questions[index].parts[0]) for index in group]
        columns = zip(*(questions[index].parts for index in group), strict=True)
        joint = questions[group[0]]._replace(parts=tuple(torch.cat(column) for column in columns))
        pieces = zip(*(part.split(rows) for part in self._answer(joint)), strict=True)
        return dict(zip(group, pieces, strict=True))

    def _answer(self, question: Question) -> Answer:
        parts = question.parts
        match question.method:
            case "act":
                return (self.act(*parts),)
            case "best":
                return self.act.best(*parts)
            case "logits":
                return (self.logits(*parts),)
            case "scores":
                S = self.scores(Cauchy(*parts[:2]), Cauchy(*parts[2:]))
                return S.loc, S.scale
            case "z_scores":
                return self.z_scores(Cauchy(*parts[:2]), Cauchy(*parts[2:]))
            case "among" if len(parts) == 2:
                return self.among(question.k, *parts)
            case "among":
                loc_U, moved, scale_U, *common = parts
                return self.among(question.k, loc_U, moved, scale_U, Cauchy(*common))
