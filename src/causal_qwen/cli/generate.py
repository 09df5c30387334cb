"""causal-qwen generate MODEL PROMPT."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from causal_qwen.cli.console import note, print_json
from causal_qwen.cli.models import MODEL_HELP, load


class Mode(StrEnum):
    """Who decides."""

    standard = "standard"
    causal = "causal"
    compatible = "compatible"


class EngineName(StrEnum):
    """Who runs the forward passes."""

    transformers = "transformers"
    native = "native"


class Precision(StrEnum):
    """Precision of the weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    int8 = "int8"
    int4 = "int4"


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    mode: Annotated[
        Mode | None, typer.Option(help="Mode of inference; the model's own if not given.")
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Sample (always, in causal mode).")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.", min=1)] = 64,
    temperature: Annotated[
        float, typer.Option(help="Scales the noise; in compatible mode, divides logits.")
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Allow only the k best tokens; 0 allows all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Allow only the nucleus of this probability.")] = None,
    persistence: Annotated[
        float | None, typer.Option(help="Share of noise kept from token to token.")
    ] = None,
    density_floor: Annotated[float | None, typer.Option(help="Truncation of the noise.")] = None,
    seed: Annotated[int | None, typer.Option(help="Who speaks; drawn and printed if not given.")] = None,
    individual: Annotated[
        Path | None, typer.Option(help="File of a saved individual, instead of a seed.", dir_okay=False)
    ] = None,
    level: Annotated[float, typer.Option(help="Probability of the interval of each number.")] = 0.9,
    raw_intervals: Annotated[
        bool, typer.Option("--raw-intervals", help="Intervals of the Cauchy law, not the calibrated ones.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="Such as cuda; the CPU if not given.")] = None,
    dtype: Annotated[
        Precision, typer.Option(help="Precision of the weights; int8 and int4 need --engine native.")
    ] = Precision.auto,
    engine: Annotated[
        EngineName, typer.Option(help="native is our own compiled decoder, for the CPU.")
    ] = EngineName.transformers,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON instead of streaming.")] = False,
) -> None:
    """Continue a text, deciding by causes."""
    prompt = sys.stdin.read() if prompt == "-" else prompt
    few_bits: dict[Precision, Literal["int8", "int4"]] = {Precision.int8: "int8", Precision.int4: "int4"}
    integers = few_bits.get(dtype)
    if integers and engine is not EngineName.native:
        raise ValueError(f"--dtype {dtype.value} needs --engine native")
    loaded, processor = load(model, device=device, dtype="float32" if integers else dtype.value)
    import torch

    from causal_qwen.data import prompt_batch
    from causal_qwen.decoder import Engine
    from causal_qwen.generation import NumberStreamer
    from causal_qwen.individual import Individual, one_per_row

    chosen = mode.value if mode else loaded.config.inference_mode
    options: dict[str, Any] = {
        "inference_mode": chosen,
        "do_sample": sample or chosen == "causal",
        "max_new_tokens": max_new_tokens,
        "interval_level": level,
        "raw_intervals": raw_intervals,
    }
    if options["do_sample"]:
        (person,) = one_per_row(Individual.load(individual) if individual else seed, 1)
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        if chosen == "compatible":
            torch.manual_seed(person.seed % 2**63)
        else:
            options |= {"individual": person, "persistence": persistence, "density_floor": density_floor}
        note(f"seed {person.seed}")
    if engine is EngineName.native:
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
            "mode": chosen,
            "seed": person.seed if options["do_sample"] else None,
            "numbers": [asdict(number) for number in said.numbers(processor.num_token_id)],
        }
    )
