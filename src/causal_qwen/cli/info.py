"""causal-qwen info DIR."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import print_json, print_table


def command(
    directory: Annotated[Path, typer.Argument(help="A converted model.")],
    as_json: shared.AsJson = False,
) -> None:
    """Show architecture, added parameters, calibration and number handling of a converted model."""
    facts = describe(directory)
    if as_json:
        print_json(facts)
        return
    for title, section in facts.items():
        print_table(title, section.items())


def describe(directory: Path) -> dict[str, dict[str, Any]]:
    """What a converted directory says of itself, read from its JSON and the headers of its weights alone."""
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{directory}: no config.json; give a directory that `causal-qwen convert` wrote"
        ) from None
    if not str(config.get("model_type")).startswith("causal_"):
        raise ValueError(
            f"{directory}: model_type is {config.get('model_type')!r}, which is not causal; convert it first"
        )
    sizes: dict[str, int] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    sizes[name] = math.prod(tensors.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{file}: damaged or truncated ({error}); convert again") from error
    prefixes = ("abduction.", "action.", "numeric_embedding.")
    total = sum(sizes.values())
    added = sum(size for name, size in sizes.items() if name.startswith(prefixes))
    report_file = directory / "conversion.json"
    report = json.loads(report_file.read_text(encoding="utf-8")) if report_file.exists() else {}
    return {
        "architecture": {
            "layers": config["num_hidden_layers"],
            "hidden_size (H)": config["hidden_size"],
            "causal_size (D)": config["causal_size"],
            "vocab_size (V)": config["vocab_size"],
            "heads / kv heads": f"{config['num_attention_heads']} / {config['num_key_value_heads']}",
            "dtype": config.get("dtype"),
            "W tied to the embedding": config["tie_word_embeddings"],
            "converted from": report.get("source", "unknown"),
        },
        "parameters": {
            "total": total,
            "causal heads": added,
            "added fraction": report.get("added_parameters_fraction", added / max(total, 1)),
        },
        "calibration": report.get("calibration", {"mode": "unknown"}),
        "inference": {
            name: config[name] for name in ("inference_mode", "noise_gain", "density_floor", "persistence")
        },
        "numbers": {
            name: config[name]
            for name in ("num_token_id", "numeric_encoding", "value_space", "value_center", "value_spread")
        },
    }
