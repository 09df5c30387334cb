"""causal-qwen eval MODEL DATA."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json, print_table, quiet_libraries
from causal_qwen.cli.models import load_on
from causal_qwen.cli.progress import counted
from causal_qwen.directories import check_output_file


def command(
    model: shared.Model,
    data: shared.Data,
    template: shared.Template = None,
    target: shared.Target = None,
    delimiter: shared.Delimiter = None,
    encoding: shared.Encoding = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Report with pictures, .html or .md; evaluation.html if not given, none with --json.",
            dir_okay=False,
        ),
    ] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.")] = False,
    max_length: Annotated[int, typer.Option(help="Tokens per row.", min=2)] = 512,
    batch_size: shared.BatchSize = 16,
    on_bad_row: shared.BadRow = "error",
    device: shared.Device = None,
    dtype: shared.Precision = "auto",
    engine: shared.Engine = "auto",
    as_json: shared.AsJson = False,
) -> None:
    """Measure a model on labelled data: every metric, and a report with pictures."""
    if no_report and report is not None:
        raise ValueError(f"--no-report and --report {report}; give one of them")
    if report is None and not (no_report or as_json):
        report = Path("evaluation.html")
    if report is not None:
        if report.suffix.lower() not in (".html", ".md"):
            raise ValueError(f"{report} ends in {report.suffix or 'nothing'!r}; a report is .html or .md")
        check_output_file(report)
    quiet_libraries()
    from causal_qwen.data import BadRows, Files, Reading, labelled_batches
    from causal_qwen.evaluation import run_evaluation
    from causal_qwen.evaluation.report import write_report

    reading = Reading.of(model, template=template, target=target)
    source = Files(data, delimiter=delimiter, encoding=encoding)
    next(reading.examples(source, BadRows(on_bad_row, silent=True)), None)  # before anything is loaded
    loaded, processor, native = load_on(engine, model, device=device, dtype=dtype)
    context = loaded.config.max_position_embeddings
    if max_length > context:
        note(f"rows have at most {context} tokens, the context of the model")
    bad_rows = BadRows(on_bad_row)
    batches = labelled_batches(
        processor,
        source,
        reading=reading,
        max_length=min(max_length, context),
        batch_size=batch_size,
        bad_rows=bad_rows,
    )
    start = time.perf_counter()
    evaluation = run_evaluation(loaded, counted(batches, "evaluating", "batches"), engine=native)
    seconds = time.perf_counter() - start
    if len(evaluation.labels) == 0:
        raise ValueError(f"{data}: no row with a token to predict")
    if bad_rows.count:
        note(str(bad_rows))
    metrics = evaluation.metrics()
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        sentence = {"template": reading.templates[0]} if reading.templates else {}
        facts = {"model": model, "data": data} | sentence
        write_report(evaluation, report, title=f"Evaluation of {Path(model).name}", facts=facts)
        note(f"report: {report}")
    counts = {
        "tokens": len(evaluation.labels),
        "numbers": len(evaluation.values),
        "bad_rows": bad_rows.count,
    }
    if as_json:
        defined = {name: entry if math.isfinite(entry) else None for name, entry in metrics.items()}
        ran = "transformers" if native is None else "native"
        run: dict[str, object] = {"engine": ran, "seconds": seconds}
        print_json(defined | counts | run | {"report": None if report is None else str(report)})
        return
    rows = [(name, f"{entry:.4g}") for name, entry in metrics.items()]
    print_table(f"{model} on {data}", rows + [(name, f"{count:,}") for name, count in counts.items()])
