"""What the decoder examples share: a model with its text, the price of a text, and a plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from causal_qwen.decoder import CausalLM, DecoderConfig, Generation, from_hf


@dataclass(frozen=True)
class Base:
    """A decoder and the functions between text and its tokens."""

    model: CausalLM
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    eos_token_id: int | None


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every example has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2, a Qwen2 or Llama directory or .gguf file, or 'tiny' (random weights)",
    )
    return parser


def load(name: str) -> Base:
    """The base called ``name``; ``tiny`` is a decoder over bytes with random weights, ready at once."""
    if name == "tiny":
        torch.manual_seed(0)
        model = CausalLM(DecoderConfig.tiny(vocab_size=256, num_hidden_layers=2, initializer_range=0.2))
        return Base(
            model, lambda text: list(text.encode()), lambda ids: bytes(ids).decode("utf-8", "replace"), None
        )
    from causal_qwen.conversion.sources import load_base

    print(f"loading {name} ...", file=sys.stderr)
    base = load_base(name, dtype=torch.float32)
    tokenizer = base.tokenizer
    return Base(
        from_hf(base.model),
        lambda text: list(tokenizer(text)["input_ids"]),
        lambda ids: str(tokenizer.decode(ids)),
        tokenizer.eos_token_id,
    )


@torch.inference_mode()
def nats(model: CausalLM, generation: Generation) -> Tensor:
    """−log p of every new token under the plain model (temperature 1): (B, n). Rows without padding."""
    sequences = generation.sequences
    logits = model(sequences[:, :-1]).logits[:, generation.prompt_length - 1 :]  # (B, n, V)
    new = sequences[:, generation.prompt_length :]  # (B, n)
    prices: Tensor = -logits.float().log_softmax(-1).gather(-1, new[..., None]).squeeze(-1)
    return prices


def plot(path: str, draw: Callable[[Any], None]) -> None:
    """Write the figure that ``draw`` puts on an Axes, or say how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"\nno plot: matplotlib is not installed. For {path} run: pip install matplotlib")
        return
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    draw(figure.subplots())
    figure.savefig(path, dpi=150)
    print(f"\nwrote {path}")
