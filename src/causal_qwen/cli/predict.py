"""causal-qwen predict MODEL DATA -o OUT."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from causal_qwen.cli.console import note, print_json, print_table, quiet_libraries
from causal_qwen.cli.convert import Dtype
from causal_qwen.cli.models import MODEL_HELP, load
from causal_qwen.cli.rows import DATA_HELP, TARGET_HELP, TEMPLATE_HELP, OnBadRow


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
    quiet_libraries()
    from tqdm import tqdm

    from causal_qwen.cauchy import central_multiple
    from causal_qwen.data import BadRows, Reading
    from causal_qwen.evaluation import predict
    from causal_qwen.evaluation.tables import GrowingTable

    central_multiple(level)  # a wrong level is named before anything is loaded
    reading = Reading.of(model, template=template, target=target)
    bad_rows = BadRows(on_bad_row.value)
    settings = {
        "model": _state(model),
        "data": _state(data),
        "template": reading.template,
        "target": reading.target,
        "level": level,
        "raw": raw,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with GrowingTable(output, settings) as table:
        loaded, processor = load(model, device=device, dtype=dtype.value)
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
        print_table(str(output), [(name, str(entry)) for name, entry in summary.items()])


def _state(place: str) -> list[Any]:
    """What changes when a file or a model directory does: its size and time."""
    path = Path(place) / "config.json" if Path(place).is_dir() else Path(place)
    status = path.stat() if path.is_file() else None
    return [place, *([status.st_size, status.st_mtime_ns] if status else [])]
