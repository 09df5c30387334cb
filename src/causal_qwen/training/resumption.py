"""What a run was begun with: it is resumed with the same recipe and the same data, or not at all.

It may be resumed on another number of processes, as long as a step takes as many rows as before: then these
are the same rows in the same order, and only sums are taken in another one.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from causal_qwen.conversion.files import write_file
from causal_qwen.training.preparation import Rows
from causal_qwen.training.recipe import TrainingRecipe

__all__ = ["changes_of", "check_same_data", "check_same_recipe"]

# What may differ when a run is resumed: it changes what is told or kept, not what is computed.
FREE_FIELDS = {"report_to", "run_name", "save_total_limit", "diagnostics"}
STEP_FIELDS = ("batch_size", "accumulation")  # with the number of processes, the rows of a step
RUN_FILE = "run.json"


def changes_of(
    before: Mapping[str, Any], recipe: TrainingRecipe, *, processes_before: int, processes: int
) -> list[str]:
    """What a run was begun with that the recipe, on so many processes, says otherwise now, in words."""
    defaults = dataclasses.asdict(TrainingRecipe(output=recipe.output))
    fixed = dataclasses.asdict(recipe).keys() - FREE_FIELDS - {"output"}  # it was found there
    fields = {name: value for name, value in dataclasses.asdict(recipe).items() if name in fixed}
    old = {name: before[name] if name in before else defaults[name] for name in fields}
    changed = [name for name, value in fields.items() if value != old[name]]
    others = [f"{name} {old[name]!r}, not {fields[name]!r}" for name in changed if name not in STEP_FIELDS]
    steps = [(processes_before, *(old[name] for name in STEP_FIELDS))]
    steps.append((processes, *(fields[name] for name in STEP_FIELDS)))
    if math.prod(steps[0]) == math.prod(steps[1]):
        return others
    rows = [f"{math.prod(step)} ({' × '.join(map(str, step))})" for step in steps]
    return [f"{rows[0]} rows per step, processes × batch_size × accumulation, not {rows[1]}", *others]


def check_same_recipe(recipe: TrainingRecipe, workspace: Path, *, processes: int) -> None:
    """Refuse to resume with another recipe: the result would be neither run's."""
    before = _begun(workspace)
    if before is None:
        return
    changes = changes_of(before["recipe"], recipe, processes_before=before["processes"], processes=processes)
    if changes:
        raise ValueError(
            f"{workspace} was begun with {', '.join(changes)}; resume it with that, or begin anew "
            "(--overwrite)"
        )


def check_same_data(recipe: TrainingRecipe, parts: Rows, workspace: Path, *, processes: int) -> None:
    """Refuse to resume with other data, and write down those of a new run."""
    before = _begun(workspace)
    if before is not None and before["data"] != parts.digest:
        raise ValueError(f"{workspace} was begun with other data; resume it with those, or begin anew")
    facts = {"recipe": dataclasses.asdict(recipe), "data": parts.digest, "processes": processes}
    write_file(workspace / RUN_FILE, json.dumps(facts))


def _begun(workspace: Path) -> dict[str, Any] | None:
    """What an interrupted run has written down when it began."""
    file = workspace / RUN_FILE
    if not file.is_file():
        return None
    try:
        before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        raise ValueError(f"{file} is damaged; begin anew (--overwrite)") from None
    return {"processes": 1, **before}  # earlier versions did not count them
