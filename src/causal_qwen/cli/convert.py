"""causal-qwen convert SOURCE OUT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json, print_table, quiet_libraries
from causal_qwen.cli.progress import bar
from causal_qwen.cli.push import check_access, upload
from causal_qwen.directories import check_output_directory

SOURCE_HELP = (
    "smollm2 (embedded), a directory, a .gguf file or a hub id; of Qwen2, Qwen3 or Llama architecture."
)


def command(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    out: Annotated[Path, typer.Argument(help="Directory to write; it appears only when it is complete.")],
    calibration: Annotated[
        shared.Calibration, typer.Option(help="default fits to text; published and none set constants.")
    ] = "default",
    calibration_text: Annotated[
        Path | None,
        typer.Option(help="Text file to calibrate on instead of the bundled one.", dir_okay=False),
    ] = None,
    causal_size: Annotated[
        int | None, typer.Option(help="Size D of the cause; the base's hidden size if not given.")
    ] = None,
    dtype: shared.Dtype = "auto",
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    overwrite: shared.Overwrite = False,
    push: shared.Push = None,
    as_json: shared.AsJson = False,
) -> None:
    """Convert a base checkpoint into a causal model that behaves exactly like it."""
    check_access(push)
    text = calibration_text.read_text(encoding="utf-8") if calibration_text else None
    check_output_directory(out, overwrite=overwrite)
    note(f"converting {source} …")
    quiet_libraries()
    from causal_qwen.conversion import convert

    report = convert(
        source,
        out,
        calibration=calibration,
        calibration_text=text,
        causal_size=causal_size,
        dtype=dtype,
        seed=seed,
        overwrite=overwrite,
        watch=bar,
    ).report
    if push is not None:
        note(upload(out, push))
    if as_json:
        print_json(report)
        return
    constants = report.pop("calibration")
    print_table(f"{source} → {out}", [*report.items(), *constants.items()])
