"""One prompt, every mode: what each writes, and how likely the base finds it."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from causal_qwen import convert

CAUSAL = {"inference_mode": "causal"}
MODES: dict[str, dict[str, Any]] = {
    "standard": {"do_sample": False},
    "standard, sampled": {"do_sample": True, "individual": 7},
    "causal": CAUSAL | {"individual": 7},
    "causal, T = 0.5": CAUSAL | {"individual": 7, "temperature": 0.5},
    "causal, ρ = 1": CAUSAL | {"individual": 7, "persistence": 1.0},
    "compatible, greedy": {"inference_mode": "compatible", "do_sample": False},
    "compatible, sampled": {"inference_mode": "compatible", "do_sample": True},
    "compatible, P/ΣP": {"inference_mode": "compatible", "do_sample": True, "normalisation": "ovr"},
}


@torch.no_grad()
def main() -> None:
    """Print a line per mode: nats per token under the base, distinct tokens, text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="smollm2", help="smollm2, a directory, a .gguf file or a hub id")
    parser.add_argument("--prompt", default="The reason why the sea is salty is that")
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    conversion = convert(options.base)
    model, processor = conversion.model, conversion.processor
    inputs = processor(options.prompt, return_tensors="pt")
    start = inputs["input_ids"].shape[1]

    print(f"{'mode':20} {'nats':>5} {'distinct':>8}  continuation of {options.prompt!r}")
    for name, mode in MODES.items():
        torch.manual_seed(0)
        ids = model.generate(**inputs, max_new_tokens=options.tokens, **mode)
        new = ids[0, start:]
        log_probs = model(ids[:, :-1]).logits[0, start - 1 :].float().log_softmax(-1)  # (n, V): the base's
        nats = -log_probs.gather(-1, new[:, None]).mean()
        text = processor.decode(new, skip_special_tokens=True)
        print(f"{name:20} {nats:5.2f} {len(set(new.tolist())):8d}  {text!r}")


if __name__ == "__main__":
    main()
