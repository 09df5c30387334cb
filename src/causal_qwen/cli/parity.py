"""causal-qwen parity DIR|SOURCE."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json, print_table, quiet_libraries
from causal_qwen.cli.progress import bar


def command(
    model: Annotated[str, typer.Argument(help="A converted directory, or any source that `convert` takes.")],
    text: Annotated[
        Path | None, typer.Option(help="Text file to measure on instead of the bundled one.", dir_okay=False)
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base of a converted directory, if it has moved.")
    ] = None,
    calibration: Annotated[
        shared.Calibration, typer.Option(help="For a source: how it is converted.")
    ] = "default",
    dtype: shared.Dtype = "auto",
    device: shared.Device = None,
    seed: Annotated[int, typer.Option(help="For a source: seed of the conversion.")] = 0,
    as_json: shared.AsJson = False,
) -> None:
    """Measure a converted model against its base on text that it was not calibrated on."""
    sample = text.read_text(encoding="utf-8") if text else None
    note(f"measuring {model} against its base …")
    quiet_libraries()
    from causal_qwen.conversion import (
        bundled_text,
        check_device,
        compare,
        convert,
        load_base,
        load_model,
        remember,
    )

    check_device(device)
    report_file = Path(model) / "conversion.json"
    converted = report_file.is_file()
    source = model
    if converted:
        source = base or json.loads(report_file.read_text(encoding="utf-8"))["source"]
    original = load_base(source, dtype=dtype, watch=bar)
    precision = original.model.dtype
    if device:
        original.model.to(device)
    reference = remember(original, bundled_text("heldout") if sample is None else sample, watch=bar)
    del original  # so that one model at a time is in memory
    if converted:
        causal, _ = load_model(model, dtype=precision)
    else:
        causal = convert(source, calibration=calibration, dtype=precision, seed=seed, watch=bar).model
    if device:
        causal.to(device)
    result = asdict(compare(causal, reference, watch=bar))
    if as_json:
        print_json(result)
    else:
        print_table(f"{model} against its base", result.items())
