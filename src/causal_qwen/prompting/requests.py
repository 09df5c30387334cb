"""Files of prompts: a line or a JSON object each, with settings of its own. This module knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from causal_qwen.data import BadRows, Prompt, read_rows
from causal_qwen.data.files import kind_of, open_text
from causal_qwen.data.reading import read_prompt
from causal_qwen.prompting.settings import PER_PROMPT, Settings

__all__ = ["Asking", "Request"]

TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
PROMPTS = ("id", "prompt", "text", "messages", "system")


@dataclass(frozen=True)
class Request:
    """One prompt of a file.

    Args:
        id: The row's own, or its index.
        where: File and line.
        prompt: Text, or messages.
        settings: The file's, with the row's own above them.
        row: As it was read, with fields that mean nothing to a prompt.
    """

    id: Any
    where: str
    prompt: Prompt
    settings: Settings
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Asking:
    """How rows become requests.

    Args:
        settings: For all prompts.
        chat: Whether a text is a message, which the chat template opens an answer to.
        system: System message of chats that begin without one.
        unused: Fields that were read and mean nothing here.
    """

    settings: Settings
    chat: bool = False
    system: str | None = None
    unused: set[str] = field(default_factory=set)

    def file(self, path: str | Path, bad_rows: BadRows) -> list[Request]:
        """The requests of a file, in its order; what cannot be used goes to ``bad_rows``.

        Args:
            path: A table (.jsonl and others, as for `read_rows`), else a text with a prompt in each line;
                empty lines are passed over.
            bad_rows: Told of rows that are no prompts.

        Raises:
            ValueError: If there is no such file, or it is not text.
        """
        rows: Iterable[tuple[str, Mapping[str, Any]]]
        rows = read_rows(path, bad_rows=bad_rows) if kind_of(Path(path)) in TABLES else _lines(Path(path))
        requests = []
        for index, (where, row) in enumerate(rows):
            try:
                requests.append(self.request(where, row, index))
            except ValueError as error:
                bad_rows.add(where, str(error))
        return requests

    def request(self, where: str, row: Mapping[str, Any], index: int) -> Request:
        """One row as a request.

        Raises:
            ValueError: If it has no prompt, or a setting is out of range.
        """
        if not row.keys() & {"prompt", "text", "messages"}:
            raise ValueError(f"neither prompt, text nor messages among the fields {', '.join(row) or 'none'}")
        self.unused |= row.keys() - {*PROMPTS, *PER_PROMPT}
        example = read_prompt(where, row, None)
        own = {name: row[name] for name in PER_PROMPT if name in row}
        identity = row["id"] if row.get("id") is not None else index
        system = row.get("system", self.system)
        if system is not None and not isinstance(system, str):
            raise ValueError(f"system is {system!r:.40}, not a text")
        prompt = self.prompt(example.prompt if example.messages is None else example.messages, system)
        return Request(identity, where, prompt, self.settings.updated(own), row)

    def prompt(self, prompt: Prompt, system: str | None = None) -> Prompt:
        """A text as it is, or as a message of a chat; a chat with its system message."""
        system = self.system if system is None else system
        if isinstance(prompt, str):
            if not self.chat and system is None:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if system is None or prompt[0]["role"] == "system":
            return prompt
        return [{"role": "system", "content": system}, *prompt]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with open_text(path, None, remedy="save it as UTF-8") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"{path}:{number}", {"prompt": line.rstrip("\n")}
