"""What do conversion and parity cost at half a billion parameters?

Random weights in the shape of Qwen2.5-0.5B with Qwen's vocabulary: as a directory in bfloat16 and in
float32, tied, and as a GGUF file in eight bits, untied. `causal-qwen convert` and `causal-qwen parity` run in
processes of their own; memory is the most that a process ever held, Python and its libraries included, and is
compared with the weights in float32.

    python benchmarks/conversion_cost.py                  # ten minutes, and 12 GB of disk for a while
    python benchmarks/conversion_cost.py --quick --json   # a small model
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import runpy
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from measure import Option, Record, Table, in_child, run_benchmark, watched

TESTS = Path(__file__).parents[1] / "tests"
KINDS = {"bfloat16": "directory, bfloat16", "float32": "directory, float32", "gguf": "GGUF, Q8_0"}
VERBS = ("convert", "parity")
OPTIONS = {
    "kinds": Option("of bases", tuple(KINDS), smoke=tuple(KINDS)),
    "layers": Option("of the model", 24, smoke=1, quick=2),
    "hidden_size": Option("H", 896, smoke=64, quick=128),
    "intermediate_size": Option("of the feed-forward layers", 4864, smoke=64, quick=256),
    "heads": Option("of attention", 14, smoke=2, quick=2),
    "rows": Option("of the vocabulary", 151_936, smoke=2000),
}
KV_HEADS = 2
QWEN_TOKENS = 151_665


def main(argv: Sequence[str] | None = None) -> None:
    """Convert and compare."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="a small model", argv=argv, child=child)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of each kind of base: the size of its weights in float32, and the cost of both commands."""
    shape = {name: getattr(arguments, name) for name in OPTIONS if name != "kinds"}
    measured = {}
    for kind in watched(arguments.kinds, "bases"):
        with tempfile.TemporaryDirectory() as place:
            base, size = write_base(Path(place), kind, **shape)
            measured[kind] = {"float32_bytes": size}
            for verb in VERBS:
                words = [str(base), f"{place}/converted"] if verb == "convert" else [f"{place}/converted"]
                result = in_child(__file__, {"words": [verb, *words, "--json"], "cache": f"{place}/cache"})
                if "error" in result:
                    raise RuntimeError(f"{verb} of {KINDS[kind]}: {result['error']}")
                measured[kind][verb] = result
    return measured


def child(words: list[str], cache: str) -> dict[str, Any]:
    """Time, processor time, and the peak of memory of one command; what it printed, if that is parity."""
    from causal_qwen.cli import app
    from causal_qwen.directories import cache_directory

    # What is compiled stays where it is; what is dequantised goes with the base.
    compiled = cache_directory() / "compiled"
    compiled.mkdir(parents=True, exist_ok=True)
    Path(cache).mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (Path(cache) / "compiled").symlink_to(compiled.resolve())
    before = os.environ.get("CAUSAL_QWEN_CACHE")
    os.environ["CAUSAL_QWEN_CACHE"] = cache
    start, processor_start, printed = time.perf_counter(), time.process_time(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            app(words, standalone_mode=False)
    finally:
        os.environ.pop("CAUSAL_QWEN_CACHE")
        if before is not None:
            os.environ["CAUSAL_QWEN_CACHE"] = before
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    result = {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor_start,
        "bytes": peak,
    }
    report = json.loads(printed.getvalue())
    if "max_abs_logit_diff" in report:
        result |= {name: report[name] for name in ("max_abs_logit_diff", "argmax_agreement")}
    return result


def write_base(
    place: Path,
    kind: str,
    *,
    layers: int,
    hidden_size: int,
    intermediate_size: int,
    heads: int,
    rows: int,
) -> tuple[Path, int]:
    """A base of random weights, and the bytes of its weights in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=rows,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=kind != "gguf",
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    tokenizer = vocabulary(rows)
    size = 4 * model.num_parameters()
    if kind == "gguf":
        path = place / "base.gguf"
        runpy.run_path(str(TESTS / "gguf_files.py"))["write_gguf"](model, tokenizer, path, kind="Q8_0")
        return path, size
    path = place / "base"
    model.to(getattr(torch, kind)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path, size


@functools.cache
def vocabulary(rows: int) -> Any:
    """Qwen's tokenizer, or as much of it as there are rows for."""
    from transformers import PreTrainedTokenizerFast

    whole = runpy.run_path(str(TESTS / "qwen_vocabulary.py"))["qwen_tokenizer"]()
    if rows >= QWEN_TOKENS:
        return whole
    state = json.loads(whole.backend_tokenizer.to_str())
    model = state["model"]
    model["vocab"] = {token: index for token, index in model["vocab"].items() if index < rows - 8}
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= model["vocab"].keys()]
    state["added_tokens"] = []
    return PreTrainedTokenizerFast(tokenizer_object=type(whole.backend_tokenizer).from_str(json.dumps(state)))


def tables(record: Record) -> list[Table]:
    """One row per kind of base and command."""
    rows = [
        (
            f"`{verb}`, {KINDS[kind]}",
            f"{base['float32_bytes'] / 1e9:.2f} GB",
            f"{base[verb]['bytes'] / 1e9:.2f} GB",
            f"{base[verb]['bytes'] / base['float32_bytes']:.2f}×",
            f"{base[verb]['seconds']:.0f}",
            f"{base[verb]['processor_seconds']:.0f}",
        )
        for kind, base in record.figures.items()
        for verb in VERBS
    ]
    parameters = max(base["float32_bytes"] for base in record.figures.values()) / 4
    columns = ("command", "weights in float32", "peak of memory", "relative", "seconds", "processor seconds")
    return [Table(f"Up to {parameters / 1e6:,.0f} million parameters", columns, rows)]


def headlines(record: Record) -> list[tuple[str, str]]:
    """Memory, the worst of all bases."""
    worst = max(base["convert"]["bytes"] / base["float32_bytes"] for base in record.figures.values())
    return [("conversion: peak of memory over the weights in float32", f"{worst:.2f}×")]


if __name__ == "__main__":
    main()
