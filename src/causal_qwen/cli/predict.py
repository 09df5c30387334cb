"""causal-qwen predict MODEL DATA -o OUT."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json, print_table, quiet_libraries
from causal_qwen.cli.models import load


def command(
    model: shared.Model,
    data: shared.Data,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Table to write: .csv, .parquet or .jsonl.", dir_okay=False)
    ],
    template: shared.Template = None,
    target: shared.Target = None,
    level: shared.Level = 0.9,
    raw: Annotated[
        bool, typer.Option("--raw", help="Intervals of the Cauchy law itself, not the calibrated ones.")
    ] = False,
    batch_size: shared.BatchSize = 32,
    on_bad_row: shared.BadRow = "error",
    overwrite: shared.Overwrite = False,
    device: shared.Device = None,
    dtype: shared.Dtype = "auto",
    as_json: shared.AsJson = False,
) -> None:
    """Predict the number that comes next in each row, with an interval; an interrupted run is continued."""
    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists; choose another file, or allow --overwrite")
    quiet_libraries()
    from tqdm import tqdm

    from causal_qwen.cauchy import central_multiple
    from causal_qwen.data import BadRows, Reading
    from causal_qwen.evaluation import predict
    from causal_qwen.evaluation.tables import GrowingTable

    central_multiple(level)  # a wrong level is named before anything is loaded
    reading = Reading.of(model, template=template, target=target)
    bad_rows = BadRows(on_bad_row)
    settings = {
        "model": state(model),
        "data": state(data),
        "template": reading.template,
        "target": reading.target,
        "level": level,
        "raw": raw,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with GrowingTable(output, settings) as table:
        loaded, processor = load(model, device=device, dtype=dtype)
        if not raw and loaded.config.conformal_scores is None:
            note("this model carries no calibration of its intervals: they are those of the Cauchy law")
        if table.done:
            note(f"continuing behind row {table.done - 1}")
        predictions = predict(
            loaded,
            processor,
            data,
            reading=reading,
            level=level,
            raw=raw,
            batch_size=batch_size,
            bad_rows=bad_rows,
            start=table.done,
        )
        bar = tqdm(predictions, desc="predicting", unit="row", disable=None)
        for index, prediction in enumerate(bar, start=table.done):
            table.write({"row": index, **asdict(prediction)})
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
        print_table(str(output), summary.items())


def state(place: str) -> list[Any]:
    """What changes when a file or a model directory does: its size and time."""
    path = Path(place) / "config.json" if Path(place).is_dir() else Path(place)
    status = path.stat() if path.is_file() else None
    return [place, *([status.st_size, status.st_mtime_ns] if status else [])]
