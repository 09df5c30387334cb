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
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.cauchy import Cauchy
from causal_qwen.losses import ovr_loss
from measure import available, in_child, interleaved, peak_beyond, progress, ratio, show

SIZES = ((49_152, 576), (151_936, 896))  # (V, H) of the embedded base and of Qwen2.5-0.5B
TOKENS = (256, 512, 1024, 2048, 4096)
VOCABULARIES = (12_288, 24_576, 49_152, 98_304)
STEP_SHAPE = (4, 256)
NEGATIVES = 4096
QUICK_BUDGET = 165.0  # seconds; a second round starts only if it fits
TENSORS_HELD = {"plain": 3, "reference": 12, "cut-cross-entropy": 3}  # (N, V) each, at the peak
VARIANTS = ("plain", "reference", "fused", "sampled", "cut-cross-entropy", "liger")


def main() -> None:
    """Measure, and print tables or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the figures of the acceptance list")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds per size")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(**json.loads(arguments.child))))
        return
    result = quick() if arguments.quick else full(arguments.repeats)
    if arguments.json:
        print(json.dumps(result))
    elif arguments.quick:
        show("One-vs-Rest against F.linear + F.cross_entropy", ("figure", "ratio"), rows_of(result))
    else:
        show_full(result)


def quick() -> dict[str, float]:
    """Ratios at 2,048 tokens × 151,936 tokens of vocabulary, and of the training step at 4 × 256."""
    start = time.monotonic()
    steps = step_times(repeats=2)
    rounds: list[dict[str, dict[str, float]]] = []
    while True:
        began = time.monotonic()
        size = {"vocab": 151_936, "width": 896, "tokens": 2048}
        rounds.append({name: in_child(__file__, {"variant": name, **size}) for name in VARIANTS_OF_QUICK})
        now = time.monotonic()
        if now - start + (now - began) > QUICK_BUDGET:
            break
    for measured in rounds:
        for name, figures in measured.items():
            if "error" in figures:
                sys.exit(f"{name}: {figures['error']}")
    times = {name: [measured[name]["seconds"] for measured in rounds] for name in VARIANTS_OF_QUICK}
    memory = [measured["fused"]["bytes"] / measured["plain"]["bytes"] for measured in rounds]
    return {
        "fused_time_ratio": ratio(times, "fused", "plain"),
        "fused_memory_ratio": statistics.median(memory),
        "sampled_time_ratio": ratio(times, "sampled", "plain"),
        "step_fused_ratio": ratio(steps, "fused", "plain"),
        "step_sampled_ratio": ratio(steps, "sampled", "plain"),
    }


VARIANTS_OF_QUICK = ("plain", "fused", "sampled")


def full(repeats: int) -> dict[str, Any]:
    """All variants at all sizes, growth with V and with T, exactness, and the training step."""
    tasks = [(vocab, width, tokens) for vocab, width in SIZES for tokens in TOKENS]
    tasks += [(vocab, 576, 512) for vocab in VOCABULARIES if (vocab, 576, 512) not in tasks]
    sizes = []
    for vocab, width, tokens in progress(tasks, "sizes"):
        size = {"vocab": vocab, "width": width, "tokens": tokens}
        rounds = [
            {name: in_child(__file__, {"variant": name, **size}) for name in VARIANTS} for _ in range(repeats)
        ]
        sizes.append(size | {"rounds": rounds})
    steps = step_times(repeats=repeats)
    memory = {name: in_child(__file__, {"variant": name, "step": True}) for name in VARIANTS_OF_QUICK}
    return {"sizes": sizes, "step_seconds": steps, "step_memory": memory, "exactness": exactness()}


def child(variant: str, *, step: bool = False, **size: int) -> dict[str, Any]:
    """One measured call in this process, after a small one that compiles what has to be compiled."""
    if step:
        run = training_steps((variant,))[variant]
        return peak_beyond(run)
    needed = TENSORS_HELD.get(variant, 0) * 4 * size["vocab"] * size["tokens"]
    if needed > 0.8 * available():
        sys.exit(f"needs about {needed / 1e9:.0f} GB")
    for tokens in (250, 260):
        head(variant, vocab=4000, width=72, tokens=tokens)()
    return peak_beyond(head(variant, **size))


def head(variant: str, *, vocab: int, width: int, tokens: int) -> Callable[[], object]:
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
        vectors = {
            "bias": normal(vocab, std=0.1),
            "balance": normal(vocab, std=0.1, mean=1.0),
            "threshold": normal(vocab, std=0.1),
            "loc_U0": normal(tokens, mean=-15.0),
            "scale_U0": torch.zeros(tokens, requires_grad=True),
        }
        leaves = [weight, loc_U, scale_U, *vectors.values()]
        compute = functools.partial(
            ovr_loss, loc_U, scale_U, weight, labels, **vectors, impl=variant, num_negatives=NEGATIVES
        )

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        compute().backward()

    return run


@functools.cache
def cut_cross_entropy() -> Callable[..., Tensor]:
    """Its torch_compile implementation, loaded past the package's own imports, which need Triton."""
    found = importlib.util.find_spec("cut_cross_entropy")
    if found is None or found.submodule_search_locations is None:
        sys.exit("not installed (pip install --no-deps cut-cross-entropy)")
    package = types.ModuleType("cut_cross_entropy")
    package.__path__ = list(found.submodule_search_locations)
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


def training_steps(variants: tuple[str, ...]) -> dict[str, Callable[[], object]]:
    """Forward, loss and backward of the embedded base, plain and causal, on the bundled text."""
    from causal_qwen.conversion import bundled_text, convert, load_base

    base = load_base("smollm2", dtype=torch.float32)
    ids = base.tokenizer(bundled_text("calibration"), return_tensors="pt").input_ids
    rows, length = STEP_SHAPE
    ids = ids[:, : rows * length].view(rows, length)
    steps: dict[str, Callable[[], object]] = {}
    for variant in variants:
        if variant == "plain":
            model: Any = base.model
        else:
            model = convert(base, calibration="none").model
            model.config.loss_impl = variant
        model.train()

        def step(model: Any = model) -> None:
            model.zero_grad(set_to_none=True)
            model(input_ids=ids, labels=ids).loss.backward()

        model(input_ids=ids[:1, :64], labels=ids[:1, :64]).loss.backward()
        model.zero_grad(set_to_none=True)
        steps[variant] = step
    return steps


def step_times(*, repeats: int) -> dict[str, list[float]]:
    """Seconds of each variant's training step, round by round."""
    return interleaved(training_steps(VARIANTS_OF_QUICK), repeats=repeats, warm_up=False)


def exactness() -> dict[str, float]:
    """Relative error against the float64 reference, of the loss and of the worst gradient."""
    generator = torch.Generator().manual_seed(0)
    vocab, width, tokens = 49_152, 576, 64

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
        leaves = {name: value.to(dtype).requires_grad_() for name, value in inputs.items()}
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


def show_full(result: dict[str, Any]) -> None:
    """The tables."""
    rows = []
    for size in result["sizes"]:
        plain = [measured["plain"] for measured in size["rounds"]]
        for name in VARIANTS:
            ours = [measured[name] for measured in size["rounds"]]
            label = (f"{size['vocab']:,} × {size['width']}", f"{size['tokens']:,}", name)
            if "error" in ours[0]:
                rows.append((*label, ours[0]["error"], "", "", ""))
                continue
            times = {"ours": [m["seconds"] for m in ours], "plain": [m["seconds"] for m in plain]}
            memory = statistics.median(m["bytes"] for m in ours)
            share = memory / statistics.median(m["bytes"] for m in plain)
            rows.append(
                (
                    *label,
                    f"{statistics.median(times['ours']):.2f}",
                    f"{ratio(times, 'ours', 'plain'):.2f}",
                    f"{memory / 1e6:,.0f}",
                    f"{share:.2f}",
                )
            )
    columns = ("V × H", "tokens", "variant", "seconds", "ratio", "extra MB", "ratio")
    show("Head alone, forward and backward", columns, rows)
    steps, memory = result["step_seconds"], result["step_memory"]
    step_rows = [
        (
            name,
            f"{statistics.median(steps[name]):.2f}",
            f"{ratio(steps, name, 'plain'):.2f}",
            f"{memory[name]['bytes'] / 1e6:,.0f}",
            f"{memory[name]['bytes'] / memory['plain']['bytes']:.2f}",
        )
        for name in VARIANTS_OF_QUICK
    ]
    show(
        "Training step of the embedded base, 4 × 256",
        ("variant", "seconds", "ratio", "extra MB", "ratio"),
        step_rows,
    )
    show(
        "Relative error against float64",
        ("figure", "error"),
        [(k, f"{v:.1e}") for k, v in result["exactness"].items()],
    )


def rows_of(result: dict[str, float]) -> list[tuple[str, str]]:
    """One row per figure."""
    return [(name, f"{value:.3f}") for name, value in result.items()]


if __name__ == "__main__":
    main()
