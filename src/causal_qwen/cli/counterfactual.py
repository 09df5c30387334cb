"""causal-qwen counterfactual MODEL PROMPT --do OTHER."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json, print_table, quiet_libraries
from causal_qwen.cli.models import load

if TYPE_CHECKING:
    from causal_qwen.causal_lm import CausalLM
    from causal_qwen.counterfactual.interventions import Counterfactual
    from causal_qwen.counterfactual.numbers import CounterfactualNumbers


def command(
    model: shared.Model,
    prompt: Annotated[str, typer.Argument(help="The factual prompt.")],
    do: Annotated[
        list[str] | None, typer.Option("--do", help="A prompt instead of the factual one; may be repeated.")
    ] = None,
    seed: shared.Seed = None,
    max_new_tokens: shared.NewTokens = 40,
    observed: Annotated[
        str | None,
        typer.Option(
            help="A continuation of PROMPT that was observed: who would have said it is found first. "
            "Begin it with its space. A number, for a model that writes numbers, is answered by numbers."
        ),
    ] = None,
    noise: Annotated[
        Literal["kept", "redrawn"],
        typer.Option(
            help="What a --do keeps: all noise (the same prompt gives the same text), or the individual's "
            "with the world's redrawn (the same prompt gives a text of the same law)."
        ),
    ] = "kept",
    temperature: shared.Temperature = None,
    density_floor: shared.DensityFloor = None,
    persistence: shared.Persistence = None,
    level: shared.Level = 0.9,
    device: shared.Device = None,
    dtype: shared.Dtype = "auto",
    as_json: shared.AsJson = False,
) -> None:
    """Ask one individual several prompts: what would the same one have said?"""
    shared.check_prompt(prompt, "the prompt")
    for index, other in enumerate(do or [], start=1):
        shared.check_prompt(other, f"--do {index}")
    if observed is not None:
        shared.check_prompt(observed, "--observed")
    quiet_libraries()
    from causal_qwen.individual import Individual
    from causal_qwen.prompting import Settings, Speaker

    settings = Settings(
        mode="causal",
        seed=seed,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        persistence=persistence,
        density_floor=density_floor,
        level=level,
    )
    causal, processor = load(model, device=device, dtype=dtype)
    from causal_qwen.counterfactual import abduct, counterfactual

    speaker = Speaker(causal, processor)
    for one in (prompt, *(do or [])):
        speaker.check(one, settings)
    options: dict[str, Any] = {
        "temperature": 1.0 if temperature is None else temperature,
        "density_floor": density_floor,
        "noise": noise,
    }
    person: Any = Individual.random(persistence) if seed is None else Individual(seed, persistence)
    if observed is not None and (number := _number(causal, observed)) is not None:
        from causal_qwen.counterfactual import counterfactual_number

        prompts = do or [prompt]
        numbers = counterfactual_number(causal, processor, prompt, number, prompts, level=level, noise=noise)
        _show_numbers(prompt, prompts, numbers, as_json)
        return
    if observed is not None:
        note("abducting …")
        person = abduct(causal, processor, prompt, observed, seed=person.seed, **options)
        options = {"noise": noise}
    note(f"generating {len(do or []) + 2} texts …")
    result = counterfactual(
        causal,
        processor,
        prompt,
        do or [],
        person,
        max_new_tokens=max_new_tokens,
        persistence=persistence,
        interval_level=level,
        **options,
    )
    if as_json:
        print_json(result.to_dict())
    else:
        _show(result)


def _number(model: CausalLM, observed: str) -> float | None:
    """The number that was observed; None if it is a text, or the model writes digits as text."""
    from causal_qwen.numbers import scan

    numbers = scan(observed.strip()) if model.writes_numbers else []
    whole = len(numbers) == 1 and (numbers[0].start, numbers[0].end) == (0, len(observed.strip()))
    return float(numbers[0].value) if whole else None


def _show_numbers(prompt: str, prompts: list[str], numbers: CounterfactualNumbers, as_json: bool) -> None:
    """One row per intervention: what the number would have been."""
    records = numbers.records()
    if as_json:
        shared_fields = {"prompt": prompt, "observed": records[0]["observed"], "rank": records[0]["rank"]}
        own = ("median", "lower", "upper", "prediction", "extrapolates")
        answers = [
            {"prompt": other} | {name: record[name] for name in own}
            for other, record in zip(prompts, records, strict=True)
        ]
        print_json(shared_fields | {"noise": numbers.noise, "level": numbers.level, "interventions": answers})
        return
    rows = []
    for other, record in zip(prompts, records, strict=True):
        known = record["lower"] is not None
        interval = f"{record['lower']:.6g} to {record['upper']:.6g}" if known else "unknown"
        beyond = " (beyond what training has seen)" if record["extrapolates"] else ""
        rows.append((other, f"{record['median']:.6g}{beyond}", interval, f"{record['prediction']:.6g}"))
    title = f"{prompt} {records[0]['observed']:.6g} (rank {records[0]['rank']:.1%})"
    print_table(title, rows, header=("instead", "median", f"{100 * numbers.level:.6g}%", "not observed"))


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
        where = "identical" if branch.divergence is None else f"from token {branch.divergence}"
        differences = ("", "") if branch is result.factual else (where, str(branch.edit_distance))
        table.add_row(name, text, *differences)
    console = Console(highlight=False)
    console.print(table)
    seed, other = result.individual.seed, result.control.individual.seed
    path = result.individual.path
    said = "" if path is None else f", abducted from {len(path)} tokens"
    if result.noise == "redrawn":
        said += "; exogenous noise redrawn"
    console.print(f"individual: seed {seed}{said}; control: seed {other}\nRepeat with --seed {seed}")
