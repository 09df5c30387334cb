"""A small comparison of a talker with itself under other settings, the same for every engine."""

import tempfile
from dataclasses import replace
from pathlib import Path

from causal_qwen import Side, compare
from causal_qwen.prompting import Settings

PROMPTS = ("The capital of France is", "Once upon a time, there was")
SETTINGS = Settings(max_new_tokens=8)
OTHERS = replace(SETTINGS, temperature=0.7, top_p=0.9)


def compared(talker, *, prompts: int, **options) -> dict:
    """Lines of the pairs, and figures."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "pairs.jsonl"
        result = compare(
            Side(talker, PROMPTS[:prompts], SETTINGS),
            Side(talker, PROMPTS[:prompts], OTHERS),
            scores=["distinct", "length"],
            output=output,
            **options,
        )
        return {"lines": output.read_text().splitlines(), "figures": result.to_dict()}
