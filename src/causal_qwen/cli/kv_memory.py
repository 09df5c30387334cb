"""causal-qwen kv-memory MODEL."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from causal_qwen.cli import options as shared
from causal_qwen.cli.console import print_json, print_table, quiet_libraries

if TYPE_CHECKING:
    from causal_qwen.decoder import DecoderConfig

LENGTHS = [1024, 2048, 4096, 8192, 32768]


def command(
    model: Annotated[
        str, typer.Argument(help="tiny, llama_7b, a converted directory, or any source that `convert` takes.")
    ] = "llama_7b",
    length: Annotated[list[int] | None, typer.Option(help="Tokens; may be repeated.", min=1)] = None,
    kv_heads: Annotated[
        list[int] | None, typer.Option(help="Key and value heads; may be repeated.", min=1)
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows.", min=1)] = 1,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], typer.Option(help="Precision of keys and values.")
    ] = "float16",
    as_json: shared.AsJson = False,
) -> None:
    """Show the memory of the KV cache for lengths and numbers of key and value heads."""
    import torch

    from causal_qwen.decoder import kv_cache_bytes

    config = _config(model)
    table: dict[int, dict[int, int]] = {}
    for count in kv_heads or _divisors(config.num_attention_heads):
        variant = replace(config, num_key_value_heads=count)
        table[count] = {
            tokens: kv_cache_bytes(variant, batch, tokens, getattr(torch, dtype))
            for tokens in length or LENGTHS
        }
    if as_json:
        rows = [
            {"kv_heads": count, "tokens": tokens, "bytes": size}
            for count, sizes in table.items()
            for tokens, size in sizes.items()
        ]
        print_json(
            {"model": model, "batch": batch, "dtype": dtype, "kv_heads": config.num_key_value_heads}
            | {"rows": rows}
        )
        return
    header = ("kv heads", *(f"{tokens:,} tokens" for tokens in length or LENGTHS))
    lines = [
        (
            f"{count}{' (its own)' if count == config.num_key_value_heads else ''}",
            *map(_readable, sizes.values()),
        )
        for count, sizes in table.items()
    ]
    print_table(f"KV cache of {model}, {batch} × {dtype}", lines, header=header)


def _config(model: str) -> DecoderConfig:
    """A preset, or what a checkpoint says."""
    from causal_qwen.decoder import DecoderConfig

    presets = {"tiny": DecoderConfig.tiny, "llama_7b": DecoderConfig.llama_7b}
    if model in presets:
        return presets[model]()
    quiet_libraries()
    from causal_qwen.conversion import read_config

    try:
        return DecoderConfig.from_hf_config(read_config(model))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{model}: config.json makes no sense to a decoder ({error})") from error


def _divisors(number: int) -> list[int]:
    """From plain multi-head attention down to one shared head."""
    return [count for count in range(number, 0, -1) if number % count == 0]


def _readable(size: int) -> str:
    mebibytes = size / 2**20
    return f"{mebibytes / 1024:.2f} GiB" if mebibytes >= 1024 else f"{mebibytes:.1f} MiB"
