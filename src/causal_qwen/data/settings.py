"""Settings: flat YAML, of recipes that people write and of those that models carry.

What is read is bounded before anything is built of it: a file from elsewhere can be deep, or small and huge
once its aliases are resolved. This module does not know what the settings mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from causal_qwen.data.files import open_text

__all__ = ["parse_settings", "parse_value", "read_settings"]

DEEPEST = 8
LARGEST = 1_000_000  # characters


def read_settings(path: str | Path) -> dict[str, Any]:
    """The names and values of a YAML file.

    Raises:
        ValueError: If it is missing, is no flat mapping, or is broken; one line that names the file.
    """
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{path} is a directory; a recipe is a YAML file")
    try:
        with open_text(file, None, remedy="save it as UTF-8") as stream:
            text = stream.read(LARGEST + 1)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    return parse_settings(text, source=str(path))


def parse_settings(text: str, *, source: str) -> dict[str, Any]:
    """The names and values of a YAML text.

    Raises:
        ValueError: As for `read_settings`.
    """
    values = parse_value(text, source=source)
    if not isinstance(values, dict):
        raise ValueError(f"{source}: {_kind(values)}; a recipe is a mapping of names to values")
    for name in values:
        if not isinstance(name, str):
            raise ValueError(f"{source}: the key {name!r:.40} is no name")
    return values


def parse_value(text: str, *, source: str) -> Any:
    """One YAML value.

    Raises:
        ValueError: If it is broken, deep, large, or has aliases or the same key twice.
    """
    if len(text) > LARGEST:
        raise ValueError(f"{source}: more than {LARGEST:,} characters; a recipe is a short file")
    with _broken(source):
        problem = _problem(text)
    if problem is not None:
        raise ValueError(f"{source}:{problem}")
    with _broken(source):
        return yaml.safe_load(text)


@contextmanager
def _broken(source: str) -> Iterator[None]:
    """What the YAML reader says, in one line."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{source}{line}: broken YAML ({error.problem or error.context})") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date, an endless integer
        raise ValueError(f"{source}: broken YAML ({' '.join(str(error).split())})") from None


def _problem(text: str) -> str | None:
    """What is wrong with the structure, by its events and bounded nodes alone; nothing is built of them."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            return f"{line}: *{event.anchor}; a recipe has no aliases"
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEEPEST:
                return f"{line}: nested too deeply; a recipe is flat"
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    keys = [key for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    names: set[str] = set()
    for key in keys:
        if isinstance(key, yaml.ScalarNode):
            if key.value in names:
                return f"{key.start_mark.line + 1}: {key.value} is set twice"
            names.add(key.value)
    return None


def _kind(value: Any) -> str:
    return "empty" if value is None else f"a {type(value).__name__}"
