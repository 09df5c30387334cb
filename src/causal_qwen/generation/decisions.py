"""How the next token and the next number are decided: the table of docs/theory/inference.md, row by row.

A decision sees the causes of the last position and the allowed tokens. It asks the `ReadOut` questions, one
after the other, and whoever drives it has them answered: `choose` at once, `choose_together` for many
texts with decisions of their own by one read of W. It does not know the loop, caches or text.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy, magnitude, truncation_bound
from causal_qwen.generation.processors import TopK
from causal_qwen.generation.protocol import Processors
from causal_qwen.generation.readout import Answer, Question, ReadOut
from causal_qwen.generation.stepping import Causes
from causal_qwen.heads import exact, without_num_row
from causal_qwen.individual import Individual
from causal_qwen.intervals import Numbers, farthest, read_numbers

__all__ = ["Choice", "Deciding", "Decision", "InferenceMode", "choose_together"]

InferenceMode = Literal["standard", "causal", "compatible"]


@dataclass(frozen=True)
class Choice:
    """What was decided at one position.

    Args:
        tokens: (B,) ids.
        scores: (B, V) what the token is the argmax of (or, sampled by softmax, drawn from).
        logits: (B, V) before any processor; None where nobody needed them.
        number: Computes values and their intervals; most tokens are no numbers and never ask.
    """

    tokens: Tensor
    scores: Tensor
    logits: Tensor | None
    number: Callable[[], Numbers]

    @functools.cached_property
    def numbers(self) -> Numbers:
        """Values, ends of their intervals, and whether they extrapolate."""
        return self.number()

    @property
    def values(self) -> Tensor:
        """(B,) the number, should the token be <NUM>; float64."""
        return self.numbers.median

    @property
    def lower(self) -> Tensor:
        """(B,) lower end of its interval."""
        return self.numbers.lower

    @property
    def upper(self) -> Tensor:
        """(B,) upper end of its interval."""
        return self.numbers.upper


# Asks questions, is sent their answers, and returns what is chosen.
Deciding = Generator[Question, Answer, Choice]
Chosen = TypeVar("Chosen")
Scored = tuple[Tensor, Tensor, Tensor | None]  # scores, their argmax and, where they are known, the logits


@dataclass(frozen=True)
class Decision:
    """A mode of inference with its settings.

    Args:
        mode: "standard" (the law of U decides), "causal" (one concrete individual decides) or "compatible"
            (softmax).
        do_sample: Whether noise moves the cause ("standard"), or tokens are drawn ("compatible").
        temperature: T ≥ 0 scales noise; in "compatible" it is a logits processor and not used here.
        noise_gain: κ.
        density_floor: Truncation of the noise.
        persistence: ρ of individuals without one of their own.
        individuals: One per row, where noise is drawn; empty otherwise.
        level: Probability of the reported interval.
        raw_intervals: Whether it is the Cauchy law's own. It always is where the cause is moved ("standard",
            sampled) or free of noise (temperature 0): conformal scores are about the widened law.
        ovr: In "compatible", whether P_k/ΣP is the distribution instead of softmax(logits).
        hide_num: In "compatible", whether a <NUM> row that conversion added takes no part.
        generator: Draws tokens in "compatible"; torch's own when None.
    """

    mode: InferenceMode
    do_sample: bool = False
    temperature: float = 1.0
    noise_gain: float = 1.0
    density_floor: float = 0.01
    persistence: float = 0.2
    individuals: Sequence[Individual] = ()
    level: float = 0.9
    raw_intervals: bool = False
    ovr: bool = False
    hide_num: bool = False
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature is {self.temperature!r:.80}; it must be a finite number ≥ 0")
        if not 0 <= self.noise_gain <= sys.float_info.max:
            raise ValueError(f"noise_gain is {self.noise_gain!r:.80}; it must be a finite number ≥ 0")
        if not 0.0 <= self.persistence <= 1.0:
            raise ValueError(f"persistence is {self.persistence!r:.80}; it must lie between 0 and 1")
        if not 0.0 < self.level < 1.0:
            raise ValueError(f"interval_level is {self.level!r:.80}; it must lie strictly between 0 and 1")
        truncation_bound(self.density_floor)

    @property
    def draws_noise(self) -> bool:
        """Whether an individual is sampled, so that each row needs one."""
        return self.do_sample and self.mode != "compatible"

    def choose(
        self,
        readout: ReadOut,
        causes: Causes,
        input_ids: Tensor,
        position: int,
        processors: Processors,
    ) -> Choice:
        """Decide one position for every row; arguments as in `deciding`."""
        (choice,) = choose_together(
            readout, [self.deciding(readout, causes, input_ids, position, processors)]
        )
        return choice

    def deciding(
        self,
        readout: ReadOut,
        causes: Causes,
        input_ids: Tensor,
        position: int,
        processors: Processors,
    ) -> Deciding:
        """The questions by which one position of every row is decided.

        Args:
            readout: Of the model that inferred the causes.
            causes: U (B, D) and U₀ (B,) of the last position.
            input_ids: (B, T) the text so far, for the processors.
            position: Index of the token to decide, counted from the first generated one.
            processors: Run on the logits. What they set to −inf is not allowed, what they add is added to the
                scores.
        """
        (U, U0), action = causes, readout.action
        wide = functools.partial(action.exogenous, U, noise=readout.noise)  # the widened cause
        if self.mode == "compatible":
            return (yield from self._by_softmax(readout, causes, input_ids, processors, wide))
        if self.mode == "standard" and not self.do_sample:
            widened = action.exogenous(U, temperature=self.temperature, noise=readout.noise)
            decided = yield from self._by_law(readout, widened, None, U0, input_ids, processors)
            return self._choice(readout, *decided, wide if self.temperature else lambda: widened)
        own, world = self._noise(U.loc, position)  # (B, D + 1) each
        epsilon, exogenous = own[:, :-1], world[:, :-1]
        if self.mode == "standard":
            move = functools.partial(
                action.exogenous, U, do_sample=True, epsilon=exogenous, noise=readout.noise
            )
            moved = move(temperature=self.temperature, noise_gain=self.noise_gain)
            decided = yield from self._by_law(readout, moved, U.loc, U0, input_ids, processors)
            # κ belongs to words; numbers move by their own law
            return self._choice(readout, *decided, functools.partial(move, temperature=self.temperature))

        def individual(gain: float) -> Tensor:
            """loc_U + gain·(scale_U·ε + |b_noise|·ε'), (B, D)."""
            u = torch.addcmul(U.loc, U.scale + readout.noise, epsilon, value=gain)
            # The difference is 0 in rows outside of any world: these do not depend on their neighbours.
            return u if world is own else torch.addcmul(u, readout.noise, exogenous - epsilon, value=gain)

        u = individual(self.temperature * self.noise_gain)
        decided = yield from self._by_cause(readout, u, U.loc, input_ids, processors)

        def drawn() -> Tensor:
            read_out = self.temperature * exact(magnitude(action.number_noise)) * world[:, -1]
            return action.numbers(Cauchy(individual(self.temperature), U.scale)).loc + read_out

        return self._choice(readout, *decided, wide, drawn=drawn)

    def _choice(
        self,
        readout: ReadOut,
        scores: Tensor,
        tokens: Tensor,
        logits: Tensor | None,
        cause: Callable[[], Cauchy],
        *,
        drawn: Callable[[], Tensor] | None = None,
    ) -> Choice:
        """With the median of Y of the cause as the number unless a value is drawn."""

        @torch.no_grad()
        def number() -> Numbers:
            model, U = readout.model, cause()
            calibrated = self.mode != "standard" or not (self.do_sample or self.temperature == 0)
            raw = self.raw_intervals or not calibrated
            numbers = read_numbers(
                readout.action, model.config, U, readout.action.numbers(U), self.level, raw=raw
            )
            if drawn is None:
                return numbers
            value = model.value_space.decode(drawn())
            limits = model.config.value_range
            return numbers._replace(median=value if limits is None else value.clamp(*farthest(limits)))

        return Choice(tokens, scores, logits, number)

    def _by_softmax(
        self,
        readout: ReadOut,
        causes: Causes,
        input_ids: Tensor,
        processors: Processors,
        cause: Callable[[], Cauchy],
    ) -> Deciding:
        """What Qwen does: the argmax of the processed logits, or a draw from their softmax."""
        U, U0 = causes
        if self.ovr:
            S = Cauchy(*(yield Question("scores", _parts(readout.action.exogenous(U), U0))))
            logits = S.log_sf(exact(readout.action.threshold))  # softmax of log P_k is P_k/ΣP
        else:
            (logits,) = yield Question("logits", (U.loc,))  # (B, V)
        if self.hide_num:
            logits = without_num_row(logits, readout.model.config.num_token_id)
        scores = _processed(processors, input_ids, logits)
        if self.do_sample:
            tokens = torch.multinomial(scores.softmax(-1), num_samples=1, generator=self.generator).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        return self._choice(readout, scores, tokens, logits, cause)

    def _by_law(
        self,
        readout: ReadOut,
        U: Cauchy,
        loc_U: Tensor | None,
        U0: Cauchy,
        input_ids: Tensor,
        processors: Processors,
    ) -> Generator[Question, Answer, Scored]:
        """(loc_S + adjustment − C)/scale_S over all tokens, its argmax and, with processors, the logits;
        ``loc_U`` is where these are, if not at U's location.
        """
        if not processors:
            z_scores, best = yield Question("z_scores", _parts(U, U0))
            return z_scores, best, None
        if loc_U is not None and (k := _only_top_k(processors)) is not None and readout.reads_few(U.loc, k):
            among, best, logits = yield Question("among", (loc_U, *_parts(U, U0)), k)
            return among, best, logits
        S = Cauchy(*(yield Question("scores", _parts(U, U0))))  # (B, V)
        if loc_U is None:
            logits = S.loc - U0.loc[:, None]
        else:
            (logits,) = yield Question("logits", (loc_U,))
        adjustment = _processed(processors, input_ids, logits).sub_(logits)
        z_scores = readout.action.z_scores(Cauchy(S.loc + adjustment, S.scale))
        return z_scores, z_scores.argmax(-1), logits

    def _by_cause(
        self,
        readout: ReadOut,
        u: Tensor,
        loc_U: Tensor,
        input_ids: Tensor,
        processors: Processors,
    ) -> Generator[Question, Answer, Scored]:
        """W u + b + adjustment for concrete causes u, its argmax and, with processors, the logits, which come
        from the same read of W.
        """
        if not processors:
            scores, best = yield Question("best", (u,))
            return scores, best, None
        if (k := _only_top_k(processors)) is not None and readout.reads_few(u, k):
            among, best, logits = yield Question("among", (loc_U, u), k)
            return among, best, logits
        (both,) = yield Question("act", (torch.cat([u, loc_U]),))
        scores, logits = both.chunk(2)
        scores = _processed(processors, input_ids, logits).sub_(logits).add_(scores)
        return scores, scores.argmax(-1), logits

    def _noise(self, like: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """ε of the individuals and ε' of their worlds at this position, with ε_Y in the last column of each,
        (B, D + 1): one and the same tensor where nobody is in a world.
        """
        people = {id(individual): individual for individual in self.individuals}
        settings = {"density_floor": self.density_floor, "persistence": self.persistence}

        def stacked(draw: Callable[..., Tensor]) -> Tensor:
            rows = {key: draw(one, position, like.shape[-1], **settings) for key, one in people.items()}
            if len(self.individuals) == 1:
                return rows.popitem()[1].unsqueeze(0).to(like.device)
            return torch.stack([rows[id(individual)] for individual in self.individuals]).to(like.device)

        own = stacked(Individual.noise)
        if all(individual.world is None for individual in people.values()):
            return own, own
        return own, stacked(Individual.world_noise)


def choose_together(
    readout: ReadOut, decidings: Iterable[Generator[Question, Answer, Chosen]]
) -> list[Chosen]:
    """What each decides, in their order; questions of one kind are answered from one read of W.

    Without another form of W than native code's, each gets what it would get alone, bit for bit.
    """
    choices: dict[int, Chosen] = {}
    asked: dict[int, tuple[Generator[Question, Answer, Chosen], Question]] = {}

    def go_on(index: int, deciding: Generator[Question, Answer, Chosen], answer: Answer | None) -> None:
        try:
            # A generator that has not begun takes None, as next() sends it.
            asked[index] = deciding, deciding.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            choices[index] = end.value

    for index, deciding in enumerate(decidings):
        go_on(index, deciding, None)
    while asked:
        before = list(asked.items())
        asked.clear()
        answers = readout.answer([question for _, (_, question) in before])
        for (index, (deciding, _)), answer in zip(before, answers, strict=True):
            go_on(index, deciding, answer)
    return [choices[index] for index in sorted(choices)]


def _parts(U: Cauchy, U0: Cauchy) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return U.loc, U.scale, U0.loc, U0.scale


def _processed(processors: Processors, input_ids: Tensor, logits: Tensor) -> Tensor:
    """``logits`` after all processors, called as the list calls them but without looking at their signatures
    at every token. With any, it is another tensor: some write into what they are given.
    """
    processed = logits.clone() if processors else logits
    for processor in processors:
        processed = processor(input_ids, processed)
    return processed


def _only_top_k(processors: Processors) -> int | None:
    """k, where nothing else is asked for, as transformers samples by default: only k tokens need scores."""
    first = processors[0]
    return first.k if len(processors) == 1 and isinstance(first, TopK) else None
