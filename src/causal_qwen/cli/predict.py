"""causal-qwen predict MODEL DATA -o OUT."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from causal_qwen.cli.console import note, print_json, print_table
from causal_qwen.cli.convert import Dtype
from causal_qwen.cli.models import MODEL_HELP, load
from causal_qwen.cli.rows import DATA_HELP, TARGET_HELP, TEMPLATE_HELP, OnBadRow, prompts, reading

if TYPE_CHECKING:
    from causal_qwen.evaluation.predict import Prediction


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    data: Annotated[str, typer.Argument(help=DATA_HELP)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Table to write: .csv, .parquet or .jsonl.", dir_okay=False)
    ],
    template: Annotated[str | None, typer.Option(help=TEMPLATE_HELP)] = None,
    target: Annotated[str | None, typer.Option(help=TARGET_HELP)] = None,
    level: Annotated[float, typer.Option(help="Probability of the intervals.")] = 0.9,
    raw: Annotated[
        bool, typer.Option("--raw", help="Intervals of the Cauchy law itself, not the calibrated ones.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Rows per forward pass.", min=1)] = 32,
    on_bad_row: Annotated[OnBadRow, typer.Option(help="Stop at a bad row, or skip it.")] = OnBadRow.error,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the table if it exists.")] = False,
    device: Annotated[str | None, typer.Option(help="Such as cuda; the CPU if not given.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Precision of the weights.")] = Dtype.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")] = False,
) -> None:
    """Predict the number that comes next in each row, with an interval; an interrupted run is continued."""
    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists; choose another file, or allow --overwrite")
    from causal_qwen.cauchy import central_multiple
    from causal_qwen.evaluation.tables import GrowingTable

    central_multiple(level)  # a wrong level is named before anything is loaded
    how = reading(model, template, target)
    settings = {"model": _state(model), "data": _state(data), "template": how.template, "target": how.target}
    output.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with GrowingTable(output, settings | {"level": level, "raw": raw}) as table:
        loaded, processor = load(model, device=device, dtype=dtype.value)
        from tqdm import tqdm

        from causal_qwen.evaluation.predict import predict
        from causal_qwen.training.data import BadRows

        if not raw and loaded.config.conformal_scores is None:
            note("this model carries no calibration of its intervals: they are those of the Cauchy law")
        if table.done:
            note(f"continuing behind row {table.done - 1}")
        bad_rows = BadRows(on_bad_row.value)
        rows = itertools.islice(prompts(processor, data, how, bad_rows), table.done, None)
        asked, kept = itertools.tee(rows)
        read = predict(
            loaded, processor, (prompt for _, prompt in asked), level=level, raw=raw, batch_size=batch_size
        )
        for row in tqdm(_rows(kept, read, table.done), desc="predicting", unit="row", disable=None):
            table.write(row)
        count = table.finish()
    if count == 0:
        note(f"{data} has no rows: {output} is empty")
    summary = {
        "output": str(output),
        "rows": count,
        "continued_from": table.done,
        "bad_rows": bad_rows.count,
        "level": level,
        "intervals": "cauchy" if raw or loaded.config.conformal_scores is None else "conformal",
        "seconds": time.perf_counter() - start,
    }
    if as_json:
        print_json(summary)
    else:
        print_table(str(output), [(name, str(entry)) for name, entry in summary.items()])


def _rows(
    asked: Iterator[tuple[str, str]], read: Iterator[Prediction], first: int
) -> Iterator[dict[str, Any]]:
    # The predictions come first in the pair: they decide how far the prompts are read ahead.
    for index, (prediction, (where, prompt)) in enumerate(zip(read, asked, strict=False), start=first):
        yield {"row": index, "source": where, "prompt": prompt, **asdict(prediction)}


def _state(place: str) -> list[Any]:
    """What changes when a file or a model directory does: its size and time."""
    path = Path(place) / "config.json" if Path(place).is_dir() else Path(place)
    found = path.stat() if path.is_file() else None
    return [place, *([found.st_size, found.st_mtime_ns] if found else [])]
