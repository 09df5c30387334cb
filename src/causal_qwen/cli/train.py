"""causal-qwen train [CONFIG]."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json, print_table, quiet_libraries
from causal_qwen.cli.estimate import show_estimate
from causal_qwen.cli.interruption import kept_by_training, on_interruption
from causal_qwen.cli.push import check_access, upload

if TYPE_CHECKING:
    from causal_qwen.training.recipe import TrainingRecipe

DRY_ROWS = 3


def command(
    config: Annotated[Path | None, typer.Argument(help="A recipe in YAML; flags stand above it.")] = None,
    model: Annotated[str | None, typer.Option(help="A converted directory, or a source (smollm2).")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="JSONL, JSON, CSV, TSV, Parquet or text; may be repeated.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory of the trained model.")
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(
            help='Sentence of a table\'s row: "A {cut} diamond costs {price}."; may be repeated, for several '
            "wordings."
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Field with which the completion begins.")] = None,
    numbers: Annotated[
        Literal["written", "value"] | None,
        typer.Option(help="Which numbers are values: those that are learned, or those of prompts too."),
    ] = None,
    delimiter: shared.Delimiter = None,
    encoding: shared.Encoding = None,
    validation: Annotated[str | None, typer.Option(help="File to evaluate on.")] = None,
    on_bad_row: Annotated[shared.OnBadRow | None, typer.Option(help="Stop at a bad row, or skip it.")] = None,
    method: Annotated[
        Literal["full", "lora", "heads"] | None,
        typer.Option(help="All weights, adapters, or the heads only."),
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per step and process.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of backbone or adapters.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything that is drawn.")] = None,
    report_to: Annotated[
        list[str] | None, typer.Option(help="wandb, tensorboard or trackio; may be repeated.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any other key of a recipe: --set packing=true.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what the model will see.")] = False,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Show the memory and the time that this would take; no weights are loaded. --model may then "
            "name a published shape: Qwen2.5-0.5B, -1.5B, -3B, -7B, -14B, -32B or -72B, whose rows count as "
            "max_length tokens, like those of a hub id.",
        ),
    ] = False,
    processes: Annotated[int, typer.Option(help="With --estimate: devices that train together.")] = 1,
    device: Annotated[
        str | None,
        typer.Option(help="With --estimate: cpu, cuda, …; the one that training would use if not given."),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(
            help="With --estimate: operations per second of a device, such as 3e14; measured in a second if "
            "not given."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run exactly.")] = False,
    overwrite: shared.Overwrite = False,
    push: shared.Push = None,
    as_json: shared.AsJson = False,
) -> None:
    """Teach a model your texts or your table, numbers as numbers, with honest intervals."""
    options: dict[str, Any] = {
        "model": model,
        "data": _one_or_several(data),
        "output": str(output) if output else None,
        "template": _one_or_several(template),
        "target": target,
        "numbers": numbers,
        "delimiter": delimiter,
        "encoding": encoding,
        "validation": validation,
        "on_bad_row": on_bad_row,
        "method": method,
        "epochs": epochs,
        "max_steps": max_steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "report_to": report_to or None,
    }
    if not estimate and (processes != 1 or device is not None or flops is not None):
        raise ValueError(
            "--processes, --device and --flops go with --estimate; a run takes the devices that are there, "
            "one process each under torchrun"
        )
    note("preparing …")
    quiet_libraries()
    flags = {name: value for name, value in options.items() if value is not None} | _settings(set_ or [])
    if dry_run or estimate:
        flags.setdefault("output", "unused")
    check_access(push)
    from causal_qwen.training import TrainingRecipe, train

    recipe = TrainingRecipe.from_yaml(config, **flags) if config else TrainingRecipe.from_mapping(flags)
    if dry_run:
        _show(recipe)
        return
    if estimate:
        show_estimate(recipe, processes=processes, device=device, flops=flops, as_json=as_json)
        return
    on_interruption(lambda: kept_by_training(Path(recipe.output)))
    result = train(recipe, resume=resume, overwrite=overwrite, progress=note)
    if not result.metrics:  # not the main process
        return
    if push is not None:
        note(upload(result.output, push))
    if result.was_finished:
        note(
            f"{result.output} is finished, and nothing was trained; to train it further begin a new run from "
            f"it (--model {result.output} -o ANOTHER)"
        )
    if as_json:
        print_json(
            {"output": str(result.output), "skipped_rows": result.skipped_rows, "metrics": result.metrics}
        )
        return
    rows = [(name, f"{value:.4g}") for name, value in sorted(result.metrics.items())]
    print_table(f"{recipe.model} → {result.output}", rows)


def _one_or_several(values: list[str] | None) -> str | list[str] | None:
    return values[0] if values and len(values) == 1 else values or None


def _settings(pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs, each value read as YAML."""
    from causal_qwen.data.settings import parse_value

    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair}: write KEY=VALUE")
        settings[name.strip()] = parse_value(value, source=f"--set {name.strip()}")
    return settings


def _show(recipe: TrainingRecipe) -> None:
    """The first rows as the model will see them: prompts dim, what is learned plain, numbers highlighted."""
    from rich.console import Console
    from rich.text import Text

    from causal_qwen.data.encoding import numbers_of
    from causal_qwen.training.preparation import load_processor, prepare_rows
    from causal_qwen.value_space import ValueSpace

    processor = load_processor(recipe)
    parts = prepare_rows(recipe, processor, None)
    console = Console(highlight=False, soft_wrap=True)
    for row in parts.sample[:DRY_ROWS]:
        line = Text()
        for token, value, label in zip(row.input_ids, row.numeric_values, row.labels, strict=True):
            is_num = token == processor.num_token_id
            text = f"<NUM {value:.6g}>" if is_num else processor.tokenizer.decode([token])
            line.append(text, style=("bold yellow" if is_num else "") + (" dim" if label == -100 else ""))
        console.print(line)
        console.print(
            f"  {len(row)} tokens, {sum(label != -100 for label in row.labels)} learned", style="cyan"
        )
    values = numbers_of(parts.sample, processor.num_token_id)
    rows = [
        ("training rows", f"{len(parts.sample)}" + (" (head of the stream)" if recipe.streaming else "")),
        ("validation rows", str(len(parts.validation))),
        ("calibration rows", str(len(parts.calibration))),
        ("skipped rows", str(parts.bad_rows.count)),
        ("tokens", str(sum(map(len, parts.sample)))),
        *(
            (f"numbers to {use}", str(parts.numbers[name]))
            for use, name in (
                ("learn", "train"),
                ("evaluate on", "validation"),
                ("calibrate on", "calibration"),
            )
        ),
    ]
    if not recipe.streaming and recipe.packing:
        rows.append(("packed rows", str(len(list(parts.train)))))
    if len(values):
        space = ValueSpace.fit(recipe.value_space, values)
        rows += [("value_center", f"{space.center:.6g}"), ("value_spread", f"{space.spread:.6g}")]
    print_table("what the model will see", rows)
