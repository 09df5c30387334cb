"""How fast does a token come, against transformers and llama.cpp on the same weights?

All variants continue the same prompt greedily and are run in turn within each round. A rate counts the steps
after the first token; a ratio is the median over rounds. llama.cpp takes part where ``pip install xllamacpp``
works; it reads the embedded base in its 4 bits, and reports its own rate of generation.

    python benchmarks/decode.py                 # every figure, in ten minutes
    python benchmarks/decode.py --quick --json  # the ratios, in about three minutes
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CompileConfig, StoppingCriteria

from causal_qwen import convert
from causal_qwen.conversion import bundled_text, load_base
from causal_qwen.decoder import Engine
from measure import BASE, Option, Record, Table, in_child, ratio, run_benchmark, seconds, watched

BASELINES = {"float32": "transformers", "bfloat16": "transformers", "int8": "llamacpp", "int4": "llamacpp"}
PRECISIONS = tuple(BASELINES)
SAMPLED = {"inference_mode": "standard", "do_sample": True, "individual": 1}
MODES: dict[str, dict[str, Any]] = {
    "compatible": {"inference_mode": "compatible", "do_sample": False},
    "standard": {"inference_mode": "standard", "do_sample": False},
    "standard, sampled": SAMPLED | {"top_k": 0},
    "standard, sampled, top_k 50": SAMPLED | {"top_k": 50},
    "causal": {"inference_mode": "causal", "individual": 1, "top_k": 0},
    "causal, top_k 50": {"inference_mode": "causal", "individual": 1, "top_k": 50},
}
COMPILED = "transformers float32, compiled"
BATCHES = (1, 8)
PROMPT = 32  # tokens of the prompt that the ratios are taken at
OPTIONS = {
    "base": BASE,
    "repeats": Option("interleaved rounds", 5, smoke=1),
    "tokens": Option("new tokens per run", 24, smoke=3),
    "characters": Option("of held-out text, at most", 1_000_000, smoke=100),
    "prompts": Option("tokens of the prompts of the table", (PROMPT, 512), smoke=(PROMPT,)),
    "compiled": Option("whether transformers' compiled step takes part: yes or no", "yes", smoke="no"),
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

    The memory's speed drifts within seconds by more than the few percent that decisions cost: they are
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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print tables or one JSON object."""
    run_benchmark(
        __file__, __doc__, OPTIONS, figures, tables,
        quick="the ratios only", argv=argv, child=llama_cpp_rate,
    )  # fmt: skip


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """The ratios; without --quick also rates by batch and prompt, and quality."""
    base = load_base(arguments.base)
    text = bundled_text("heldout")[: arguments.characters]  # calibration never reads it
    ids = base.tokenizer(text, return_tensors="pt").input_ids[:, :1024]  # (1, T)
    values = ratios(base, ids, arguments)
    if arguments.quick:
        return values
    return values | {
        "tables": rates(base, ids, arguments),
        "quality": {precision: quality(base, ids, precision) for precision in PRECISIONS},
    }


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


def llama_cpp_rate(prompt: str, tokens: int) -> dict[str, float]:
    """{"rate"}: llama.cpp's tokens per second on the embedded 4-bit file, by its own count; of two runs the
    second.
    """
    import xllamacpp

    from causal_qwen.conversion.checkpoints import EMBEDDED, locate

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(locate(EMBEDDED))
    parameters.n_ctx, parameters.n_parallel = 2048, 1
    parameters.cpuparams.n_threads = torch.get_num_threads()
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)
    request = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    answers = [server.handle_completions(request | {"cache_prompt": False}) for _ in range(2)]
    return {"rate": float(answers[1]["timings"]["predicted_per_second"])}


# Figures ----------------------------------------------------------------------------------------------------


def ratios(base: Any, text: Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """The headline ratios, each within one set of interleaved rounds."""
    ids, tokens, repeats = text[:, :PROMPT], arguments.tokens, arguments.repeats
    engines = {precision: Engine.from_model(base.model, precision=precision) for precision in PRECISIONS}
    half = load_base(arguments.base, dtype=torch.bfloat16).model
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
    if arguments.base == BASE.full and importlib.util.find_spec("xllamacpp") is not None:
        # A process of its own: its threads must not wait beside ours.
        peer = functools.partial(in_child, __file__, task)
    rates = rounds(variants, repeats, peer=peer)
    limit = array.nbytes * max(rates.pop("memory"))  # bytes per second
    text = text[:, :512]
    values: dict[str, Any] = {
        "float32_vs_transformers": ratio(rates, "float32", "transformers float32"),
        "bfloat16_vs_transformers": ratio(rates, "bfloat16", "transformers bfloat16"),
        "int8_vs_llamacpp": None if peer is None else ratio(rates, "int8", "llama.cpp"),
        "int4_vs_llamacpp": None if peer is None else ratio(rates, "int4", "llama.cpp"),
        "int8_top1_agreement": agreement(engines["float32"], engines["int8"], text),
        "int4_top1_agreement": agreement(engines["float32"], engines["int4"], text),
        "batch8_vs_batch1": 8 * ratio(rates, "batch 8", "float32"),
    }
    for name, measured in rates.items():
        rows = 8 if name == "batch 8" else 1
        values[f"{name}, tokens per second"] = rows * max(measured)
    for precision, engine in engines.items():
        read = engine.weights.step_bytes * max(rates[precision])
        values[f"{precision}, share of bandwidth"] = read / limit
    del engines, half, variants
    gc.collect()
    return values | causal(base, ids, tokens, repeats)


def causal(base: Any, ids: Tensor, tokens: int, repeats: int) -> dict[str, Any]:
    """Every mode in the engine against its own plain greedy steps."""
    model = convert(base, calibration="none").model
    engine = Engine.from_model(model)
    costs = {}
    for mode, options in MODES.items():
        costs_by_token = []
        for turn in watched(range(repeats + 1), mode):
            pairs = Pairs(engine, ids, tokens)
            generated(model, ids, tokens, pairs, engine=engine, **options)
            if turn:  # the first one warms up
                costs_by_token += pairs.ratios
        costs[mode] = statistics.median(costs_by_token)
    return {"causal_vs_plain": max(costs.values())} | {f"{mode}, cost": costs[mode] for mode in MODES}


def rounds(
    variants: dict[str, Run], repeats: int, *, peer: Callable[[], dict[str, Any]] | None = None
) -> dict[str, list[float]]:
    """Steps per second after the first token, of each variant in each round."""
    for variant in variants.values():
        variant()  # compiles
    rates: dict[str, list[float]] = {name: [] for name in variants}
    if peer is not None:
        rates["llama.cpp"] = []
    for _ in watched(range(repeats), "rounds"):
        for name, variant in variants.items():
            rates[name].append(1 / statistics.median(variant()[1:]))
        if peer is not None:
            rates["llama.cpp"].append(peer()["rate"])
    return rates


def rates(base: Any, ids: Tensor, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens per second and seconds to the first token, by batch and prompt."""
    rows: dict[str, dict[str, float]] = {}
    makers: dict[str, Callable[[], Any]] = {"transformers float32": lambda: base.model}
    if arguments.compiled == "yes":
        makers[COMPILED] = lambda: base.model
    for precision in PRECISIONS:
        makers[f"engine {precision}"] = functools.partial(Engine.from_model, base.model, precision=precision)
    for name, make in makers.items():
        model = make()
        variant: Callable[..., list[float]] = engine_run
        if name.startswith("transformers"):
            variant = compiled_run if name == COMPILED else transformers_run
        for batch in (1,) if variant is compiled_run else BATCHES:
            for length in arguments.prompts:
                prompt = ids[:, :length].expand(batch, -1)
                turns = range(max(arguments.repeats // 2, 2))
                measured = [variant(model, prompt, arguments.tokens) for _ in turns][1:]
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


# What is shown ----------------------------------------------------------------------------------------------


def tables(record: Record) -> list[Table]:
    """Rates and ratios; of a full run also rates by batch and prompt, and quality."""
    values = record.figures
    rows = [
        (f"transformers, eager: {precision}", _rate(values, f"transformers {precision}"), "", "")
        for precision in ("float32", "bfloat16")
    ]
    rows.append(("llama.cpp, the same weights in 4 bits", _rate(values, "llama.cpp"), "", ""))
    for precision, baseline in BASELINES.items():
        against = values[f"{precision}_vs_{baseline}"]
        name = baseline.replace("llamacpp", "llama.cpp")
        rows.append(
            (
                f"the engine: {precision}",
                _rate(values, precision),
                "–" if against is None else f"{against:.2f}× {name}",
                f"{values[f'{precision}, share of bandwidth']:.0%}",
            )
        )
    batch = f"{values['batch8_vs_batch1']:.1f}× batch 1"
    rows.append(("the engine: float32, batch 8", _rate(values, "batch 8"), batch, ""))
    decisions = [(mode, f"{values[f'{mode}, cost']:.2f}×") for mode in MODES]
    columns = ("", "tokens per second", "against", "of the memory's bandwidth")
    shown = [
        Table(f"Prompt of {PROMPT} tokens, best of {record.options['repeats']} rounds", columns, rows),
        Table("Decisions against plain steps of the engine", ("mode", "time"), decisions),
    ]
    return shown + _full_tables(record) if "tables" in values else shown


def _full_tables(record: Record) -> list[Table]:
    cells: dict[str, dict[str, str]] = {}
    cases = [f"batch {batch}, prompt {length}" for batch in BATCHES for length in record.options["prompts"]]
    for name, row in record.figures["tables"].items():
        engine, _, case = name.rpartition(", batch ")
        rate, first = row["tokens per second"], row["first token, seconds"]
        cells.setdefault(engine, {})[f"batch {case}"] = f"{rate:.0f} ({first:.2f})"
    order = ("transformers float32", COMPILED, *(f"engine {precision}" for precision in PRECISIONS))
    rates = [(name, *(cells[name].get(case, "–") for case in cases)) for name in order if name in cells]
    quality = [
        (precision, f"{row['nats per token']:.4f}", f"{row['top-1 agreement']:.1%}")
        for precision, row in ((name, record.figures["quality"][name]) for name in PRECISIONS)
    ]
    return [
        Table("Tokens per second (seconds to the first token)", ("", *cases), rates),
        Table(
            "Quality on held-out text, read token by token",
            ("", "nats per token", "float32's token"),
            quality,
        ),
    ]


def headlines(record: Record) -> list[tuple[str, str]]:
    """Against transformers and llama.cpp, and what decisions cost."""
    values = record.figures
    engine = ", ".join(_rate(values, precision) for precision in ("float32", "int8", "int4"))
    eager, peer = (_rate(values, name) for name in ("transformers float32", "llama.cpp"))
    costs = "; ".join(f"{values[f'{mode}, cost']:.2f}×" for mode in ("compatible", "standard", "causal"))
    return [
        (
            "our engine on the CPU, tokens per second: float32, int8, int4",
            f"{engine} (transformers {eager}, llama.cpp in 4 bits {peer})",
        ),
        ("its steps in `compatible`; `standard`; `causal` against plain ones", costs),
    ]


def _rate(values: dict[str, Any], name: str) -> str:
    rate = values.get(f"{name}, tokens per second")
    return "–" if rate is None else f"{rate:.0f}"


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


if __name__ == "__main__":
    main()
