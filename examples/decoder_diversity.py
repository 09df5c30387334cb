"""Diversity by temperature and top-p: how many different pairs of tokens samples hold, at what price."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from decoder_base import arguments, load, nats, plot

TEMPERATURES = (0.3, 0.6, 1.0, 1.4)
TOP_P = (0.5, 0.9, 1.0)


def distinct_pairs(rows: list[list[int]]) -> float:
    """Different neighbouring pairs of tokens over all pairs, in all rows together."""
    pairs = [pair for row in rows for pair in pairwise(row)]
    return len(set(pairs)) / len(pairs)


def main() -> None:
    """Print the grid and draw diversity against temperature, a line for each top-p."""
    parser = arguments(__doc__)
    parser.add_argument("--prompt", default="My favourite thing about the sea is")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    base = load(options.model)
    ids = torch.tensor([base.encode(options.prompt)] * options.samples)  # (samples, T)

    diversity: dict[float, list[float]] = {}
    print(f"{'top-p':>6}{'temperature':>13}{'distinct pairs':>16}{'nats per token':>16}")
    for top_p in TOP_P:
        diversity[top_p] = []
        for temperature in TEMPERATURES:
            generator = torch.Generator().manual_seed(options.seed)
            out = base.model.generate(
                ids, options.tokens, temperature=temperature, top_p=top_p, generator=generator
            )
            share = distinct_pairs([out.new_tokens(row) for row in range(options.samples)])
            diversity[top_p].append(share)
            price = nats(base.model, out).mean()
            print(f"{top_p:>6}{temperature:>13}{share:>16.2f}{price:>16.2f}")

    def draw(axes: Any) -> None:
        for top_p, shares in diversity.items():
            axes.plot(TEMPERATURES, shares, marker="o", label=f"top-p {top_p}")
        axes.set(xlabel="temperature", ylabel="distinct pairs of tokens", ylim=(0, 1))
        axes.legend()

    plot("decoder_diversity.png", draw)


if __name__ == "__main__":
    main()
