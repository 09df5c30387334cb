"""How long until the first token, and how much memory does a start take?

`causal-qwen generate DIR "…" --max-new-tokens 1` in a new process, its weights packed by an earlier one,
against llama.cpp on the same base in 4 bits, in a new process that imports xllamacpp and nothing else, and
against Python's import of torch, which is part of ours. All of them take turns within each round; a time is
from the start of a process to the token on its output, a ratio the median over rounds. Memory is the most
that a process ever held, with the pages of the file that is mapped. The large model has random weights in the
shape of Qwen2.5-0.5B.

    python benchmarks/startup.py                 # ten rounds
    python benchmarks/startup.py --quick --json  # three rounds
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from causal_qwen import convert
from causal_qwen.conversion.checkpoints import EMBEDDED, locate
from causal_qwen.directories import cache_directory
from conversion_cost import OPTIONS as SHAPE
from conversion_cost import write_base
from measure import BASE, Option, Record, Table, run_benchmark, watched

PROMPT = "The capital of France is"
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
SIZES = ("layers", "hidden_size", "intermediate_size", "heads", "rows")
OPTIONS = {
    "base": BASE,
    "repeats": Option("interleaved rounds", 10, smoke=1, quick=3),
    "precisions": Option("of the weights", PRECISIONS, smoke=("int8",)),
    **{name: Option(SHAPE[name].help, SHAPE[name].full, smoke=SHAPE[name].smoke) for name in SIZES},
}
PEAK = """
import atexit, pathlib, sys
def peak():
    text = pathlib.Path("/proc/self/status").read_text().partition("VmHWM:")[2]
    print(int(text.split()[0]) * 1024, file=sys.stderr)
atexit.register(peak)
"""
IMPORT_TORCH = "import torch; print('imported', flush=True)"
LLAMA_CPP = """
import sys, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx, parameters.n_parallel, parameters.verbosity = 2048, 1, -1
parameters.cpuparams.n_threads = int(sys.argv[3])
server = xllamacpp.Server(parameters)
answer = server.handle_completions({"prompt": sys.argv[2], "max_tokens": 1, "temperature": 0.0})
print(answer["choices"][0]["text"], flush=True)
"""
OURS = """
import sys
from causal_qwen_command import main
sys.argv[0] = "causal-qwen"
main()
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table or one JSON object."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="three rounds", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds, bytes and the ratios."""
    with tempfile.TemporaryDirectory() as place, own_cache(Path(place) / "cache"):
        small, large = Path(place) / "small", Path(place) / "large"
        convert(arguments.base, small, calibration="none")
        shape = {name: getattr(arguments, name) for name in SIZES}
        base, size = write_base(Path(place), "bfloat16", **shape)
        convert(base, large, calibration="none")
        commands = {"import torch": command(IMPORT_TORCH)}
        if arguments.base == BASE.full and importlib.util.find_spec("xllamacpp") is not None:
            threads = str(os.cpu_count())
            commands["llama.cpp"] = command(LLAMA_CPP, str(locate(EMBEDDED)), PROMPT, threads)
        ours = {precision: generate(small, precision) for precision in arguments.precisions}
        packing = {precision: first_token(words) for precision, words in ours.items()}
        commands |= ours
        starts: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for _ in watched(range(arguments.repeats), "rounds"):
            for name, words in commands.items():
                starts[name].append(first_token(words))
        first_token(generate(large, "int8"))  # packs
        big = first_token(generate(large, "int8"))
        whole = first_token(generate(small, "float32", "--engine", "transformers"))
    seconds = {name: [start["seconds"] for start in runs] for name, runs in starts.items()}
    peer = seconds.get("llama.cpp")
    return {
        **{f"{name}_vs_llamacpp_and_torch": _together(seconds, name, peer) for name in ours},
        **{f"{name}_beyond_torch_vs_llamacpp": _beyond(seconds, name, peer) for name in ours},
        "int8_mb": max(start["bytes"] for start in starts["int8"]) / 1e6,
        "half_billion_int8_mb": big["bytes"] / 1e6,
        "half_billion_parameters": size // 4,
        "half_billion_seconds": big["seconds"],
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "bytes": {name: max(start["bytes"] for start in runs) for name, runs in starts.items()},
        "packing": packing,
        "transformers": whole,
    }


@contextlib.contextmanager
def own_cache(place: Path) -> Iterator[None]:
    """A cache of its own for what is packed, with the native code that is built already."""
    compiled = cache_directory() / "compiled"
    compiled.mkdir(parents=True, exist_ok=True)
    place.mkdir()
    (place / "compiled").symlink_to(compiled.resolve())
    before = os.environ.get("CAUSAL_QWEN_CACHE")
    os.environ["CAUSAL_QWEN_CACHE"] = str(place)
    try:
        yield
    finally:
        del os.environ["CAUSAL_QWEN_CACHE"]
        if before is not None:
            os.environ["CAUSAL_QWEN_CACHE"] = before


def command(script: str, *words: str) -> list[str]:
    """A new process of Python, which says at its end how much memory it had."""
    return [sys.executable, "-c", PEAK + script, *words]


def generate(directory: Path, precision: str, *options: str) -> list[str]:
    """One token of a model."""
    words = [str(directory), PROMPT, "--max-new-tokens", "1", "--dtype", precision]
    return command(OURS, "generate", *words, "--engine", "native", *options)


def first_token(words: Sequence[str]) -> dict[str, float]:
    """{"seconds", "bytes"}: until there is more on the output than the prompt, and the peak of memory.

    Raises:
        RuntimeError: If the process fails.
    """
    begin = time.perf_counter()
    said, seconds = b"", 0.0
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, bufsize=0) as process,
    ):
        assert process.stdout is not None
        while piece := process.stdout.read(4096):
            said += piece
            if not seconds and len(said.removeprefix(PROMPT.encode())) and said != PROMPT.encode():
                seconds = time.perf_counter() - begin
        code = process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines() or [""]
    if code or not seconds:
        raise RuntimeError(f"exit code {code}: {lines[-1]}")
    return {"seconds": seconds, "bytes": float(lines[-1])}


def _together(seconds: dict[str, list[float]], name: str, peer: list[float] | None) -> float | None:
    """Ours over llama.cpp's and the import of torch together."""
    if peer is None:
        return None
    rounds = zip(seconds[name], peer, seconds["import torch"], strict=True)
    return statistics.median(ours / (theirs + torch) for ours, theirs, torch in rounds)


def _beyond(seconds: dict[str, list[float]], name: str, peer: list[float] | None) -> float | None:
    """What ours takes beyond the import of torch, over llama.cpp's: the stricter reading."""
    if peer is None:
        return None
    rounds = zip(seconds[name], peer, seconds["import torch"], strict=True)
    return statistics.median((ours - torch) / theirs for ours, theirs, torch in rounds)


def tables(record: Record) -> list[Table]:
    """One row per process."""
    values = record.figures
    names = {"import torch": "`import torch` alone", "llama.cpp": "llama.cpp, 4 bits"}
    rows = [
        (
            names.get(name, f"`generate`, {name}"),
            f"{seconds:.2f}",
            _ratio(values.get(f"{name}_vs_llamacpp_and_torch")),
            _ratio(values.get(f"{name}_beyond_torch_vs_llamacpp")),
            f"{values['bytes'][name] / 1e6:.0f} MB",
        )
        for name, seconds in values["seconds"].items()
    ]
    large = f"`generate`, int8, {values['half_billion_parameters'] / 1e6:,.0f} million parameters"
    big = {"seconds": values["half_billion_seconds"], "bytes": 1e6 * values["half_billion_int8_mb"]}
    rows.append((large, *_cost(big)))
    rows.append(("`generate`, int8, the first time: packs", *_cost(values["packing"]["int8"])))
    rows.append(("`generate --engine transformers`, float32", *_cost(values["transformers"])))
    ratios = ("over llama.cpp + torch", "beyond torch, over llama.cpp")
    columns = ("a new process", "first token, s", *ratios, "peak of memory")
    return [Table("From nothing to a token", columns, rows)]


def _cost(start: dict[str, float]) -> tuple[str, str, str, str]:
    return f"{start['seconds']:.2f}", "", "", f"{start['bytes'] / 1e6:.0f} MB"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def headlines(record: Record) -> list[tuple[str, str]]:
    """Time and memory of a start."""
    values = record.figures
    seconds = {name: f"{median:.1f}" for name, median in values["seconds"].items()}
    peers = f"llama.cpp {seconds.get('llama.cpp', '–')}, `import torch` {seconds['import torch']}"
    memory = f"{values['int8_mb']:.0f} and {values['half_billion_int8_mb']:.0f} MB"
    return [
        ("a new process to its first token, seconds", f"{seconds['float32']} ({peers})"),
        ("memory of a start in int8, of the embedded base and of half a billion parameters", memory),
    ]


if __name__ == "__main__":
    main()
