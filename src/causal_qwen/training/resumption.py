"""What a run was begun with: it is resumed with the same recipe and the same data, or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from causal_qwen.conversion.files import write_file
from causal_qwen.training.preparation import Rows
from causal_qwen.training.recipe import TrainingRecipe

__all__ = ["changes_of", "check_same_data", "check_same_recipe"]

# What may differ when a run is resumed: it changes what is told or kept, not what is computed.
FREE_FIELDS = {"report_to", "run_name", "save_total_limit", "diagnostics"}
RUN_FILE = "run.json"


def changes_of(before: Mapping[str, Any], recipe: TrainingRecipe) -> list[str]:
    """What a run was begun with that the recipe says otherwise now, in words."""
    defaults = dataclasses.asdict(TrainingRecipe(output=recipe.output))
    fixed = dataclasses.asdict(recipe).keys() - FREE_FIELDS - {"output"}  # it was found there
    fields = {name: value for name, value in dataclasses.asdict(recipe).items() if name in fixed}
    old = {name: before[name] if name in before else defaults[name] for name in fields}
    return [f"{name} {old[name]!r}, not {value!r}" for name, value in fields.items() if value != old[name]]


def check_same_recipe(recipe: TrainingRecipe, workspace: Path) -> None:
    """Refuse to resume with another recipe: the result would be neither run's."""
    before = _begun(workspace)
    changes = [] if before is None else changes_of(before["recipe"], recipe)
    if changes:
        raise ValueError(
            f"{workspace} was begun with {', '.join(changes)}; resume it with that, or begin anew "
            "(--overwrite)"
        )


def check_same_data(recipe: TrainingRecipe, parts: Rows, workspace: Path) -> None:
    """Refuse to resume with other data, and write down those of a new run."""
    before = _begun(workspace)
    if before is not None and before["data"] != parts.digest:
        raise ValueError(f"{workspace} was begun with other data; resume it with those, or begin anew")
    write_file(workspace / RUN_FILE, json.dumps({"recipe": dataclasses.asdict(recipe), "data": parts.digest}))


def _begun(workspace: Path) -> dict[str, Any] | None:
    """What an interrupted run has written down when it began."""
    file = workspace / RUN_FILE
    if not file.is_file():
        return None
    try:
        before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        raise ValueError(f"{file} is damaged; begin anew (--overwrite)") from None
    return before
