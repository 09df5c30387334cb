"""What `causal-qwen train --estimate` shows: memory by part and moment, and the time of the arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from causal_qwen.cli.console import note, print_json, print_table

if TYPE_CHECKING:
    from causal_qwen.training.recipe import TrainingRecipe
    from causal_qwen.training.workload import Workload

__all__ = ["show_estimate"]


def show_estimate(
    recipe: TrainingRecipe, *, processes: int, device: str | None, flops: float | None, as_json: bool
) -> None:
    """Print what a run by this recipe would take, on each of ``processes`` devices.

    Args:
        recipe: Of which nothing is loaded but configuration, tokenizer and rows.
        processes: How many train together.
        device: "cpu", or the type of an accelerator; None is the one that training would choose here.
        flops: Operations per second of a device; None measures them, if it is here.
        as_json: Whether to print JSON.

    Raises:
        ValueError: If an option has no meaning, or the model cannot read rows as long as the recipe's.
    """
    import torch

    from causal_qwen.conversion.skeleton import skeleton
    from causal_qwen.training.duration import estimate_arithmetic, measured_rate
    from causal_qwen.training.estimate import estimate_memory, prepare
    from causal_qwen.training.framework import framework_bytes

    _check(processes, flops)
    here = torch.accelerator.current_accelerator(check_available=True)
    own = "cpu" if here is None else here.type
    try:
        device = torch.device(device or own).type
    except RuntimeError:
        raise ValueError(
            f"--device is {device!r}; it must be a type of torch's, such as cpu or cuda"
        ) from None
    workload, num_token_id = _workload(recipe)
    model: Any = skeleton(recipe.model, dtype=recipe.dtype, num_token_id=num_token_id)
    longest = model.config.max_position_embeddings
    if recipe.max_length > longest:
        raise ValueError(
            f"max_length is {recipe.max_length}; {recipe.model} reads {longest} tokens: lower it to that"
        )
    arithmetic = estimate_arithmetic(model, recipe, workload, processes=processes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    module = prepare(model, recipe)
    memory = estimate_memory(
        model,
        module,
        recipe,
        workload.batch,
        processes=processes,
        device=device,
        framework=framework_bytes() if device == "cpu" else 0,
    )
    rate = flops
    if rate is None and device in (own, "cpu"):
        note(f"measuring the rate of {device} …")
        narrow = recipe.bf16 or model.dtype == torch.bfloat16
        rate = measured_rate(device, dtype=torch.bfloat16 if narrow else torch.float32)
    seconds = None if rate is None else arithmetic.per_step / rate
    hours = None if rate is None or arithmetic.total is None else arithmetic.total / rate / 3600
    learned = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    if as_json:
        print_json(
            {
                "model": recipe.model,
                "parameters": parameters,
                "learned_parameters": learned,
                "device": device,
                "processes": processes,
                "batch": workload.batch._asdict(),
                "rows": workload.rows,
                "bytes": memory.moments,
                "peak": memory.peak,
                "total": memory.total,
                "steps": arithmetic.steps,
                "flops_per_step": arithmetic.per_step,
                "flops_per_second": rate,
                "seconds_per_step": seconds,
                "hours": hours,
            }
        )
        return
    batch = workload.batch
    places = f"{device}, {processes} of them" if processes > 1 else device
    title = f"{recipe.model}, {recipe.method}: memory of each device ({places}), GB"
    lines = [
        (part, *(_gigabytes(parts[part]) for parts in memory.moments.values()))
        for part in next(iter(memory.moments.values()))
    ]
    totals = ("total", *(_gigabytes(sum(parts.values())) for parts in memory.moments.values()))
    print_table(title, [*lines, totals], header=("", *memory.moments))
    facts = [
        ("peak", f"{_gigabytes(memory.total)} GB, {memory.peak}"),
        ("parameters", f"{parameters:,}, of which {learned:,} learn" if learned else f"{parameters:,}"),
        ("largest batch", f"{batch.rows} × {batch.length} tokens, {batch.learned} learned"),
        ("rows", "not known" if workload.rows is None else f"{workload.rows:,}"),
        ("steps", "not known: set max_steps" if arithmetic.steps is None else f"{arithmetic.steps:,}"),
        ("arithmetic of a step", f"{arithmetic.per_step / 1e12:.3g} TFLOP"),
        ("rate", "not known: give --flops" if rate is None else f"{rate / 1e12:.3g} TFLOP per second"),
        ("a step takes at least", "not known" if seconds is None else f"{seconds:.3g} s"),
        ("the run takes at least", "not known" if hours is None else _duration(hours)),
    ]
    print_table("batches and time", facts)


def _check(processes: int, flops: float | None) -> None:
    if processes < 1:
        raise ValueError(f"--processes is {processes}; at least 1 trains")
    if flops is not None and not 0 < flops < float("inf"):
        raise ValueError(f"--flops is {flops:g}; it must be above 0: operations per second, such as 3e14")


def _workload(recipe: TrainingRecipe) -> tuple[Workload, int | None]:
    """By the rows where a tokenizer is at hand, else by max_length; and the row that <NUM> will take."""
    from pathlib import Path

    from causal_qwen.conversion import EMBEDDED
    from causal_qwen.training.preparation import count_examples, load_processor, prepare_rows
    from causal_qwen.training.workload import assumed_workload, measured_workload

    # A hub is asked for no weights here, and the processor of a base comes with them.
    if not (recipe.model == EMBEDDED or Path(recipe.model).expanduser().exists()):
        return assumed_workload(recipe, count_examples(recipe)), None
    processor = load_processor(recipe)
    if recipe.data is None:
        return assumed_workload(recipe), processor.num_token_id
    return measured_workload(prepare_rows(recipe, processor, None), recipe), processor.num_token_id


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}"


def _duration(hours: float) -> str:
    return f"{hours * 60:.3g} minutes" if hours < 1 else f"{hours:,.3g} hours"
