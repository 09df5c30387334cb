"""causal-qwen demo: what this is, on the embedded base, in one command."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from causal_qwen.cli.console import cell_text, note, print_table, quiet_libraries
from causal_qwen.cli.interruption import on_interruption
from causal_qwen.cli.options import check_prompt
from causal_qwen.directories import check_output_directory

PROMPT = "The reason why the sea is salty is that"


def command(
    out: Annotated[Path, typer.Option(help="Directory for models, data and report.html.")] = Path("demo"),
    base: Annotated[str, typer.Option(help="Base to convert; the embedded one by default.")] = "smollm2",
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = PROMPT,
    tokens: Annotated[int, typer.Option(help="Tokens to add to it.", min=1)] = 32,
    steps: Annotated[int, typer.Option(help="Steps of fine-tuning.", min=1)] = 45,
) -> None:
    """Convert, prove parity, generate in every mode, fine-tune, predict, ask what if, and write a report."""
    check_prompt(prompt, "--prompt")
    began = time.monotonic()
    check_output_directory(out, overwrite=True)
    on_interruption(lambda: f"{out} keeps the steps that were finished; the same command begins anew")
    note("1/6  converting the base, and measuring parity on held-out text …")
    quiet_libraries()
    from causal_qwen.demo import story

    model = out / "model"
    plain, conversion, measured = story.convert_and_prove(model, source=base)
    parity = {name: cell_text(value) for name, value in asdict(measured).items()}
    print_table("Parity with the base", parity.items())

    note("2/6  continuing a prompt with the base and in every mode …")
    texts = story.continuations(plain, conversion, prompt, tokens)
    print_table(f"“{prompt} …”", texts.items(), header=("who decides", "continuation"))
    same = texts["base, greedy"] == texts["standard"]
    repeated = texts[f"causal, individual {story.SEED}"] == texts[f"individual {story.SEED} again"]
    print(f"standard says what the base says: {'yes' if same else 'NO'}")
    print(f"the same individual repeats itself: {'yes' if repeated else 'NO'}\n")
    del plain, conversion

    note(f"3/6  fine-tuning on a table of cars, {steps} steps …")
    tuned = story.fine_tune(out, model=model, steps=steps)
    note("4/6  predicting the fuel economy of cars that it has not seen …")
    cars = story.forecast(tuned, out)
    columns = zip(cars.names, cars.truth, cars.median, cars.lower, cars.upper, strict=True)
    shown = [
        (name, f"{truth:.1f}", f"{median:.1f}", f"{lower:.1f} – {upper:.1f}")
        for name, truth, median, lower, upper in islice(columns, 8)
    ]
    header = ("car", "truth", "predicted", f"{cars.level:.0%} interval")
    print_table("Miles per gallon of cars that training has not seen", shown, header=header)
    print(f"median absolute error {cars.error:.2f}; the training median gets {cars.constant_error:.2f}")
    print(f"{cars.coverage:.0%} of {len(cars.truth)} intervals hold the truth\n")

    note("5/6  asking one individual what another engine would have changed …")
    what_if = story.ask_what_if(tuned)
    print_table(
        "The same individual, another engine", story.what_if_rows(what_if), header=("who", "sentence", "mpg")
    )

    note("6/6  writing the report …")
    file = out / "report.html"
    story.report(
        file,
        parity=parity,
        texts=texts,
        prompt=prompt,
        tuned=tuned,
        cars=cars,
        what_if=what_if,
        model=model,
    )
    print("Each step is one line:")
    for line in story.COMMANDS:
        print(f"  {line.format(base=base, out=out, prompt=prompt)}")
    print(f"\n{file} has the pictures. It took {time.monotonic() - began:.0f} seconds.")
    if measured.max_abs_logit_diff != 0.0 or not same or not repeated:
        raise typer.Exit(1)
