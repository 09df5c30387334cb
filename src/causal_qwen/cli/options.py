"""The arguments and options that several commands share, each declared once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from causal_qwen.cli import models
from causal_qwen.cli.console import note

if TYPE_CHECKING:
    from causal_qwen.prompting import Settings

Calibration = Literal["default", "published", "none"]
Mode = Literal["standard", "causal", "compatible"]
OnBadRow = Literal["error", "skip"]
TEMPLATE_HELP = (
    'Sentence of a table\'s row, "A {cut} diamond costs {price}."; the one that the model was trained with '
    "if not given."
)

Model = Annotated[str, typer.Argument(help=models.MODEL_HELP)]
Device = Annotated[str | None, typer.Option(help="Such as cuda; the CPU if not given.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Precision of the weights; auto keeps the model's."),
]
Precision = Annotated[
    models.Precision,
    typer.Option(help="Precision of the weights; int8 and int4 are the native engine's."),
]
Engine = Annotated[
    models.EngineName,
    typer.Option(
        help="native is our own compiled decoder, for the CPU; auto takes it where it serves. The tokens are "
        "the same."
    ),
]
FileEngine = Annotated[
    models.FileEngineName,
    typer.Option(
        help="native is our own compiled decoder, for the CPU; auto takes it where it serves; vllm, "
        "for files, needs an environment with vLLM. The tokens are the same."
    ),
]
Processes = Annotated[
    int, typer.Option(help="Of --engine vllm: processes that share the rows of a file.", min=1)
]
ShardText = Annotated[str, typer.Option("--shard", hidden=True)]
Push = Annotated[str | None, typer.Option("--push", help="Upload the result to this repository of a hub.")]
NewTokens = Annotated[int, typer.Option(help="Tokens to add at most, to each text.", min=1)]
Temperature = Annotated[
    float | None, typer.Option(help="Scales the noise; in compatible mode, divides logits. 1 if not given.")
]
TopK = Annotated[int | None, typer.Option(help="Allow only the k best tokens; 0 allows all.")]
TopP = Annotated[float | None, typer.Option(help="Allow only the nucleus of this probability.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1 makes tokens of prompt and text less likely.")
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End a text before this string; may be repeated.", show_default=False)
]
System = Annotated[str | None, typer.Option(help="System message of the chat.")]
Persistence = Annotated[
    float | None, typer.Option(help="Share of the noise that stays from token to token, 0 to 1.")
]
DensityFloor = Annotated[float | None, typer.Option(help="Truncation of the noise; 0 truncates nothing.")]
Seed = Annotated[int | None, typer.Option(help="Who speaks; drawn and printed if not given.")]
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


def note_inert(settings: Settings, *more: str) -> None:
    """One line about options that were given and change nothing in this mode; ``more`` beside the settings'
    own, where nothing is sampled.
    """
    names = settings.inert() + ([] if settings.samples else list(more))
    if not names:
        return
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    verb = "has" if len(names) == 1 else "have"
    samples = "samples tokens, not individuals" if settings.samples else "decides without sampling here"
    note(f"{flags} {verb} no effect: mode {settings.mode} {samples}")


def check_prompt(text: str, name: str) -> None:
    """That there is something to continue, before a model is loaded.

    Raises:
        ValueError: If there is not.
    """
    if not text.strip():
        raise ValueError(f"{name} is empty; give some text to continue")
