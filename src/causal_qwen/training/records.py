"""Local records: metrics.jsonl, one line per record, and what reads it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

__all__ = ["METRICS_FILE", "LocalRecords", "defined", "read_records"]

METRICS_FILE = "metrics.jsonl"


class LocalRecords(TrainerCallback):
    """Appends every record to metrics.jsonl and flushes it; a resumed run continues where its checkpoint was.

    Args:
        directory: Of the file.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / METRICS_FILE

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Drop records of steps that will be taken again."""
        if state.is_world_process_zero:
            kept = [record for record in read_records(self.path) if record["step"] <= state.global_step]
            partial = self.path.with_suffix(".partial")
            partial.write_text(
                "".join(_line(record) for record in kept if state.global_step), encoding="utf-8"
            )
            partial.replace(self.path)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        """Append one record."""
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(_line({"step": state.global_step, "time": time.time(), **event["logs"]}))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(defined(record)) + "\n"


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
