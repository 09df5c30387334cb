"""The model card of a converted model: what it is, where it came from, and how to ask it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["conversion_card"]


def conversion_card(report: Mapping[str, Any]) -> str:
    """README.md, from the report of a conversion; of a local source only its name is told."""
    source = Path(report["source"]).name if Path(report["source"]).exists() else report["source"]
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [causal-qwen]
---

# A CausalQwen model

Converted from `{source}` by `causal-qwen convert`: on day one its deterministic text is the base's.
`<NUM>` is token {report["num_token_id"]}; calibration `{report["calibration"]["mode"]}`,
seed {report["seed"]}; the whole report is in `conversion.json`.

```python
from causal_qwen import CausalQwen2Processor
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIRECTORY").eval()
processor = CausalQwen2Processor.from_pretrained("DIRECTORY")
inputs = processor("Once upon a time", return_tensors="pt")
print(processor.batch_decode(model.generate(**inputs, max_new_tokens=20, return_dict_in_generate=True)))
```
"""
