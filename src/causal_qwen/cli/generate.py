"""causal-qwen generate MODEL PROMPT."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json
from causal_qwen.cli.models import load

Precision = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]


def command(
    model: shared.Model,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    mode: Annotated[
        shared.Mode | None, typer.Option(help="Mode of inference; the model's own if not given.")
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Sample (always, in causal mode).")] = False,
    max_new_tokens: shared.NewTokens = 64,
    temperature: shared.Temperature = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Allow only the k best tokens; 0 allows all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Allow only the nucleus of this probability.")] = None,
    persistence: shared.Persistence = None,
    density_floor: shared.DensityFloor = None,
    seed: shared.Seed = None,
    individual: Annotated[
        Path | None, typer.Option(help="File of a saved individual, instead of a seed.", dir_okay=False)
    ] = None,
    level: shared.Level = 0.9,
    raw_intervals: Annotated[
        bool, typer.Option("--raw-intervals", help="Intervals of the Cauchy law, not the calibrated ones.")
    ] = False,
    device: shared.Device = None,
    dtype: Annotated[
        Precision, typer.Option(help="Precision of the weights; int8 and int4 need --engine native.")
    ] = "auto",
    engine: Annotated[
        Literal["transformers", "native"],
        typer.Option(help="native is our own compiled decoder, for the CPU."),
    ] = "transformers",
    as_json: shared.AsJson = False,
) -> None:
    """Continue a text, deciding by causes."""
    prompt = sys.stdin.read() if prompt == "-" else prompt
    integers = dtype if dtype == "int8" or dtype == "int4" else None
    if integers and engine != "native":
        raise ValueError(f"--dtype {dtype} needs --engine native")
    loaded, processor = load(model, device=device, dtype="float32" if integers else dtype)
    import torch

    from causal_qwen.data import prompt_batch
    from causal_qwen.decoder import Engine
    from causal_qwen.generation import NumberStreamer
    from causal_qwen.individual import Individual, one_per_row

    decider: str = mode or loaded.config.inference_mode
    options: dict[str, Any] = {
        "inference_mode": decider,
        "do_sample": sample or decider == "causal",
        "max_new_tokens": max_new_tokens,
        "interval_level": level,
        "raw_intervals": raw_intervals,
    }
    if options["do_sample"]:
        (person,) = one_per_row(Individual.load(individual) if individual else seed, 1)
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        if decider == "compatible":
            torch.manual_seed(person.seed % 2**63)
        else:
            options |= {"individual": person, "persistence": persistence, "density_floor": density_floor}
        note(f"seed {person.seed}")
    if engine == "native":
        options["engine"] = Engine.from_model(loaded, precision=integers, tell=note)
    inputs: dict[str, Any] = prompt_batch(processor, [prompt], loaded.device)
    streamer = None if as_json else NumberStreamer(processor, skip_special_tokens=True)
    chosen_options = {name: value for name, value in options.items() if value is not None}
    outputs = loaded.generate(**inputs, **chosen_options, streamer=streamer, return_dict_in_generate=True)
    if not as_json:
        return
    said = outputs.after(inputs["input_ids"].shape[1])
    print_json(
        {
            "prompt": prompt,
            "text": processor.batch_decode(said, skip_special_tokens=True)[0],
            "mode": decider,
            "seed": person.seed if options["do_sample"] else None,
            "numbers": [asdict(number) for number in said.numbers(processor.num_token_id)],
        }
    )
