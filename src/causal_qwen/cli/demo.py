"""causal-qwen demo: what this is, on the embedded base, in one command."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from causal_qwen.cli.console import note, print_table, quiet_libraries
from causal_qwen.cli.parity import parity_text

PROMPT = "The reason why the sea is salty is that"
SEED = 7


def command(
    out: Annotated[Path, typer.Option(help="Directory for the converted model.")] = Path("demo/model"),
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = PROMPT,
    tokens: Annotated[int, typer.Option(help="Tokens to add to it.", min=1)] = 32,
) -> None:
    """Convert the embedded base, prove parity, and continue a prompt in every mode."""
    note("1/3  converting the embedded base (the first time takes half a minute) …")
    quiet_libraries()
    from causal_qwen.conversion import EMBEDDED, bundled_text, convert, load_base, measure_parity

    base = load_base(EMBEDDED)
    conversion = convert(base, out, overwrite=True)
    note("2/3  measuring parity on held-out text …")
    parity = asdict(measure_parity(conversion.model, base, bundled_text("heldout")))
    print_table(
        f"Parity with the base   causal-qwen parity {EMBEDDED}",
        [(k, parity_text(v)) for k, v in parity.items()],
    )
    note("3/3  continuing a prompt with the base and in every mode …")
    rows = continuations(base.model, conversion, prompt, tokens)
    print_table(f"“{prompt} …”", list(rows.items()), header=("who decides", "continuation"))
    model = f'causal-qwen generate {out} "{prompt}"'
    print("Each is one line:")
    print(f"  {model}")
    print(f"  {model} --mode causal --seed {SEED}")
    print(f"  {model} --mode compatible --sample")
    same = rows["base, greedy"] == rows["standard"]
    repeated = rows[f"causal, individual {SEED}"] == rows[f"individual {SEED} again"]
    print(f"\nstandard says what the base says: {'yes' if same else 'NO'}")
    print(f"the same individual repeats itself: {'yes' if repeated else 'NO'}")
    if parity["max_abs_logit_diff"] != 0.0 or not same or not repeated:
        raise typer.Exit(1)


def continuations(base: Any, conversion: Any, prompt: str, tokens: int) -> dict[str, str]:
    """The prompt continued by the base, and by the converted model in every mode."""
    import torch

    inputs = conversion.processor(prompt, return_tensors="pt")
    start = inputs["input_ids"].shape[1]
    plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    causal = {"inference_mode": "causal", "max_new_tokens": tokens}
    sampled = {"inference_mode": "compatible", "do_sample": True, "max_new_tokens": tokens}
    runs: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "base, greedy": (base, plain, {"do_sample": False, "max_new_tokens": tokens}),
        "standard": (conversion.model, inputs, {"do_sample": False, "max_new_tokens": tokens}),
        f"causal, individual {SEED}": (conversion.model, inputs, causal | {"individual": SEED}),
        f"individual {SEED} again": (conversion.model, inputs, causal | {"individual": SEED}),
        f"causal, individual {SEED + 1}": (conversion.model, inputs, causal | {"individual": SEED + 1}),
        "compatible, sampled": (conversion.model, inputs, sampled),
    }
    texts = {}
    for name, (model, given, options) in runs.items():
        torch.manual_seed(SEED)
        ids = model.generate(**given, **options)
        texts[name] = (
            conversion.processor.decode(ids[0, start:], skip_special_tokens=True).strip().replace("\n", " ")
        )
    return texts
