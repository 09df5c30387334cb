"""causal-qwen convert SOURCE OUT."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from causal_qwen.cli.console import note, print_json, print_table, quiet_libraries

SOURCE_HELP = "smollm2 (embedded), a directory, a .gguf file or a hub id; of Qwen2 or Llama architecture."


class Dtype(StrEnum):
    """Precision of the weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class CalibrationChoice(StrEnum):
    """How the new parameters are set."""

    default = "default"
    published = "published"
    none = "none"


def command(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    out: Annotated[Path, typer.Argument(help="Directory to write; it appears only when it is complete.")],
    calibration: Annotated[
        CalibrationChoice, typer.Option(help="default fits to text; published and none set constants.")
    ] = CalibrationChoice.default,
    calibration_text: Annotated[
        Path | None,
        typer.Option(help="Text file to calibrate on instead of the bundled one.", dir_okay=False),
    ] = None,
    causal_size: Annotated[
        int | None, typer.Option(help="Size D of the cause; the base's hidden size if not given.")
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Precision of the weights; auto keeps the base's.")
    ] = Dtype.auto,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Convert a base checkpoint into a causal model that behaves exactly like it."""
    text = calibration_text.read_text(encoding="utf-8") if calibration_text else None
    note(f"converting {source} …")
    quiet_libraries()
    from causal_qwen.conversion import convert

    report = convert(
        source,
        out,
        calibration=calibration.value,
        calibration_text=text,
        causal_size=causal_size,
        dtype=dtype.value,
        seed=seed,
        overwrite=overwrite,
    ).report
    if as_json:
        print_json(report)
        return
    rows = [(name, str(value)) for name, value in report.items() if name != "calibration"]
    rows += [
        (name, f"{value:.6g}" if isinstance(value, float) else str(value))
        for name, value in report["calibration"].items()
    ]
    print_table(f"{source} → {out}", rows)
