"""Fidelity against diversity: nats per token under the base against distinct tokens, for every way to sample.

Each setting continues the same prompts; a continuation is scored by the plain base (mean negative
log-likelihood) and by how many of its tokens are distinct. Low nats and many distinct tokens are both wanted:
the frontier is down and right.

    python benchmarks/sampling_frontier.py            # 208 continuations of 24 tokens per setting
    python benchmarks/sampling_frontier.py --quick    # 32 of 12 tokens
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from causal_qwen import Individual, convert
from causal_qwen.conversion import load_base
from measure import BASE, Option, Record, Table, run_benchmark, watched
from writers import PROMPTS as EVERY_PROMPT

PROMPTS = EVERY_PROMPT[:16]
ROWS = 52  # continuations that are generated together
JUNK = 1e-5  # probability under the base below which a token is junk
FAR = 5.0  # nats per token beyond which a setting is left out of the picture
FAMILIES = {  # colour, and the side of a point on which its name stands
    "softmax": ("tab:gray", "right"),
    "causal rho": ("tab:blue", "below"),
    "causal T": ("tab:green", "left"),
    "causal floor": ("tab:orange", "right"),
}
SIDES = {"right": ((6, 5), "left"), "below": ((-6, -12), "right"), "left": ((-6, 5), "right")}
SOFTMAX = {"inference_mode": "compatible", "do_sample": True, "top_k": 0}
CAUSAL = {"inference_mode": "causal", "persistence": 0.2, "top_k": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"softmax T={value}": SOFTMAX | {"temperature": value} for value in (0.7, 1.0)},
    "softmax top_p=0.9": SOFTMAX | {"top_p": 0.9},
    "softmax min_p=0.1": SOFTMAX | {"min_p": 0.1},
    **{f"causal rho={value}": CAUSAL | {"persistence": value} for value in (0.0, 0.2, 0.5, 1.0)},
    **{f"causal T={value}": CAUSAL | {"temperature": value} for value in (0.8, 1.25)},
    **{f"causal floor={value}": CAUSAL | {"density_floor": value} for value in (0.0, 0.1)},
}
OPTIONS = {
    "base": BASE,
    "repeats": Option("continuations per prompt", 13, smoke=1, quick=2),
    "tokens": Option("tokens per continuation", 24, smoke=3, quick=12),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Sample, score, and draw the frontier."""
    run_benchmark(
        __file__, __doc__, OPTIONS, figures, tables,
        quick="fewer and shorter continuations", argv=argv, picture=draw,
    )  # fmt: skip


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fidelity, diversity and junk of each setting."""
    base = load_base(arguments.base)
    model = convert(base).model
    return {
        name: score(base, model, options, arguments.repeats, arguments.tokens)
        for name, options in watched(list(SETTINGS.items()), "settings")
    }


@torch.no_grad()
def score(base: Any, model: Any, options: dict[str, Any], repeats: int, tokens: int) -> dict[str, float]:
    """Mean and 95% interval over continuations of nats and of distinct tokens, and the share of junk."""
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
        chosen = ids[:, start:, None]  # (B, T, 1)
        logprob = outputs.logits[:, :-1].log_softmax(-1).gather(-1, chosen).squeeze(-1)  # (B, T)
        nats += (-logprob.mean(-1)).tolist()
        junk += (logprob < math.log(JUNK)).double().mean(-1).tolist()
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


def tables(record: Record) -> list[Table]:
    """One row per setting."""
    rows = [
        (
            name,
            "{nats:.2f} ± {nats_ci:.2f}".format(**record.figures[name]),
            "{distinct:.1f} ± {distinct_ci:.1f}".format(**record.figures[name]),
            "{junk:.1%}".format(**record.figures[name]),
        )
        for name in SETTINGS
    ]
    count = record.options["repeats"] * len(PROMPTS)
    title = f"{count} continuations of {record.options['tokens']} tokens per setting, 95% intervals"
    columns = (
        "setting",
        "nats per token under the base",
        "distinct tokens",
        f"junk: tokens of probability below {JUNK:.0e}",
    )
    return [Table(title, columns, rows)]


def draw(record: Record, file: Path) -> None:
    """Nats against distinct tokens, one colour per family."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    # What is far off would squeeze all others into a corner; it is named instead.
    far = {name: point for name, point in record.figures.items() if point["nats"] > FAR}
    for family, (colour, side) in FAMILIES.items():
        offset, alignment = SIDES[side]
        points = {
            name: record.figures[name] for name in SETTINGS if name.startswith(family) and name not in far
        }
        columns = {
            name: [point[name] for point in points.values()]
            for name in ("distinct", "nats", "distinct_ci", "nats_ci")
        }
        axes.errorbar(
            columns["distinct"], columns["nats"], xerr=columns["distinct_ci"], yerr=columns["nats_ci"],
            fmt="o", color=colour, label=family, capsize=2,
        )  # fmt: skip
        for name, point in points.items():
            label = name.removeprefix("softmax ").removeprefix("causal ")
            place = (point["distinct"], point["nats"])
            axes.annotate(label, place, xytext=offset, textcoords="offset points", ha=alignment, fontsize=8)
    axes.set(xlabel="distinct tokens per continuation", ylabel="nats per token under the base")
    axes.set_title("Fidelity against diversity: lower and further right is better")
    if far:
        note = ", ".join(f"{name} ({p['nats']:.1f} nats, {p['junk']:.0%} junk)" for name, p in far.items())
        axes.text(0.01, 0.01, f"not shown: {note}", transform=axes.transAxes, fontsize=8)
    axes.legend()
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
