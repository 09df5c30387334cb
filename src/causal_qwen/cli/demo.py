"""causal-qwen demo: what this is, on the embedded base, in one command."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from causal_qwen.cli.console import note, print_table, quiet_libraries
from causal_qwen.cli.parity import parity_text

PROMPT = "The reason why the sea is salty is that"


def command(
    out: Annotated[Path, typer.Option(help="Directory for the converted model.")] = Path("demo/model"),
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = PROMPT,
    tokens: Annotated[int, typer.Option(help="Tokens to add to it.", min=1)] = 40,
) -> None:
    """Convert the embedded base, prove parity, and continue a prompt with both models."""
    note("1/3  converting the embedded base (the first time takes half a minute) …")
    quiet_libraries()
    import torch

    from causal_qwen.conversion import EMBEDDED, bundled_text, convert, load_base, measure_parity

    base = load_base(EMBEDDED)
    conversion = convert(base, out, overwrite=True)
    note("2/3  measuring parity on held-out text …")
    parity = asdict(measure_parity(conversion.model, base, bundled_text("heldout")))
    print_table(
        "Parity with the base (causal-qwen parity smollm2)", [(k, parity_text(v)) for k, v in parity.items()]
    )
    note("3/3  continuing a prompt with both models …")
    inputs = base.tokenizer(prompt, return_tensors="pt")
    torch.manual_seed(0)
    rows = []
    for name, model in (("base", base.model), ("causal", conversion.model)):
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        rows.append((name, base.tokenizer.decode(ids[0], skip_special_tokens=True)))
    print_table("Greedy continuation", rows, header=("model", "text"))
    print(f"\nThe same text: {'yes' if rows[0][1] == rows[1][1] else 'NO'}. The converted model is in {out}.")
    if parity["max_abs_logit_diff"] != 0.0 or rows[0][1] != rows[1][1]:
        raise typer.Exit(1)
