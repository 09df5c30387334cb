"""What does a token cost in each mode, against transformers' generate() on the plain base?

All variants continue the same prompt greedily (or by one individual), batch 1, and are run in turn within
each round; a ratio is that of the best times.

    python benchmarks/generate.py                  # embedded base, Qwen2.5-0.5B sizes, growth with length
    python benchmarks/generate.py --quick --json   # the embedded base only
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from causal_qwen import CausalQwen2Config, CausalQwen2ForCausalLM, convert
from causal_qwen.conversion import load_base
from measure import best_ratio, interleaved, seconds, show

MODES: dict[str, dict[str, Any]] = {
    "compatible": {"inference_mode": "compatible", "do_sample": False},
    "standard": {"inference_mode": "standard", "do_sample": False},
    "causal": {"inference_mode": "causal", "individual": 1, "top_k": 0},
    "causal, top_k 50": {"inference_mode": "causal", "individual": 1, "top_k": 50},
}
HALF_BILLION = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Measure, and print tables or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the embedded base, short texts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens per run")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    pairs = {"embedded": embedded}
    if not arguments.quick:
        pairs["Qwen2.5-0.5B dimensions"] = random_half_billion
    for name, make in pairs.items():
        base, model, ids = make()
        times = measure(base, model, ids, arguments.tokens, arguments.repeats)
        figures[name] = {f"{mode}_ratio": best_ratio(times, mode, "base") for mode in MODES}
        figures[name]["base_tokens_per_second"] = arguments.tokens / min(times["base"])
        if not arguments.quick and name == "embedded":
            figures["growth"] = growth(model, ids)
        del base, model
    if arguments.json:
        flat = {name: figures["embedded"][name] for name in figures["embedded"]}
        print(json.dumps(flat if arguments.quick else figures))
        return
    for name, rows in figures.items():
        show(name, ("figure", "value"), [(key, f"{value:.3f}") for key, value in rows.items()])


def embedded() -> tuple[Any, Any, torch.Tensor]:
    """The embedded base, its conversion, and a prompt."""
    base = load_base("smollm2")
    ids = base.tokenizer("The history of the bicycle begins with", return_tensors="pt").input_ids
    return base.model, convert(base, calibration="none").model, ids


def random_half_billion() -> tuple[Any, Any, torch.Tensor]:
    """The same sizes as Qwen2.5-0.5B, random weights: only time is measured."""
    base = Qwen2ForCausalLM(Qwen2Config(**HALF_BILLION)).eval()
    config = CausalQwen2Config(**HALF_BILLION, num_token_id=151_665)
    model = CausalQwen2ForCausalLM.from_pretrained(None, config=config, state_dict=base.state_dict()).eval()
    with torch.no_grad():
        model.action.bias[151_665] = -20.0
    return base, model, torch.randint(0, 150_000, (1, 8))


def run(model: Any, ids: torch.Tensor, tokens: int, **options: Any) -> None:
    """Exactly ``tokens`` new tokens, whatever they are."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=0, **options
    )
    assert out.shape[1] == ids.shape[1] + tokens


def measure(base: Any, model: Any, ids: torch.Tensor, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Times of the base and of every mode."""
    variants = {"base": functools.partial(run, base, ids, tokens, do_sample=False)}
    variants |= {
        mode: functools.partial(run, model, ids, tokens, **options) for mode, options in MODES.items()
    }
    return interleaved(variants, repeats=repeats)


def growth(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Seconds per token of causal generation at growing lengths: attention apart, it should not grow."""
    return {
        f"{length} tokens, seconds per token": seconds(
            lambda length=length: run(model, ids, length, **MODES["causal"])
        )
        / length
        for length in (250, 500, 1000, 2000)
    }


if __name__ == "__main__":
    main()
