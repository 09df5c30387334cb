"""causal-qwen simulate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import note, print_json, print_table
from causal_qwen.directories import check_output_file

DEFAULT_PLOT = Path("simulation.png")


def command(
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Picture to write, a .png; simulation.png if not given, and none with --json.",
            dir_okay=False,
        ),
    ] = None,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Write no picture.")] = False,
    count: Annotated[int, typer.Option(help="Individuals to train on.")] = 8000,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 400,
    seed: Annotated[int, typer.Option(help="Of truth, data and starting point.")] = 0,
    as_json: shared.AsJson = False,
) -> None:
    """Train the causal engine on synthetic features: convergence, recovery, and what outliers do."""
    from causal_qwen.simulation import simulate
    from causal_qwen.simulation.plot import draw_simulation

    if no_plot and plot is not None:
        raise ValueError(f"--plot {plot} and --no-plot; give one of them")
    if plot is not None and plot.suffix.lower() != ".png":
        raise ValueError(f"{plot} ends in {plot.suffix or 'nothing'!r}; a picture is a .png")
    file = None if no_plot else plot or (None if as_json else DEFAULT_PLOT)
    if file is not None:
        check_output_file(file)
    simulation = simulate(count=count, steps=steps, seed=seed, progress=lambda message: note(f"{message} …"))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        draw_simulation(simulation, file)
        note(f"picture: {file}")
    summary = simulation.summary() | {"plot": None if file is None else str(file)}
    if as_json:
        print_json(summary)
        return
    errors = simulation.convergence.parameter_errors
    print_table(
        "Does it recover the truth?",
        [(name, f"{errors[name]:.4f}", f"{bound:g}") for name, bound in summary["tolerances"].items()],
        header=("parameter", "relative error", "tolerance"),
    )
    print_table(
        "Next to whoever knows the structure",
        [
            ("accuracy", f"{summary['accuracy']:.3f}", f"{summary['best_accuracy']:.3f}"),
            ("median number error", f"{summary['number_error']:.4f}", f"{summary['best_number_error']:.4f}"),
        ],
        header=("", "engine", "best possible"),
    )
    heads = simulation.robustness
    print_table(
        "Median error on clean numbers, by share of outliers in training",
        [
            (f"{share:.0%}", f"{cauchy:.4f}", f"{squared:.4f}")
            for share, cauchy, squared in zip(heads.shares, heads.cauchy, heads.squared, strict=True)
        ],
        header=("outliers", "Cauchy", "squared error"),
    )
    print(f"growth at 30%: Cauchy {summary['cauchy_error_growth']:.2f}×, ", end="")
    print(f"squared error {summary['squared_error_growth']:.2f}×")
