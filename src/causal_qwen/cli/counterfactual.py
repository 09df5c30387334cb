"""causal-qwen counterfactual MODEL PROMPT --do OTHER."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from causal_qwen.cli.console import note, print_json
from causal_qwen.cli.convert import Dtype
from causal_qwen.cli.models import MODEL_HELP, load

if TYPE_CHECKING:
    from causal_qwen.counterfactual.interventions import Branch, Counterfactual


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    prompt: Annotated[str, typer.Argument(help="The factual prompt.")],
    do: Annotated[
        list[str] | None, typer.Option("--do", help="A prompt instead of the factual one; may be repeated.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Who is sampled; somebody if not given. Always printed.", min=0)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of each text, at most.", min=1)] = 40,
    observed: Annotated[
        str | None,
        typer.Option(
            help="A continuation of PROMPT that was observed: who would have said it is found first. "
            "Begin it with its space."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Scales the noise.", min=0.0)] = 1.0,
    density_floor: Annotated[
        float | None, typer.Option(help="Truncation of the noise; 0 truncates nothing.")
    ] = None,
    persistence: Annotated[
        float | None, typer.Option(help="How much of the noise stays the same from token to token, 0 to 1.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Such as cuda; the CPU if not given.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Precision of the weights.")] = Dtype.auto,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print factual, interventions, control and individual as JSON.")
    ] = False,
) -> None:
    """Ask one individual several prompts: what would the same one have said?"""
    causal, processor = load(model, device=device, dtype=dtype.value)
    from causal_qwen.counterfactual import abduct, counterfactual
    from causal_qwen.individual import Individual

    options: dict[str, Any] = {"temperature": temperature, "density_floor": density_floor}
    person: Any = Individual.random(persistence) if seed is None else Individual(seed, persistence)
    if observed is not None:
        note("abducting …")
        person = abduct(causal, processor, prompt, observed, seed=person.seed, **options)
        options = {}
    note(f"generating {len(do or []) + 2} texts …")
    result = counterfactual(
        causal,
        processor,
        prompt,
        do or [],
        person,
        max_new_tokens=max_new_tokens,
        persistence=persistence,
        **options,
    )
    if as_json:
        print_json(result.to_dict())
    else:
        _show(result)


def _show(result: Counterfactual) -> None:
    """One row per text: whose, after which prompt, and from which token on it is another."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_lines=True, pad_edge=False)
    table.add_column("", style="cyan", no_wrap=True)
    table.add_column("text (prompt dimmed)", ratio=1, overflow="fold")
    table.add_column("differs", no_wrap=True)
    table.add_column("edits", justify="right", no_wrap=True)
    branches = [("factual", result.factual)]
    branches += [(f"do {index}", branch) for index, branch in enumerate(result.interventions, start=1)]
    branches += [("control", result.control)]
    for name, branch in branches:
        text = Text(str(branch.prompt), style="dim").append(branch.text, style="not dim")
        known = branch is result.factual
        table.add_row(name, text, "" if known else _where(branch), "" if known else str(branch.edit_distance))
    console = Console(highlight=False)
    console.print(table)
    seed, other = result.individual.seed, result.control.individual.seed
    path = result.individual.path
    said = "" if path is None else f", abducted from {len(path)} tokens"
    console.print(f"individual: seed {seed}{said}; control: seed {other}\nRepeat with --seed {seed}")


def _where(branch: Branch) -> str:
    return "identical" if branch.divergence is None else f"from token {branch.divergence}"
