"""What does the One-vs-Rest loss cost, against the softmax cross-entropy that it replaces?

Forward and backward of the vocabulary head alone, then of a whole training step of the embedded base, in time
and in peak memory beyond the inputs. Every figure is a ratio to F.linear + F.cross_entropy of the same run.

    python benchmarks/ovr_loss.py                 # all sizes: half an hour on two cores
    python benchmarks/ovr_loss.py --quick --json  # the figures of the acceptance list, under three minutes
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.cauchy import Cauchy
from causal_qwen.conversion import bundled_text, convert, load_base
from causal_qwen.losses import ovr_loss
from measure import (
    BASE,
    Option,
    Record,
    Table,
    available,
    in_child,
    interleaved,
    peak_beyond,
    ratio,
    run_benchmark,
    watched,
)

WIDTHS = {151_936: 896}  # D of a vocabulary: Qwen2.5-0.5B's; the embedded base's for all others
EMBEDDED_WIDTH = 576
GROWTH_TOKENS = 512
TENSORS_HELD = {"plain": 3, "reference": 12, "cut-cross-entropy": 3}  # (N, V) each, at the peak
OURS = ("plain", "fused", "sampled")
ALL = ("plain", "reference", "fused", "sampled", "cut-cross-entropy", "liger")
OPTIONS = {
    "base": BASE,
    "vocabularies": Option("sizes V of the head", (49_152, 151_936), smoke=(512,), quick=(151_936,)),
    "tokens": Option("positions", (256, 512, 1024, 2048, 4096), smoke=(32,), quick=(2048,)),
    "growth": Option("further sizes V, at 512 positions", (12_288, 24_576, 98_304), smoke=()),
    "variants": Option("of the loss", ALL, smoke=("plain", "reference", "fused", "sampled"), quick=OURS),
    "negatives": Option("tokens that the sampled loss draws", 4096, smoke=32),
    "rows": Option("sequences of the training step", 4, smoke=1),
    "length": Option("tokens per sequence", 256, smoke=70),
    "repeats": Option("interleaved rounds per size", 3, smoke=1, quick=2),
    "budget": Option("seconds in which a further quick round must fit", 165.0, smoke=0.0),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print tables or one JSON object."""
    run_benchmark(
        __file__, __doc__, OPTIONS, figures, tables,
        quick="only the figures of the acceptance list", argv=argv, child=child,
    )  # fmt: skip


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Quick: the ratios of one size and of the training step. Else everything."""
    return quick(arguments) if arguments.quick else full(arguments)


def quick(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios at 2,048 tokens × 151,936 tokens of vocabulary, and of the training step at 4 × 256."""
    start = time.monotonic()
    steps = step_times(arguments)
    rounds: list[dict[str, dict[str, float]]] = []
    while True:
        began = time.monotonic()
        rounds.append(head_round(arguments, arguments.vocabularies[0], arguments.tokens[0]))
        now = time.monotonic()
        if now - start + (now - began) > arguments.budget:
            break
    for measured in rounds:
        for name, values in measured.items():
            if "error" in values:
                sys.exit(f"{name}: {values['error']}")
    times = {name: [measured[name]["seconds"] for measured in rounds] for name in OURS}
    memory = [measured["fused"]["bytes"] / measured["plain"]["bytes"] for measured in rounds]
    return {
        "fused_time_ratio": ratio(times, "fused", "plain"),
        "fused_memory_ratio": statistics.median(memory),
        "sampled_time_ratio": ratio(times, "sampled", "plain"),
        "step_fused_ratio": ratio(steps, "fused", "plain"),
        "step_sampled_ratio": ratio(steps, "sampled", "plain"),
    }


def full(arguments: argparse.Namespace) -> dict[str, Any]:
    """All variants at all sizes, growth with V and with T, exactness, and the training step."""
    tasks = [(vocab, tokens) for vocab in arguments.vocabularies for tokens in arguments.tokens]
    tasks += [(vocab, GROWTH_TOKENS) for vocab in arguments.growth]
    sizes = []
    for vocab, tokens in watched(tasks, "sizes"):
        rounds = [head_round(arguments, vocab, tokens) for _ in range(arguments.repeats)]
        sizes.append({"vocab": vocab, "width": width_of(vocab), "tokens": tokens, "rounds": rounds})
    shape = {name: getattr(arguments, name) for name in ("base", "rows", "length")}
    return {
        "sizes": sizes,
        "step_seconds": step_times(arguments),
        "step_memory": {name: in_child(__file__, {"variant": name, "step": shape}) for name in OURS},
        "exactness": exactness(arguments.vocabularies[0]),
    }


def width_of(vocab: int) -> int:
    """D of the model that has such a vocabulary."""
    return WIDTHS.get(vocab, EMBEDDED_WIDTH)


def head_round(arguments: argparse.Namespace, vocab: int, tokens: int) -> dict[str, dict[str, Any]]:
    """The head alone by each variant, each in a process of its own."""
    size = {"vocab": vocab, "width": width_of(vocab), "tokens": tokens, "negatives": arguments.negatives}
    return {name: in_child(__file__, {"variant": name, "head": size}) for name in arguments.variants}


def child(
    variant: str, *, head: dict[str, int] | None = None, step: dict[str, Any] | None = None
) -> dict[str, float]:
    """One measured call in this process, after a small one that compiles what has to be compiled."""
    if step is not None:
        return peak_beyond(training_steps((variant,), **step)[variant])
    assert head is not None
    needed = TENSORS_HELD.get(variant, 0) * 4 * head["vocab"] * head["tokens"]
    if needed > 0.8 * available():
        sys.exit(f"needs about {needed / 1e9:.0f} GB")
    small = min(4000, head["vocab"])
    for tokens in (250, 260):
        head_call(variant, vocab=small, width=72, tokens=tokens, negatives=head["negatives"])()
    return peak_beyond(head_call(variant, **head))


def head_call(variant: str, *, vocab: int, width: int, tokens: int, negatives: int) -> Callable[[], object]:
    """Forward and backward of one variant, its inputs in memory."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.empty(shape).normal_(mean, std, generator=generator).requires_grad_()

    weight, loc_U = normal(vocab, width, std=0.02), normal(tokens, width, std=5.0)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    if variant == "plain":
        leaves = [weight, loc_U]
        compute: Callable[[], Tensor] = lambda: F.cross_entropy(F.linear(loc_U, weight), labels)  # noqa: E731
    elif variant == "cut-cross-entropy":
        leaves = [weight, loc_U]
        compute = functools.partial(cut_cross_entropy(), loc_U, weight, labels)
    elif variant == "liger":
        leaves = [weight, loc_U]
        compute = functools.partial(liger(), weight, loc_U, labels)
    else:
        # As calibration leaves a model: scores near −15, scales near 1e-3, the same for every token.
        scale_U = torch.full((tokens, width), 1e-4, requires_grad=True)
        U = Cauchy(loc_U, scale_U)
        vectors = {
            "bias": normal(vocab, std=0.1),
            "balance": normal(vocab, std=0.1, mean=1.0),
            "threshold": normal(vocab, std=0.1),
        }
        U0 = Cauchy(normal(tokens, mean=-15.0), torch.zeros(tokens, requires_grad=True))
        leaves = [weight, U.loc, U.scale, U0.loc, U0.scale, *vectors.values()]
        compute = functools.partial(
            ovr_loss, U, U0, weight, labels, **vectors, impl=variant, num_negatives=negatives
        )

    def call() -> None:
        for leaf in leaves:
            leaf.grad = None
        compute().backward()

    return call


@functools.cache
def cut_cross_entropy() -> Callable[..., Tensor]:
    """Its torch_compile implementation, loaded past the package's own imports, which need Triton."""
    spec = importlib.util.find_spec("cut_cross_entropy")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("not installed (pip install --no-deps cut-cross-entropy)")
    package = types.ModuleType("cut_cross_entropy")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["cut_cross_entropy"] = package
    function: Callable[..., Tensor] = importlib.import_module(
        "cut_cross_entropy.torch_compile"
    ).torch_compile_linear_cross_entropy
    return function


def liger() -> Callable[..., Tensor]:
    """Its fused linear cross-entropy, where Triton is."""
    try:
        module = importlib.import_module("liger_kernel.transformers")
    except ModuleNotFoundError as error:
        sys.exit(f"does not run here: {error}")
    function: Callable[..., Tensor] = module.LigerFusedLinearCrossEntropyLoss()
    return function


def training_steps(
    variants: tuple[str, ...], *, base: str, rows: int, length: int
) -> dict[str, Callable[[], object]]:
    """Forward, loss and backward of a base, plain and causal, on the bundled text."""
    loaded = load_base(base, dtype=torch.float32)
    ids = loaded.tokenizer(bundled_text("calibration"), return_tensors="pt").input_ids
    ids = ids[:, : rows * length].view(rows, length)
    steps: dict[str, Callable[[], object]] = {}
    for variant in variants:
        if variant == "plain":
            model: Any = loaded.model
        else:
            model = convert(loaded, calibration="none").model
            model.config.loss_impl = variant
        model.train()

        def step(model: Any = model) -> None:
            model.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids).loss.backward()

        model(input_ids=ids[:1, :64], labels=ids[:1, :64]).loss.backward()
        model.zero_grad(set_to_none=True)
        steps[variant] = step
    return steps


def step_times(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each variant's training step, round by round."""
    shape = {name: getattr(arguments, name) for name in ("base", "rows", "length")}
    return interleaved(training_steps(OURS, **shape), repeats=arguments.repeats, warm_up=False)


def exactness(vocab: int) -> dict[str, float]:
    """Relative error against the float64 reference, of the loss and of the worst gradient."""
    generator = torch.Generator().manual_seed(0)
    width, tokens = width_of(vocab), 64

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=generator)

    inputs = {
        "loc_U": uniform(tokens, width) * 10 - 5,
        "scale_U": uniform(tokens, width) * 0.02,
        "weight": uniform(vocab, width) * 0.06 - 0.03,
        "bias": uniform(vocab) * 0.2,
        "balance": uniform(vocab),
        "threshold": uniform(vocab) * 0.2,
        "loc_U0": -uniform(tokens) * 10,
        "scale_U0": uniform(tokens) * 0.01,
    }
    inputs = {name: value.float().double() for name, value in inputs.items()}
    labels = torch.randint(0, vocab, (tokens,), generator=generator)

    def evaluate(impl: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in inputs.items()}
        U, U0 = (Cauchy(leaves[f"loc_{name}"], leaves[f"scale_{name}"]) for name in ("U", "U0"))
        heads = {name: leaves[name] for name in ("bias", "balance", "threshold")}
        loss = ovr_loss(U, U0, leaves["weight"], labels, impl=impl, **heads)
        loss.backward()
        return [
            loss.detach().double(),
            *(leaf.grad.double() for leaf in leaves.values() if leaf.grad is not None),
        ]

    exact = evaluate("reference", torch.float64)
    errors = {}
    for impl in ("fused", "reference"):
        ours = evaluate(impl, torch.float32)
        relative = [((a - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True)]
        errors |= {f"{impl}_loss": relative[0], f"{impl}_worst_gradient": max(relative[1:])}
    return errors


def tables(record: Record) -> list[Table]:
    """The ratios of a quick run, or every size."""
    if "sizes" not in record.figures:
        return [Table("One-vs-Rest against F.linear and F.cross_entropy", ("", "ratio"), headlines(record))]
    rows = []
    for size in record.figures["sizes"]:
        plain = [measured["plain"] for measured in size["rounds"]]
        for name in record.options["variants"]:
            ours = [measured[name] for measured in size["rounds"]]
            label = (f"{size['vocab']:,} × {size['width']}", f"{size['tokens']:,}", name)
            rows.append((*label, *_costs(ours, plain)))
    steps, memory = record.figures["step_seconds"], record.figures["step_memory"]
    rounds = {name: [{"seconds": s, "bytes": memory[name]["bytes"]} for s in steps[name]] for name in OURS}
    shape = "{rows} × {length}".format(**record.options)
    costs = ("seconds", "ratio", "extra MB", "ratio")
    return [
        Table("Head alone, forward and backward", ("V × D", "tokens", "variant", *costs), rows),
        Table(
            f"Training step, {shape}",
            ("variant", *costs),
            [(name, *_costs(rounds[name], rounds["plain"])) for name in OURS],
        ),
        Table(
            "Relative error against float64",
            ("figure", "error"),
            [(name, f"{error:.1e}") for name, error in record.figures["exactness"].items()],
        ),
    ]


def _costs(ours: list[dict[str, Any]], plain: list[dict[str, Any]]) -> tuple[str, str, str, str]:
    """Median seconds, their ratio to plain, median megabytes and their ratio."""
    errors = [measured["error"] for measured in (*ours, *plain) if "error" in measured]
    if errors:
        return errors[0], "", "", ""
    times = {"ours": [m["seconds"] for m in ours], "plain": [m["seconds"] for m in plain]}
    memory = statistics.median(m["bytes"] for m in ours)
    share = memory / max(statistics.median(m["bytes"] for m in plain), 1)
    return (
        f"{statistics.median(times['ours']):.2f}",
        f"{ratio(times, 'ours', 'plain'):.2f}",
        f"{memory / 1e6:,.0f}",
        f"{share:.2f}",
    )


def headlines(record: Record) -> list[tuple[str, str]]:
    """Of a quick run."""
    size = f"{record.options['tokens'][0]:,} tokens × {record.options['vocabularies'][0]:,}"
    negatives = f"{record.options['negatives']:,} sampled negatives"
    values = {name: f"{value:.2f}×" for name, value in record.figures.items()}
    return [
        (
            f"exact One-vs-Rest loss with gradients, {size}, against cross-entropy: time; memory",
            f"{values['fused_time_ratio']}; {values['fused_memory_ratio']}",
        ),
        (
            f"the same with {negatives}: time",
            values["sampled_time_ratio"],
        ),
        (
            "a training step against the plain base's: exact; sampled negatives",
            f"{values['step_fused_ratio']}; {values['step_sampled_ratio']}",
        ),
    ]


if __name__ == "__main__":
    main()
