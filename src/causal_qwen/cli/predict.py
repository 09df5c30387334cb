"""causal-qwen predict MODEL [DATA]."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json, print_table, quiet_libraries
from causal_qwen.cli.interruption import on_interruption
from causal_qwen.cli.models import load_predictor
from causal_qwen.cli.progress import counted
from causal_qwen.cli.shards import Shard, divided
from causal_qwen.directories import check_output_file

if TYPE_CHECKING:
    from causal_qwen.data import Source

STANDARD_OUTPUT = Path("-")
MANY = 512  # rows that vLLM is given at a time: it batches them itself


def command(
    model: shared.Model,
    data: Annotated[
        str | None, typer.Argument(help="JSONL, JSON, CSV, TSV, Parquet or text; also .gz. Or give --row.")
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option(
            help="""One row instead of a file: '{"cut": "Ideal", "carat": 0.3}', or --row cut=Ideal --row """
            "carat=0.3."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Table to write: .csv, .parquet or .jsonl; - or nothing is standard output.",
            dir_okay=False,
        ),
    ] = None,
    format: Annotated[
        Literal["csv", "jsonl", "parquet"] | None,
        typer.Option("--format", help="Of the table; by its suffix, and csv on standard output."),
    ] = None,
    template: shared.Template = None,
    target: shared.Target = None,
    delimiter: shared.Delimiter = None,
    encoding: shared.Encoding = None,
    level: shared.Level = 0.9,
    raw: Annotated[
        bool, typer.Option("--raw", help="Intervals of the Cauchy law itself, not the calibrated ones.")
    ] = False,
    batch_size: shared.BatchSize = 32,
    on_bad_row: shared.BadRow = "error",
    overwrite: shared.Overwrite = False,
    device: shared.Device = None,
    dtype: shared.Precision = "auto",
    engine: shared.FileEngine = "auto",
    processes: shared.Processes = 1,
    shard: shared.ShardText = "0/1",
    as_json: shared.AsJson = False,
) -> None:
    """Predict the number that comes next in each row, with an interval; an interrupted run is continued."""
    file = None if output in (None, STANDARD_OUTPUT) else output
    if (data is None) == (not row):
        raise ValueError("name a file with rows, or give one with --row; not both")
    if processes > 1 and (engine != "vllm" or file is None or row):
        raise ValueError(f"--processes {processes} needs --engine vllm, a file of rows and --output")
    if file is not None:
        check_output_file(file, overwrite=overwrite)
    if file is None and format == "parquet":
        raise ValueError("--format parquet is written to a file; name one with -o")
    if file is None and as_json and format == "csv":
        raise ValueError("--json and --format csv on standard output; give one of them")
    quiet_libraries()
    from causal_qwen.cauchy import central_multiple
    from causal_qwen.data import BadRows, Files, Reading, read_columns
    from causal_qwen.evaluation import predict
    from causal_qwen.evaluation.predict import COLUMNS, column_of
    from causal_qwen.evaluation.tables import GrowingTable, format_of, plain, print_rows

    kind = format or ("csv" if file is None else format_of(file))
    central_multiple(level)  # a wrong level is named before anything is loaded
    reading = Reading.of(model, template=template, target=target)
    source: Source = _rows(row) if row else Files(data or "", delimiter=delimiter, encoding=encoding)
    columns = COLUMNS | {column_of(name): str for name in read_columns(source)}
    next(reading.prompts(source, BadRows(on_bad_row, silent=True)), None)
    bad_rows = BadRows(on_bad_row)
    part = Shard.read(shard)
    start = time.perf_counter()
    intervals, ran = "cauchy", None

    def records(first: int) -> Iterator[dict[str, Any]]:
        nonlocal intervals, ran
        if processes > 1 and file is not None:
            ran = engine
            return itertools.islice(divided(file, processes, "--format", "jsonl"), first, None)
        loaded, processor, native = load_predictor(
            engine, model, device=device, dtype=dtype, share=part.every
        )
        ran = engine if engine == "vllm" else "transformers" if native is None else "native"
        if not raw and loaded.config.conformal_scores is not None:
            intervals = "conformal"
        elif not raw:
            note("this model carries no calibration of its intervals: they are those of the Cauchy law")
        predictions = predict(
            loaded,
            processor,
            source,
            reading=reading,
            level=level,
            raw=raw,
            batch_size=batch_size if engine != "vllm" else max(batch_size, MANY),
            bad_rows=bad_rows,
            start=first,
            step=part,
            engine=native,
        )
        shown = counted(predictions, "predicting", "rows", done=first)
        return (prediction.record(part.row(place)) for place, prediction in enumerate(shown, start=first))

    if file is None:
        if row and format is None and not as_json:
            for record in map(plain, records(0)):
                print_table(record["prompt"], [*_answer(record, level)])
            return
        count = print_rows(records(0), sys.stdout, format="jsonl" if as_json else kind, columns=columns)
        note(f"{count} rows predicted" + (f"; {bad_rows}" if bad_rows.count else ""))
        return
    settings = {
        "model": state(model),
        "data": row or state(data or ""),
        "template": reading.templates[0] if reading.templates else None,
        "target": reading.target,
        "delimiter": delimiter,
        "encoding": encoding,
        "level": level,
        "raw": raw,
        "engine": engine,
        "dtype": dtype,
        "shard": list(part),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with GrowingTable(file, settings, columns=columns, format=kind) as table:
        on_interruption(table.kept)
        if table.done:
            note(f"continuing behind row {table.done - 1}")
        for record in records(table.done):
            table.write(record)
        count = table.finish()
    if count == 0:
        note(f"{data} has no rows: {file} has its header alone")
    if bad_rows.count:
        note(str(bad_rows))
    summary = {
        "output": str(file),
        "rows": count,
        "continued_from": table.done,
        "bad_rows": bad_rows.count,
        "level": level,
        "intervals": intervals,
        "engine": ran,
        "seconds": time.perf_counter() - start,
    }
    if as_json:
        print_json(summary)
    else:
        print_table(str(file), summary.items())


def _rows(texts: list[str]) -> list[Mapping[str, Any]]:
    """Rows that were typed: each a JSON object, or one row of NAME=VALUE pairs.

    Raises:
        ValueError: If a text is neither.
    """
    rows: list[Mapping[str, Any]] = []
    pairs: dict[str, str] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            try:
                rows.append(json.loads(text))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"--row {text:.60}: broken JSON ({error})") from None
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ValueError(f'--row {text:.60}: write NAME=VALUE, or {{"NAME": VALUE, …}}')
        if name.strip() in pairs:
            raise ValueError(f"--row {name.strip()} is given twice; write several rows as JSON objects")
        pairs[name.strip()] = value.strip()
    if rows and pairs:
        raise ValueError("--row as JSON and as NAME=VALUE; give one of them")
    return rows or [pairs]


def _answer(record: Mapping[str, Any], level: float) -> Iterator[tuple[str, object]]:
    """What is shown of one prediction."""
    yield "median", record["median"]
    yield (
        f"{100 * level:.6g}% interval",
        " to ".join(
            "unbounded" if record[end] is None else f"{record[end]:.6g}" for end in ("lower", "upper")
        ),
    )
    yield "probability of a number", record["prob_num"]
    if record["extrapolates"]:
        yield "extrapolates", "yes: beyond what training has seen, and the interval is not the calibrated one"


def state(place: str) -> list[Any]:
    """What changes when a file or a model directory does: its size and time."""
    path = Path(place) / "config.json" if Path(place).is_dir() else Path(place)
    status = path.stat() if path.is_file() else None
    return [place, *([status.st_size, status.st_mtime_ns] if status else [])]
