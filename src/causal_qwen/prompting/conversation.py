"""A conversation: its messages, how it is decided and by whom, and its file.

The same individual answers throughout: each answer goes on along its noise path. This module knows no
terminal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from causal_qwen.context import ContextError
from causal_qwen.conversion.files import write_file
from causal_qwen.data.reading import read_messages
from causal_qwen.individual import Individual
from causal_qwen.prompting.answers import Answer, Speaker
from causal_qwen.prompting.settings import Settings

__all__ = ["Conversation"]

# In every file, so that a file of something else is told apart.
KIND = "causal-qwen conversation"


@dataclass
class Conversation:
    """What was said so far, and who answers.

    Args:
        settings: With a mode; "standard" decides without noise.
        individual: Who answers.
        system: System message.
        messages: The turns, without the system message.
    """

    settings: Settings
    individual: Individual
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(
        self, speaker: Speaker, question: str, *, tell: Callable[[str], None] | None = None
    ) -> tuple[Answer, int]:
        """The answer to a question; both are kept.

        Turns that no longer fit the context together with the new tokens are left out of what the model
        reads, the oldest first; the system message stays.

        Args:
            speaker: Who is asked.
            question: What the user says.
            tell: Given the pieces of the answer as they come.

        Returns:
            The answer, and how many of the oldest messages the model did not read.

        Raises:
            ValueError: If the question alone does not fit, or cannot be read; nothing is kept then.
        """
        asked = {"role": "user", "content": question}
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        left_out = 0
        while True:
            prompt = [*opening, *self.messages[left_out:], asked]
            try:
                speaker.check(prompt, self.settings)
                break
            except ContextError:
                if left_out >= len(self.messages):
                    raise
                left_out = self._next_question(left_out)
        (answer,) = speaker.answer([prompt], self.settings, [self.individual], tell=tell)
        self.messages += [asked, {"role": "assistant", "content": answer.text}]
        # The next answer goes on along this individual's path instead of repeating its noise.
        self.individual = replace(self.individual, start=self.individual.start + answer.tokens)
        return answer, left_out

    def _next_question(self, start: int) -> int:
        """Index of the first message of the user's behind ``start``, or the end."""
        later = range(start + 1, len(self.messages))
        return next((index for index in later if self.messages[index]["role"] == "user"), len(self.messages))

    def restart(self) -> None:
        """Forget what was said; the individual begins its path again."""
        self.messages = []
        self.individual = replace(self.individual, start=0)

    def save(self, file: str | Path) -> None:
        """Write all of it as JSON, whole or not at all.

        Raises:
            ValueError: If something that is no conversation stands there, or there is no such directory.
        """
        target = Path(file).expanduser()
        if not target.parent.is_dir():
            raise ValueError(f"{target.parent}: no such directory")
        if target.exists():
            try:
                Conversation.load(target)
            except ValueError as error:
                raise ValueError(f"{error}; it is left as it is, choose another name") from None
        content = {
            "kind": KIND,
            "system": self.system,
            "messages": self.messages,
            "settings": self.settings.to_dict(),
            "individual": json.loads(self.individual.to_json()),
        }
        write_file(target, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, file: str | Path) -> Conversation:
        """Read what `save` wrote.

        Raises:
            ValueError: If the file is missing, unreadable or no conversation.
        """
        path = Path(file).expanduser()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise ValueError(f"{path} is not a saved conversation (no JSON)") from None
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise ValueError(f"{path} is not a saved conversation")
        try:
            return cls._of(content)
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is a damaged conversation: {reason}") from None

    @classmethod
    def _of(cls, content: dict[str, Any]) -> Conversation:
        own = content["settings"]
        if not isinstance(own, dict):
            raise ValueError(f"settings is {own!r:.40}, not an object")
        unknown = own.keys() - {one.name for one in fields(Settings)}
        if unknown:
            raise ValueError(f"unknown settings {', '.join(sorted(unknown))}")
        settings = Settings().updated(own)
        if settings.mode is None:
            raise ValueError("settings have no mode")
        system = content["system"]
        if system is not None and not isinstance(system, str):
            raise ValueError(f"system is {system!r:.40}, not a text")
        messages = [dict(turn) for turn in read_messages(content["messages"])] if content["messages"] else []
        individual = Individual.from_json(json.dumps(content["individual"]))
        return cls(settings, individual, system, messages)
