"""What we use of transformers that is not public stands in one list, with its reason."""

import ast
import re
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, ProcessorMixin, TextStreamer, Trainer
from transformers.generation.utils import GenerationMixin

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs" / "reference" / "internals.md"
CLASSES = (GenerationConfig, GenerationMixin, PreTrainedModel, ProcessorMixin, TextStreamer, Trainer)


def private_names(file):
    """Attributes that are read or set, and methods and class attributes that are defined."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    yield item.name
                elif isinstance(item, ast.Assign):
                    yield from (target.id for target in item.targets if isinstance(target, ast.Name))


def test_the_list_is_what_the_code_uses():
    used = {name for file in (ROOT / "src").rglob("*.py") for name in private_names(file)}
    of_transformers = {name for cls in CLASSES for name in dir(cls)}
    private = {name for name in used & of_transformers if re.match(r"_[a-z]", name)}
    listed = set(re.findall(r"^\| `(_\w+)`", LIST.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert private == listed


def test_private_modules_are_not_imported():
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                assert not any(alias.name.startswith("_") for alias in node.names), file
