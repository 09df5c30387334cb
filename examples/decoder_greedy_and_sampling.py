"""Greedy against sampling on one prompt: what each writes, how likely it is, how much it repeats itself."""

from __future__ import annotations

from typing import Any

import torch
from decoder_base import arguments, load, nats, plot

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, repetition penalty 1.2": {"repetition_penalty": 1.2},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "temperature 1": {"temperature": 1.0},
}


def main() -> None:
    """Print the continuations and draw the running price of each."""
    parser = arguments(__doc__)
    parser.add_argument("--prompt", default="The lighthouse keeper opened the old book and")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    base = load(options.model)
    ids = torch.tensor([base.encode(options.prompt)])  # (1, T)

    prices: dict[str, torch.Tensor] = {}
    for name, sampling in METHODS.items():
        generator = torch.Generator().manual_seed(options.seed)
        out = base.model.generate(ids, options.tokens, generator=generator, **sampling)
        prices[name] = nats(base.model, out)[0]  # (n,)
        new = out.new_tokens(0)
        distinct = f"{len(set(new))} of {len(new)} tokens distinct"
        print(f"\n{name}: {prices[name].mean():.2f} nats per token, {distinct}")
        print(f"  {options.prompt + base.decode(new)!r}")

    def draw(axes: Any) -> None:
        for name, price in prices.items():
            running = price.cumsum(0) / torch.arange(1, len(price) + 1)
            axes.plot(range(1, len(price) + 1), running.tolist(), label=name)
        axes.set(xlabel="new tokens", ylabel="nats per token so far", ylim=(0, None))
        axes.legend()

    plot("decoder_greedy_and_sampling.png", draw)


if __name__ == "__main__":
    main()
