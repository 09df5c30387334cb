"""causal-qwen demo: what this is, on the embedded base, in one command."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from causal_qwen.cli.console import cell_text, note, print_table, quiet_libraries
from causal_qwen.cli.interruption import on_interruption
from causal_qwen.cli.options import check_prompt
from causal_qwen.directories import check_output_directory

if TYPE_CHECKING:
    from causal_qwen.demo.report import Findings

PROMPT = "The reason why the sea is salty is that"


def command(
    out: Annotated[Path, typer.Option(help="Directory for models, data and report.html.")] = Path("demo"),
    base: Annotated[str, typer.Option(help="Base to convert; the embedded one by default.")] = "smollm2",
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = PROMPT,
    tokens: Annotated[int, typer.Option(help="Tokens to add to it.", min=1)] = 32,
    steps: Annotated[int, typer.Option(help="Steps in which a backbone learns products.", min=1)] = 30,
) -> None:
    """Convert, prove parity, generate in every mode, learn a table, predict, ask what if; write a report."""
    check_prompt(prompt, "--prompt")
    began = time.monotonic()
    check_output_directory(out, overwrite=True)
    on_interruption(lambda: f"{out} keeps the steps that were finished; the same command begins anew")
    note("1/8  converting the base, and measuring parity on held-out text …")
    quiet_libraries()
    from causal_qwen.demo import report, story

    out.mkdir(parents=True, exist_ok=True)
    story.write_table(out)  # first: where its package is missing, nobody waits for that
    model = out / "model"
    plain, conversion, measured = story.convert_and_prove(model, source=base)
    parity = {name: cell_text(value) for name, value in asdict(measured).items()}
    print_table("Parity with the base", parity.items())

    note("2/8  continuing a prompt with the base and in every mode …")
    texts = story.continuations(plain, conversion, prompt, tokens)
    print_table(f"“{prompt} …”", texts.items(), header=("who decides", "continuation"))
    same = texts["base, greedy"] == texts["standard"]
    repeated = texts[f"causal, individual {story.SEED}"] == texts[f"individual {story.SEED} again"]
    print(f"standard says what the base says: {'yes' if same else 'NO'}")
    print(f"the same individual repeats itself: {'yes' if repeated else 'NO'}\n")
    del plain, conversion

    note("3/8  learning a table of cars, and the same with a fifth of its labels broken …")
    learned = story.learn_table(out, "cars", model=model)
    broken = story.forecast(story.learn_table(out, "broken", model=model), out)
    note("4/8  predicting cars that it has not seen, in float32 and int8 …")
    clean, integers = story.forecast(learned, out), story.forecast(learned, out, integers=True)
    note("5/8  asking about something that is no car …")
    far = story.far_away(learned)
    note("6/8  asking one individual what another engine would have changed …")
    what_if = story.ask_what_if(learned)
    rows = int(learned.metrics["train/rows"])
    del learned
    note(f"7/8  letting a backbone learn products, {steps} steps …")
    found = report.Findings(
        parity=parity,
        texts=texts,
        rows=rows,
        clean=clean,
        broken=broken,
        squares=(story.least_squares(out, "cars"), story.least_squares(out, "broken")),
        integers=integers,
        far=far,
        losses=story.tune(out, model=model, steps=steps),
        what_if=what_if,
    )
    _print_findings(found)

    note("8/8  writing the report …")
    file = out / "report.html"
    report.write_report(file, found, prompt=prompt, out=out)
    print("Each step is one line:")
    for line in story.COMMANDS:
        print(f"  {line.format(base=base, out=out, prompt=prompt)}")
    print(f"\n{file} has the pictures. It took {time.monotonic() - began:.0f} seconds.")
    print("Talk to what it has made, on a page and over HTTP:")
    # The program of this environment, which need not be on the path.
    program = os.path.relpath(Path(sys.executable).with_name("causal-qwen"))
    print(f"  {story.SERVE.format(program=program, out=out)}")
    if measured.max_abs_logit_diff != 0.0 or not same or not repeated:
        raise typer.Exit(1)


def _print_findings(found: Findings) -> None:
    """What the table, the other precision, the far prompt, the individual and the gradients have shown."""
    from causal_qwen.demo import report, story

    cars = found.clean
    print_table(
        f"Miles per gallon of cars that training has not seen, with {cars.level:.0%} intervals",
        story.side_by_side(cars, found.integers, 8),
        header=("car", "truth", "float32", "int8"),
    )
    print(f"median absolute error {cars.error:.2f}; the training median gets {cars.constant_error:.2f}")
    print(f"{cars.coverage:.0%} of {len(cars.truth)} intervals hold the truth")
    print(f"int8 moves no median by more than {cars.shift(found.integers):.3f} interval widths\n")
    print_table(
        "Median error, learned from clean labels and with a fifth of them broken",
        report.error_rows(found),
        header=("learned by", "clean", "broken"),
    )
    print_table(
        "Near, and far from, the table",
        story.far_rows(found.far),
        header=("prompt", "mpg", "90% interval", "extrapolates"),
    )
    print_table(
        "The same individual, another engine",
        story.what_if_rows(found.what_if),
        header=("who", "sentence", "mpg"),
    )
    first, last = found.loss_ends
    print(f"number loss of products over {len(found.losses)} steps: {first:.2f} → {last:.2f} nats\n")
