"""Local records: metrics.jsonl, one line per record, and what reads it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

from causal_qwen.conversion.files import write_file

__all__ = ["METRICS_FILE", "LocalRecords", "as_lines", "defined", "read_records"]

METRICS_FILE = "metrics.jsonl"


class LocalRecords(TrainerCallback):
    """Appends every record to metrics.jsonl and flushes it; a resumed run continues where its checkpoint was.

    Args:
        directory: Of the file.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / METRICS_FILE

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Drop records of steps that will be taken again."""
        if state.is_world_process_zero:
            step = state.global_step
            earlier = [record for record in read_records(self.path) if step and record["step"] <= step]
            write_file(self.path, as_lines(earlier))

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        """Append one record."""
        if state.is_world_process_zero and logs:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(as_lines([{"step": state.global_step, "time": time.time(), **logs}]))


def as_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """One line of JSON per record."""
    return "".join(json.dumps(defined(record)) + "\n" for record in records)


def defined(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with None for NaN and infinity, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that a power cut has torn is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
