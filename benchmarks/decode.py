"""How fast does a token come, against transformers and llama.cpp on the same weights?

All variants continue the same prompt greedily and are run in turn within each round. A rate counts the steps
after the first token; a ratio is the median over rounds. llama.cpp takes part where ``pip install xllamacpp``
works; it reads the embedded base in its 4 bits, and reports its own rate of generation.

    python benchmarks/decode.py                 # every figure, and docs/assets/decoder_cache.png with --plot
    python benchmarks/decode.py --quick --json  # the ratios, in about three minutes
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CompileConfig, StoppingCriteria

import causal_qwen
from causal_qwen import convert
from causal_qwen.conversion import load_base
from causal_qwen.decoder import Engine
from measure import in_child, progress, seconds, show

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
SAMPLED = {"inference_mode": "standard", "do_sample": True, "individual": 1}
MODES: dict[str, dict[str, Any]] = {
    "compatible": {"inference_mode": "compatible", "do_sample": False},
    "standard": {"inference_mode": "standard", "do_sample": False},
    "standard, sampled": SAMPLED | {"top_k": 0},
    "standard, sampled, top_k 50": SAMPLED | {"top_k": 50},
    "causal": {"inference_mode": "causal", "individual": 1, "top_k": 0},
    "causal, top_k 50": {"inference_mode": "causal", "individual": 1, "top_k": 50},
}
# A run gives the seconds of each new token, the first one with the prompt.
Run = Callable[[], list[float]]


class Clock(StoppingCriteria):
    """Notes when tokens come out of generate(), and never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """One more token per row."""
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Pairs(StoppingCriteria):
    """Takes one plain greedy step after every token of generate(), and times both, but for the first.

    The memory's speed drifts within seconds by more than the few percent that are asked about: costs are
    compared token by token.

    Args:
        engine: Of the plain steps.
        ids: (1, T) their prompt.
        tokens: How many steps there will be.
    """

    def __init__(self, engine: Engine, ids: Tensor, tokens: int) -> None:
        self.engine = engine
        self.cache = engine.new_cache(1, ids.shape[1] + tokens)
        self.fed = ids
        self.end: float | None = None
        self.ratios: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """One more token."""
        start = time.perf_counter()
        hidden = self.engine.hidden(self.fed, None, self.cache)[:, -1]
        self.fed = self.engine.head(hidden).argmax(-1, keepdim=True)
        before, self.end = self.end, time.perf_counter()
        if before is not None:
            self.ratios.append((start - before) / (self.end - start))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def main() -> None:
    """Measure, and print tables or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the ratios only, prompt of 32 tokens")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens per run")
    parser.add_argument("--plot", type=Path, help="where the plot of steps against length is written")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps({"rate": llama_cpp_rate(**json.loads(arguments.child))}))
        return
    base = load_base("smollm2")
    ids = held_out(base.tokenizer)
    figures = ratios(base, ids[:, :32], arguments.tokens, arguments.repeats)
    if not arguments.quick:
        figures["tables"] = tables(base, ids, arguments.tokens, arguments.repeats)
        figures["quality"] = {precision: quality(base, ids, precision) for precision in PRECISIONS}
        figures["seconds per step"] = growth(Engine.from_model(base.model), ids, plot=arguments.plot)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in list(figures.items()):
        if isinstance(value, dict):
            rows = [(str(key), *map(_text, _values(entry))) for key, entry in value.items()]
            titles = _titles(next(iter(value.values())))
            show(name, ("", *titles), rows)
            del figures[name]
    show("ratios", ("figure", "value"), [(name, _text(value)) for name, value in figures.items()])


def held_out(tokenizer: Any) -> Tensor:
    """Ids of text that calibration never saw, (1, T)."""
    text = (Path(causal_qwen.__file__).parent / "conversion" / "heldout.txt").read_text(encoding="utf-8")
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids[:, :1024]


# Variants ---------------------------------------------------------------------------------------------------


def transformers_run(model: Any, ids: Tensor, tokens: int, **options: Any) -> list[float]:
    """generate(), eager; the embedded base never stops early."""
    clock, start = Clock(), time.perf_counter()
    generated(model, ids, tokens, clock, **options)
    return _differences([start, *clock.times])


def generated(model: Any, ids: Tensor, tokens: int, watch: StoppingCriteria, **options: Any) -> None:
    """generate(), watched."""
    model.generation_config.eos_token_id = None
    settings = {"max_new_tokens": tokens, "pad_token_id": 0, "do_sample": False} | options
    model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[watch], **settings)


def compiled_run(model: Any, ids: Tensor, tokens: int) -> list[float]:
    """generate() with transformers' own compiled step over a static cache."""
    compiling = CompileConfig(fullgraph=False, mode="default")
    compiling._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": compiling}
    return transformers_run(model, ids, tokens, **options)


def engine_run(engine: Engine, ids: Tensor, tokens: int) -> list[float]:
    """Greedy steps of our own decoder."""
    times = [time.perf_counter()]
    with torch.inference_mode():
        cache = engine.new_cache(len(ids), ids.shape[1] + tokens)
        fed = ids
        for _ in range(tokens):
            fed = engine.head(engine.hidden(fed, None, cache)[:, -1]).argmax(-1, keepdim=True)
            times.append(time.perf_counter())
    return _differences(times)


def memory_run(array: Tensor) -> list[float]:
    """Seconds to read an array that no cache holds, as often as a step is timed."""
    return [seconds(array.sum) for _ in range(8)]


def llama_cpp_rate(prompt: str, tokens: int) -> float:
    """Tokens per second of llama.cpp on the embedded 4-bit file, by its own count; the second of two runs."""
    import xllamacpp

    from causal_qwen.conversion.sources import _embedded_file

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(_embedded_file())
    parameters.n_ctx, parameters.n_parallel = 2048, 1
    parameters.cpuparams.n_threads = torch.get_num_threads()
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    answers = [server.handle_completions(asked | {"cache_prompt": False}) for _ in range(2)]
    return float(answers[1]["timings"]["predicted_per_second"])


# Figures ----------------------------------------------------------------------------------------------------


def ratios(base: Any, ids: Tensor, tokens: int, repeats: int) -> dict[str, Any]:
    """The headline ratios, each within one set of interleaved rounds."""
    engines = {precision: Engine.from_model(base.model, precision=precision) for precision in PRECISIONS}
    half = load_base("smollm2", dtype=torch.bfloat16).model
    variants: dict[str, Run] = {
        "transformers float32": functools.partial(transformers_run, base.model, ids, tokens),
        "transformers bfloat16": functools.partial(transformers_run, half, ids, tokens),
        "batch 8": functools.partial(engine_run, engines["float32"], ids.expand(8, -1), tokens),
    }
    for precision, engine in engines.items():
        variants[precision] = functools.partial(engine_run, engine, ids, tokens)
    array = torch.ones(1 << 26)
    variants["memory"] = functools.partial(memory_run, array)
    task = {"prompt": base.tokenizer.decode(ids[0]), "tokens": tokens}
    peer = None
    if importlib.util.find_spec("xllamacpp") is not None:
        # A process of its own: its threads must not wait beside ours.
        peer = functools.partial(in_child, __file__, task)
    rates = rounds(variants, repeats, peer=peer)
    limit = array.nbytes * max(rates.pop("memory"))  # bytes per second
    text = held_out(base.tokenizer)[:, :512]
    figures: dict[str, Any] = {
        "float32_vs_transformers": _ratio(rates, "float32", "transformers float32"),
        "bfloat16_vs_transformers": _ratio(rates, "bfloat16", "transformers bfloat16"),
        "int8_vs_llamacpp": None if peer is None else _ratio(rates, "int8", "llama.cpp"),
        "int4_vs_llamacpp": None if peer is None else _ratio(rates, "int4", "llama.cpp"),
        "int8_top1_agreement": agreement(engines["float32"], engines["int8"], text),
        "int4_top1_agreement": agreement(engines["float32"], engines["int4"], text),
        "batch8_vs_batch1": 8 * _ratio(rates, "batch 8", "float32"),
    }
    for name, values in rates.items():
        rows = 8 if name == "batch 8" else 1
        figures[f"{name}, tokens per second"] = rows * max(values)
    for precision, engine in engines.items():
        read = engine.weights.step_bytes * max(rates[precision])
        figures[f"{precision}, share of bandwidth"] = read / limit
    del engines, half, variants
    gc.collect()
    return figures | causal(base, ids, tokens, repeats)


def causal(base: Any, ids: Tensor, tokens: int, repeats: int) -> dict[str, Any]:
    """Every mode in the engine against its own plain greedy steps."""
    model = convert(base, calibration="none").model
    native = Engine.from_model(model)
    costs = {}
    for mode, options in MODES.items():
        ratios = []
        for turn in progress(range(repeats + 1), mode):
            pairs = Pairs(native.engine, ids, tokens)
            generated(model, ids, tokens, pairs, engine=native, **options)
            if turn:  # the first one warms up
                ratios += pairs.ratios
        costs[mode] = statistics.median(ratios)
    return {"causal_vs_plain": max(costs.values())} | {f"{mode}, cost": costs[mode] for mode in MODES}


def rounds(
    variants: dict[str, Run], repeats: int, *, peer: Callable[[], dict[str, Any]] | None = None
) -> dict[str, list[float]]:
    """Steps per second after the first token, of each variant in each round."""
    for run in variants.values():
        run()  # compiles
    rates: dict[str, list[float]] = {name: [] for name in variants}
    if peer is not None:
        rates["llama.cpp"] = []
    for _ in progress(range(repeats), "rounds"):
        for name, run in variants.items():
            rates[name].append(1 / statistics.median(run()[1:]))
        if peer is not None:
            rates["llama.cpp"].append(peer()["rate"])
    return rates


def tables(base: Any, ids: Tensor, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Tokens per second and seconds to the first token, by batch and prompt."""
    rows: dict[str, dict[str, float]] = {}
    makers: dict[str, Callable[[], Any]] = {
        "transformers float32": lambda: base.model,
        "transformers float32, compiled": lambda: base.model,
    }
    for precision in PRECISIONS:
        makers[f"engine {precision}"] = functools.partial(Engine.from_model, base.model, precision=precision)
    for name, make in makers.items():
        model = make()
        run: Callable[..., list[float]] = engine_run
        if name.startswith("transformers"):
            run = compiled_run if name.endswith("compiled") else transformers_run
        for batch in (1,) if run is compiled_run else (1, 8):
            for length in (32, 512):
                prompt = ids[:, :length].expand(batch, -1)
                measured = [run(model, prompt, tokens) for _ in range(max(repeats // 2, 2))][1:]
                rows[f"{name}, batch {batch}, prompt {length}"] = {
                    "tokens per second": batch / min(statistics.median(times[1:]) for times in measured),
                    "first token, seconds": min(times[0] for times in measured),
                }
        del model
        gc.collect()
    return rows


@torch.inference_mode()
def stepped(engine: Engine, ids: Tensor) -> Tensor:
    """Logits (1, T, V) of a text read token by token, as generation reads."""
    cache = engine.new_cache(1, ids.shape[1])
    return torch.stack(
        [engine.head(engine.hidden(token, None, cache)[:, -1]) for token in ids.split(1, 1)], 1
    )


def agreement(one: Engine, other: Engine, ids: Tensor) -> float:
    """Share of positions of a text at which both engines say the same token."""
    chosen = [stepped(engine, ids).argmax(-1) for engine in (one, other)]
    return (chosen[0] == chosen[1]).float().mean().item()


@torch.no_grad()
def quality(base: Any, ids: Tensor, precision: str) -> dict[str, float]:
    """Nats per token on held-out text, and top-1 agreement with float32."""
    full, engine = (Engine.from_model(base.model, precision=kind) for kind in ("float32", precision))
    logits = stepped(engine, ids)[0]
    return {
        "nats per token": F.cross_entropy(logits[:-1], ids[0, 1:]).item(),
        "top-1 agreement": agreement(full, engine, ids),
    }


@torch.no_grad()
def growth(engine: Engine, ids: Tensor, *, plot: Path | None) -> dict[int, dict[str, float]]:
    """Seconds of one step at growing lengths: O(n) with a cache, O(n²) without."""
    rows = {}
    text = ids.repeat(1, 8)
    for length in (64, 256, 1024, 4096):
        cache = engine.new_cache(1, length + 16)
        whole = [seconds(lambda length=length: engine.hidden(text[:, :length])) for _ in range(2)]
        engine.hidden(text[:, :length], None, cache)
        steps = [seconds(lambda cache=cache: engine.hidden(ids[:, :1], None, cache)) for _ in range(12)]
        rows[length] = {"with a cache": statistics.median(steps), "without": min(whole)}
    if plot is not None:
        draw(rows, plot)
    return rows


def draw(rows: dict[int, dict[str, float]], file: Path) -> None:
    """Both curves on logarithmic axes, with the slope of n² for the eye."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, marker in (("without", "o"), ("with a cache", "s")):
        axes.plot(list(rows), [1000 * row[name] for row in rows.values()], marker=marker, label=name)
    ends = [length for length in rows if length >= 1024]
    last = 1000 * rows[ends[-1]]["without"]
    axes.plot(ends, [last * (n / ends[-1]) ** 2 for n in ends], ":", color="gray", label="slope of n²")
    axes.set(xscale="log", yscale="log", xlabel="tokens so far", ylabel="milliseconds per step")
    axes.set_xticks(list(rows), [f"{length:,}" for length in rows])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def _ratio(rates: dict[str, list[float]], name: str, baseline: str) -> float:
    return statistics.median(ours / theirs for ours, theirs in zip(rates[name], rates[baseline], strict=True))


def _values(entry: Any) -> list[Any]:
    return list(entry.values()) if isinstance(entry, dict) else [entry]


def _titles(entry: Any) -> list[str]:
    return list(entry) if isinstance(entry, dict) else ["value"]


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
