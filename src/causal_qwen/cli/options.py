"""The arguments and options that several commands share, each declared once."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from causal_qwen.cli.models import MODEL_HELP

Calibration = Literal["default", "published", "none"]
Mode = Literal["standard", "causal", "compatible"]
OnBadRow = Literal["error", "skip"]
TEMPLATE_HELP = (
    'Sentence of a table\'s row, "A {cut} diamond costs {price}."; the one that the model was trained with '
    "if not given."
)

Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
Device = Annotated[str | None, typer.Option(help="Such as cuda; the CPU if not given.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Precision of the weights; auto keeps the model's."),
]
NewTokens = Annotated[int, typer.Option(help="Tokens to add at most, to each text.", min=1)]
Temperature = Annotated[
    float, typer.Option(help="Scales the noise; in compatible mode, divides logits.", min=0.0)
]
Persistence = Annotated[
    float | None, typer.Option(help="Share of the noise that stays from token to token, 0 to 1.")
]
DensityFloor = Annotated[float | None, typer.Option(help="Truncation of the noise; 0 truncates nothing.")]
Seed = Annotated[int | None, typer.Option(help="Who speaks; drawn and printed if not given.", min=0)]
Level = Annotated[float, typer.Option(help="Probability of the interval of each number.")]
Data = Annotated[str, typer.Argument(help="JSONL, JSON, CSV, TSV, Parquet or text; also .gz.")]
Delimiter = Annotated[
    str | None, typer.Option(help="Between the cells of a CSV file; seen from its header if not given.")
]
Encoding = Annotated[
    str | None, typer.Option(help="Of the data's text, such as latin-1; UTF-8 if not given.")
]
Template = Annotated[str | None, typer.Option(help=TEMPLATE_HELP)]
Target = Annotated[str | None, typer.Option(help="Field of the template that is to be predicted.")]
BatchSize = Annotated[int, typer.Option(help="Rows per forward pass.", min=1)]
BadRow = Annotated[OnBadRow, typer.Option(help="Stop at a bad row, or skip it.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
