"""Fidelity against diversity: nats per token under the base against distinct tokens, for every way of
sampling.

Each setting continues the same prompts; a continuation is scored by the plain base (mean negative
log-likelihood) and by how many of its tokens are distinct. Low nats and many distinct tokens are both wanted:
the frontier is down and right.

    python benchmarks/sampling_frontier.py            # 208 continuations of 24 tokens per setting, a plot
    python benchmarks/sampling_frontier.py --quick    # 32 of 12 tokens
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from causal_qwen import Individual, convert
from causal_qwen.conversion import load_base
from measure import progress, show

PROMPTS = (
    "The old man walked slowly down to the harbour and",
    "In order to bake a good loaf of bread, you",
    "Scientists have discovered that the surface of the planet",
    "My sister called me yesterday because",
    "The main advantage of public transport is",
    "When the first railway reached the town,",
    "Dear neighbours, we would like to",
    "A good friend is someone who",
    "The recipe for happiness, according to the author,",
    "During the long winter nights, the children",
    "Water freezes at zero degrees, but",
    "The teacher opened the window and said:",
    "There are three reasons why",
    "On the morning of the race,",
    "Most people do not know that bees",
    "The bridge was closed for repairs, so",
)

# Continuations that are generated together.
ROWS = 52
# Nats per token beyond which a setting is left out of the picture.
FAR = 5.0


def settings() -> dict[str, dict[str, Any]]:
    """Name of each way of sampling, and its options."""
    ways: dict[str, dict[str, Any]] = {}
    for temperature in (0.7, 1.0):
        ways[f"softmax T={temperature}"] = {"temperature": temperature, "top_k": 0}
    for top_p in (0.9,):
        ways[f"softmax top_p={top_p}"] = {"top_p": top_p, "top_k": 0}
    for min_p in (0.1,):
        ways[f"softmax min_p={min_p}"] = {"min_p": min_p, "top_k": 0}
    for way in ways.values():
        way |= {"inference_mode": "compatible", "do_sample": True}
    causal = {"inference_mode": "causal", "top_k": 0}
    for rho in (0.0, 0.2, 0.5, 1.0):
        ways[f"causal rho={rho}"] = causal | {"persistence": rho}
    for temperature in (0.8, 1.25):
        ways[f"causal T={temperature}"] = causal | {"temperature": temperature, "persistence": 0.2}
    for floor in (0.0, 0.1):
        ways[f"causal floor={floor}"] = causal | {"density_floor": floor, "persistence": 0.2}
    return ways


def main() -> None:
    """Sample, score, print a table or JSON, and draw the frontier."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter continuations")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, default=Path("docs/assets/sampling_frontier.png"))
    parser.add_argument("--repeats", type=int, default=None, help="continuations per prompt")
    parser.add_argument("--tokens", type=int, default=None, help="tokens per continuation")
    arguments = parser.parse_args()
    repeats = arguments.repeats or (2 if arguments.quick else 13)
    tokens = arguments.tokens or (12 if arguments.quick else 24)
    base = load_base("smollm2")
    model = convert(base).model
    results = {
        name: measure(base, model, options, repeats, tokens)
        for name, options in progress(list(settings().items()), "settings")
    }
    if not arguments.quick:
        draw(results, arguments.plot)
    if arguments.json:
        print(json.dumps(results))
        return
    rows = [
        (
            name,
            f"{r['nats']:.2f} ± {r['nats_ci']:.2f}",
            f"{r['distinct']:.1f} ± {r['distinct_ci']:.1f}",
            f"{r['junk']:.1%}",
        )
        for name, r in results.items()
    ]
    title = f"{repeats * len(PROMPTS)} continuations of {tokens} tokens, 95% intervals"
    show(title, ("setting", "nats per token", "distinct tokens", "junk (p < 1e-5)"), rows)


@torch.no_grad()
def measure(base: Any, model: Any, options: dict[str, Any], repeats: int, tokens: int) -> dict[str, float]:
    """Mean and 95% interval over continuations of nats per token and of distinct tokens, and the share of
    junk.
    """
    nats, distinct, junk = [], [], []
    model.generation_config.eos_token_id = None
    for first in range(0, repeats * len(PROMPTS), ROWS):
        seeds = range(first, min(first + ROWS, repeats * len(PROMPTS)))
        prompts = [PROMPTS[seed % len(PROMPTS)] for seed in seeds]
        encoded = base.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        start = encoded["input_ids"].shape[1]
        torch.manual_seed(first)
        people = {}
        if options["inference_mode"] == "causal":
            people["individual"] = [Individual(seed) for seed in seeds]
        ids = model.generate(**encoded, **options, **people, max_new_tokens=tokens, pad_token_id=2)
        mask = torch.cat([encoded["attention_mask"], torch.ones(len(ids), tokens, dtype=torch.long)], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        outputs = base.model(
            ids, attention_mask=mask, position_ids=positions, logits_to_keep=tokens + 1, use_cache=False
        )
        logprob = outputs.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, start:, None]).squeeze(-1)
        nats += (-logprob.mean(-1)).tolist()
        junk += (logprob < -11.5).double().mean(-1).tolist()
        distinct += [float(len(set(row))) for row in ids[:, start:].tolist()]
    return {
        "nats": mean(nats), "nats_ci": interval(nats), "distinct": mean(distinct),
        "distinct_ci": interval(distinct), "junk": mean(junk),
    }  # fmt: skip


def mean(values: list[float]) -> float:
    """These are bounded means over continuations, not moments of a Cauchy."""
    return sum(values) / len(values)


def interval(values: list[float]) -> float:
    """Half the 95% interval of the mean."""
    return 1.96 * torch.tensor(values).std().item() / len(values) ** 0.5


def draw(results: dict[str, dict[str, float]], file: Path) -> None:
    """Nats against distinct tokens, one colour per family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    # What is far off would squeeze all others into a corner; it is named instead.
    far = {name: r for name, r in results.items() if r["nats"] > FAR}
    results = {name: r for name, r in results.items() if name not in far}
    families = {
        "softmax": "tab:gray",
        "causal rho": "tab:blue",
        "causal T": "tab:green",
        "causal floor": "tab:orange",
    }
    for family, colour in families.items():
        points = {name: r for name, r in results.items() if name.startswith(family)}
        axes.errorbar(
            [r["distinct"] for r in points.values()], [r["nats"] for r in points.values()],
            xerr=[r["distinct_ci"] for r in points.values()], yerr=[r["nats_ci"] for r in points.values()],
            fmt="o", color=colour, label=family, capsize=2,
        )  # fmt: skip
        for name, r in points.items():
            label = name.removeprefix("softmax ").removeprefix("causal ")
            axes.annotate(
                label, (r["distinct"], r["nats"]), xytext=(6, 5), textcoords="offset points", fontsize=8
            )
    axes.set(xlabel="distinct tokens per continuation", ylabel="nats per token under the base")
    axes.set_title("Fidelity against diversity: lower and further right is better")
    if far:
        note = ", ".join(f"{name} ({r['nats']:.1f} nats, {r['junk']:.0%} junk)" for name, r in far.items())
        axes.text(0.01, 0.01, f"not shown: {note}", transform=axes.transAxes, fontsize=8)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
