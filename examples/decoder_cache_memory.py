"""What the KV cache costs: the formula against the memory of the process, at 1,024 and 4,096 tokens."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from decoder_base import plot

from causal_qwen.decoder import DecoderConfig, KVCache, kv_cache_bytes

LENGTHS = (1024, 4096)
MIB = 2**20
SMOLLM2 = DecoderConfig(
    vocab_size=49_152,
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    max_position_embeddings=8192,
)


def resident_bytes() -> int:
    """Memory of this process that is really in use; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def filled_cache(config: DecoderConfig, length: int, dtype: torch.dtype) -> tuple[KVCache, int]:
    """A cache for one row with every page touched, and by how much the process grew."""
    before = resident_bytes()
    cache = KVCache(config, batch=1, capacity=length, dtype=dtype)
    cache.reset()
    return cache, resident_bytes() - before


def main() -> None:
    """Print the table and draw the lines."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{'decoder':<28}{'dtype':<10}{'tokens':>7}{'formula':>12}{'tensors':>12}{'process':>12}")
    caches = []  # kept alive: freed memory that is used again would not show
    for dtype in (torch.float32, torch.bfloat16):
        for length in LENGTHS:
            formula = kv_cache_bytes(SMOLLM2, 1, length, dtype)
            cache, process = filled_cache(SMOLLM2, length, dtype)
            caches.append(cache)
            sizes = "".join(f"{size / MIB:>8.1f} MiB" for size in (formula, cache.nbytes, process))
            print(f"{'SmolLM2-135M, 3 kv heads':<28}{str(dtype)[6:]:<10}{length:>7}{sizes}")
    for kv_heads in (32, 8):
        for length in LENGTHS:
            formula = kv_cache_bytes(
                DecoderConfig.llama_7b(num_key_value_heads=kv_heads), 1, length, torch.float16
            )
            print(
                f"{f'Llama 7B, {kv_heads} kv heads':<28}{'float16':<10}{length:>7}{formula / MIB:>8.1f} MiB"
            )

    def draw(axes: Any) -> None:
        lengths = range(256, 4097, 256)
        for kv_heads in (32, 8):
            config = DecoderConfig.llama_7b(num_key_value_heads=kv_heads)
            sizes = [kv_cache_bytes(config, 1, length, torch.float16) / MIB for length in lengths]
            axes.plot(lengths, sizes, label=f"Llama 7B, {kv_heads} kv heads, float16")
        sizes = [kv_cache_bytes(SMOLLM2, 1, length, torch.float32) / MIB for length in lengths]
        axes.plot(lengths, sizes, label="SmolLM2-135M, float32")
        axes.set(xlabel="tokens", ylabel="cache of one row, MiB", xlim=(0, 4096), ylim=(0, None))
        axes.legend()

    plot("decoder_cache_memory.png", draw)


if __name__ == "__main__":
    main()
