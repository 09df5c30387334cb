"""causal-qwen export MODEL OUT --to hf|gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json
from causal_qwen.cli.models import load
from causal_qwen.cli.progress import bar


def command(
    model: shared.Model,
    out: Annotated[Path, typer.Argument(help="Directory, or file that ends in .gguf, to write.")],
    to: Annotated[
        Literal["hf", "gguf"],
        typer.Option(help="A plain directory of transformers, or a file for llama.cpp and Ollama."),
    ] = "hf",
    kind: Annotated[
        Literal["f32", "f16", "q8_0"], typer.Option(help="Precision of the matrices in a GGUF file.")
    ] = "f16",
    drop_numbers: Annotated[
        bool, typer.Option("--drop-numbers", help="Export the words of a model that writes numbers.")
    ] = False,
    drop_biases: Annotated[
        bool, typer.Option("--drop-biases", help="Leave out learned biases that the format cannot hold.")
    ] = False,
    dtype: shared.Dtype = "auto",
    overwrite: shared.Overwrite = False,
    as_json: shared.AsJson = False,
) -> None:
    """Write the softmax view of a model for programs that do not know causal ones."""
    from causal_qwen.directories import check_output_directory, check_output_file

    if to == "hf":
        check_output_directory(out, overwrite=overwrite)
    else:
        check_output_file(out, overwrite=overwrite)
    causal, processor = load(model, device=None, dtype=dtype)
    from causal_qwen.conversion import export

    report = export(
        causal,
        processor,
        out,
        to=to,
        kind=kind,
        drop_numbers=drop_numbers,
        drop_biases=drop_biases,
        overwrite=overwrite,
        watch=bar,
    )
    if as_json:
        print_json(report.to_dict())
        return
    print(out)
    for sentence in report.dropped:
        note(f"not in it: {sentence}")
