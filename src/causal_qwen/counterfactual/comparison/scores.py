"""Scores: a number for every text. What is built in, the user's own function, or the user's own command.

A score gets texts and returns as many numbers; NaN where a text has none, such as one without a number.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from causal_qwen.data import Prompt
from causal_qwen.data.fields import number_in
from causal_qwen.numbers import scan
from causal_qwen.prompting import Answer

__all__ = ["SCORES", "Said", "Score", "check_references", "is_yes_or_no", "score_of"]

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


@runtime_checkable
class HasFingerprint(Protocol):
    """A scorer that is told from others by more than its name."""

    def fingerprint(self) -> str:
        """Of what it scores by."""
        ...


@dataclass(frozen=True)
class Score:
    """A named function of texts.

    Args:
        name: As it was asked for.
        function: Texts to numbers.
        version: What tells the function from another one of this name; scores of both are not mixed.
    """

    name: str
    function: Scorer
    version: str = ""

    def __call__(self, texts: Sequence[Said]) -> list[float]:
        """A number per text.

        Raises:
            ValueError: If there are not as many, or one is not a number.
        """
        values = list(self.function(texts))
        if len(values) != len(texts):
            raise ValueError(f"score {self.name} gave {len(values)} numbers for {len(texts)} texts")
        return [self._number(value) for value in values]

    def _number(self, value: Any) -> float:
        try:
            number = float("text" if isinstance(value, str) else value)
        except (TypeError, ValueError, RuntimeError):  # the last of a tensor with several
            raise ValueError(f"score {self.name} gave {value!r:.40}; a score is a number") from None
        return number if math.isfinite(number) else math.nan


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
        asked = judge(parameter or None)
        return Score(spec, asked, asked.fingerprint() if isinstance(asked, HasFingerprint) else "")
    if name in WITH_PARAMETER:
        if not parameter:
            raise ValueError(f"score {spec!r} needs a parameter: {WITH_PARAMETER[name][1]}")
        words = shlex.split(parameter) if name == "command" else []
        return Score(spec, WITH_PARAMETER[name][0](parameter), _version(map(Path, words)))
    if parameter:
        own = _own_function(name, parameter)
        source = getattr(sys.modules[name], "__file__", None)
        return Score(spec, own, _version([Path(source)] if source else []))
    raise ValueError(f"score {spec!r} is unknown; give {SCORES}")


def check_references(scores: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse names of scores whose column a prompt's row lacks, before anything is said.

    Raises:
        ValueError: If one is missing; the message names it.
    """
    for name, _, column in (spec.partition(":") for spec in scores):
        for index, row in enumerate(rows if name in ("exact", "numeric") else ()):
            if row.get(column) is None:
                fields = ", ".join(row) or "none"
                raise ValueError(f"prompt {index + 1} has no {column!r} among its fields: {fields}")


def _version(files: Iterable[Path]) -> str:
    """A digest of the files that there are."""
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()


def is_yes_or_no(spec: str) -> bool:
    """Whether a score of this name is 0 or 1."""
    return spec.partition(":")[0] in ("match", "exact", "numeric", "contains")


def first_number(said: Said) -> float:
    """The first number that was generated as a value, or else in digits; NaN if there is none."""
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
        wanted, numbers = number_in(_reference(said, column), column, wanted=True), scan(said.text)
        if wanted is None or not numbers:
            return 0.0
        return float(math.isclose(float(numbers[0].value), float(wanted), rel_tol=AGREEMENT))

    return _each(agrees)


def _command(command: str) -> Scorer:
    words = shlex.split(command)
    if not words:
        raise ValueError(f"score 'command:{command}' names no command; {WITH_PARAMETER['command'][1]}")

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
