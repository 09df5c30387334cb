"""Scores: a number for every text. What is built in, the user's own function, or the user's own command.

A score gets texts and returns as many numbers; NaN where a text has none, such as one without a number.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from causal_qwen.data import Prompt
from causal_qwen.data.fields import number_in
from causal_qwen.numbers import scan
from causal_qwen.prompting import Answer

__all__ = ["SCORES", "Said", "Score", "score_of"]

AGREEMENT = 1e-6  # relative difference up to which two numbers agree
SCORES = (
    "length, tokens, distinct, number, match:REGEX, exact:COLUMN, numeric:COLUMN, nats, nats:JUDGE, "
    "module:function or command:COMMAND"
)


@dataclass(frozen=True)
class Said:
    """A text to be scored.

    Args:
        prompt: What was asked.
        answer: What was said: text, tokens, numbers, why it ended.
        side: "a" or "b".
        seed: Who said it.
        row: The prompt's row, with its references.
    """

    prompt: Prompt
    answer: Answer
    side: str
    seed: int
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Without the prompt."""
        return self.answer.text

    def to_dict(self) -> dict[str, Any]:
        """For JSON, as a command reads it."""
        row = {name: value for name, value in self.row.items() if name != "prompt"}
        whose = {"side": self.side, "prompt": self.prompt, "individual": self.seed, "row": row}
        return whose | {name: value for name, value in self.answer.to_dict().items() if name != "seed"}


Scorer = Callable[[Sequence[Said]], Sequence[float]]


@dataclass(frozen=True)
class Score:
    """A named function of texts.

    Args:
        name: As it was asked for.
        function: Texts to numbers.
    """

    name: str
    function: Scorer

    def __call__(self, texts: Sequence[Said]) -> list[float]:
        """A number per text.

        Raises:
            ValueError: If there are not as many, or one is not a number.
        """
        values = list(self.function(texts))
        if len(values) != len(texts):
            raise ValueError(f"score {self.name} gave {len(values)} numbers for {len(texts)} texts")
        for value in values:
            if not isinstance(value, int | float):
                raise ValueError(f"score {self.name} gave {value!r:.40}; a score is a number")
        return [float(value) if math.isfinite(value) else math.nan for value in values]


def score_of(spec: str, *, judge: Callable[[str | None], Scorer] | None = None) -> Score:
    """The score of a name, as on the command line.

    Args:
        spec: One of `SCORES`.
        judge: Makes the function of "nats" by the name of a model, None for the first side's.

    Raises:
        ValueError: If there is no such score, or its parameter is wrong.
    """
    name, _, parameter = spec.partition(":")
    if spec in PLAIN:
        return Score(spec, _each(PLAIN[spec]))
    if name == "nats":
        if judge is None:
            raise ValueError("score 'nats' needs a judge; give compare() a Judge as score")
        return Score(spec, judge(parameter or None))
    if name in WITH_PARAMETER:
        if not parameter:
            raise ValueError(f"score {spec!r} needs a parameter: {WITH_PARAMETER[name][1]}")
        return Score(spec, WITH_PARAMETER[name][0](parameter))
    if parameter:
        return Score(spec, _own_function(name, parameter))
    raise ValueError(f"score {spec!r} is unknown; give {SCORES}")


def first_number(said: Said) -> float:
    """The first number that was generated, as a value or in digits; NaN if there is none."""
    if said.answer.numbers:
        return said.answer.numbers[0].value
    numbers = scan(said.text)
    return float(numbers[0].value) if numbers else math.nan


def _each(function: Callable[[Said], float]) -> Scorer:
    return lambda texts: [function(said) for said in texts]


def _match(pattern: str) -> Scorer:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"match:{pattern} is not a regular expression: {error}") from None
    return _each(lambda said: float(expression.search(said.text) is not None))


def _reference(said: Said, column: str) -> Any:
    if said.row.get(column) is None:
        fields = ", ".join(said.row) or "none"
        raise ValueError(f"the prompt {said.prompt!r:.40} has no {column!r} among its fields: {fields}")
    return said.row[column]


def _exact(column: str) -> Scorer:
    return _each(lambda said: float(said.text.strip() == str(_reference(said, column)).strip()))


def _numeric(column: str) -> Scorer:
    def agrees(said: Said) -> float:
        wanted, value = number_in(_reference(said, column), column, wanted=True), first_number(said)
        return float(wanted is not None and math.isclose(value, float(wanted), rel_tol=AGREEMENT))

    return _each(agrees)


def _command(command: str) -> Scorer:
    words = shlex.split(command)

    def run(texts: Sequence[Said]) -> list[float]:
        lines = "".join(json.dumps(said.to_dict(), ensure_ascii=False) + "\n" for said in texts)
        try:
            done = subprocess.run(words, input=lines, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ValueError(f"score command {words[0]!r}: {error.strerror}") from None
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"score command {words[0]!r} ended with code {done.returncode}: {reason:.200}")
        numbers = done.stdout.split()
        try:
            return [float(number) for number in numbers]
        except ValueError as error:
            raise ValueError(f"score command {words[0]!r} writes a number per line: {error}") from None

    return run


def _own_function(module: str, function: str) -> Scorer:
    try:
        own = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"score {module}:{function}: {error}; known are {SCORES}") from None
    return _each(own)


PLAIN: dict[str, Callable[[Said], float]] = {
    "length": lambda said: float(len(said.text)),
    "characters": lambda said: float(len(said.text)),
    "tokens": lambda said: float(said.answer.tokens),
    "distinct": lambda said: float(len(set(said.answer.token_ids))),
    "number": first_number,
}
WITH_PARAMETER: dict[str, tuple[Callable[[str], Scorer], str]] = {
    "match": (_match, "match:REGEX"),
    "exact": (_exact, "exact:COLUMN of the prompts"),
    "numeric": (_numeric, "numeric:COLUMN of the prompts"),
    "command": (_command, "command:COMMAND that reads JSONL and writes a number per line"),
}
