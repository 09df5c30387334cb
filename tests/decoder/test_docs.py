"""The code in the walk through the decoder runs as it is printed."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "decoder.md"


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 6
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    namespace = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), namespace)
    torch.set_num_threads(threads)
    assert namespace["out"].lengths
