"""Files of prompts: each row is a request with settings in range, or is named with its file."""

import functools
import json

from causal_qwen.data import BadRows
from causal_qwen.prompting import Asking, Settings
from fuzzing.inputs import Mutated
from fuzzing.places import written
from fuzzing.target import Target

__all__ = ["TARGETS"]

ROWS = [
    {"id": "a", "prompt": "Japan 1980, 4 cylinders", "seed": 7, "max_new_tokens": 8, "stop": ["\n", "."]},
    {"prompt": "It costs", "temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2},
    {"messages": [{"role": "user", "content": "How tall?"}], "system": "Be brief.", "density_floor": 0.1},
    {"text": "第3章", "persistence": 0.5},
]


@functools.cache
def files() -> list[bytes]:
    """Whole files."""
    return ["\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()]


def check(data: bytes) -> None:
    """A file gives a request or a named error for each row; skipping and stopping agree."""
    file = written(data, ".prompts.jsonl")
    skipped = BadRows("skip")
    requests = Asking(Settings(mode="causal"), system="Hello").file(file, skipped)
    for request in requests:
        assert request.where.startswith(str(file))
        assert request.settings.max_new_tokens >= 1
    try:
        again = Asking(Settings(mode="causal"), system="Hello").file(file, BadRows("error"))
    except ValueError as error:
        if not skipped.count or str(file) not in str(error):
            raise AssertionError(f"{skipped.count} bad rows, and not named: {error}") from error
        raise
    assert again == requests


TARGETS = (Target(name="prompts", source=Mutated(files), check=check, share=20, seconds=10),)
