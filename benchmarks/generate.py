"""What does a token cost in each mode, against transformers' generate() on the plain base?

All variants continue the same prompt greedily (or by one individual), batch 1, and are run in turn within
each round; a ratio is that of the best times.

    python benchmarks/generate.py                  # embedded base, Qwen2.5-0.5B sizes, growth with length
    python benchmarks/generate.py --quick --json   # the embedded base only
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from causal_qwen import CausalQwen2Config, CausalQwen2ForCausalLM, convert
from causal_qwen.conversion import load_base
from measure import BASE, Option, Record, Table, best_ratio, interleaved, run_benchmark, seconds

MODES: dict[str, dict[str, Any]] = {
    "compatible": {"inference_mode": "compatible", "do_sample": False},
    "standard": {"inference_mode": "standard", "do_sample": False},
    "causal": {"inference_mode": "causal", "individual": 1, "top_k": 0},
    "causal, top_k 50": {"inference_mode": "causal", "individual": 1, "top_k": 50},
}
# Sizes of random models, of which only time is measured.
HALF_BILLION = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DIMENSIONS = {"Qwen2.5-0.5B": HALF_BILLION, "tiny": TINY}
OPTIONS = {
    "base": BASE,
    "dimensions": Option(f"of the random model: {' or '.join(DIMENSIONS)}", "Qwen2.5-0.5B", smoke="tiny"),
    "repeats": Option("interleaved rounds", 15, smoke=2),
    "tokens": Option("new tokens per run", 16, smoke=3),
    "lengths": Option(
        "tokens of causal generation whose cost is compared", (250, 500, 1000, 2000), smoke=(4, 8)
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print tables or one JSON object."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="only the embedded base", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios of every mode; without --quick of a larger model too, and the growth with the length."""
    base = load_base(arguments.base)
    prompt_ids = base.tokenizer("The history of the bicycle begins with", return_tensors="pt").input_ids
    model = convert(base, calibration="none").model
    embedded = ratios(base.model, model, prompt_ids, arguments)
    if arguments.quick:
        return embedded
    costs = growth(model, prompt_ids, arguments.lengths)
    del base, model
    larger = ratios(*random_pair(DIMENSIONS[arguments.dimensions]), arguments)
    return {"embedded": embedded, f"{arguments.dimensions} dimensions": larger, "growth": costs}


def random_pair(dimensions: dict[str, int]) -> tuple[Any, Any, torch.Tensor]:
    """A random base with tied embeddings, its causal twin, and a prompt."""
    base = Qwen2ForCausalLM(Qwen2Config(**dimensions, tie_word_embeddings=True)).eval()
    number = dimensions["vocab_size"] - 271  # <NUM>, where Qwen2.5 has spare rows
    config = CausalQwen2Config(**dimensions, tie_word_embeddings=True, num_token_id=number)
    model = CausalQwen2ForCausalLM.from_pretrained(None, config=config, state_dict=base.state_dict()).eval()
    with torch.no_grad():
        model.action.bias[number] = -20.0
    return base, model, torch.randint(0, number, (1, 8))


def ratios(base: Any, model: Any, ids: torch.Tensor, arguments: argparse.Namespace) -> dict[str, float]:
    """The cost of a token in every mode over the base's, and the base's rate."""
    tokens = arguments.tokens
    variants = {"base": functools.partial(generate, base, ids, tokens, do_sample=False)}
    variants |= {
        mode: functools.partial(generate, model, ids, tokens, **options) for mode, options in MODES.items()
    }
    times = interleaved(variants, repeats=arguments.repeats)
    costs = {f"{mode}_ratio": best_ratio(times, mode, "base") for mode in MODES}
    return costs | {"base_tokens_per_second": tokens / min(times["base"])}


def growth(model: Any, ids: torch.Tensor, lengths: Sequence[int]) -> dict[str, float]:
    """Seconds per token of causal generation at growing lengths: attention apart, it should not grow."""
    return {
        f"{length} tokens, seconds per token": seconds(
            functools.partial(generate, model, ids, length, **MODES["causal"])
        )
        / length
        for length in lengths
    }


def generate(model: Any, ids: torch.Tensor, tokens: int, **options: Any) -> None:
    """Exactly ``tokens`` new tokens, whatever they are."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=0, **options
    )
    assert out.shape[1] == ids.shape[1] + tokens


def tables(record: Record) -> list[Table]:
    """The modes of each model, and the growth."""
    if "embedded" not in record.figures:
        return [_modes("A generated token against the plain base's generate()", record.figures)]
    costs = sorted(record.figures["growth"].items(), key=lambda cost: int(cost[0].split()[0]))
    growth = [(name.partition(",")[0], f"{value:.3f}") for name, value in costs]
    models = [name for name in sorted(record.figures) if name != "growth"]
    return [
        *(_modes(f"A generated token, {name}", record.figures[name]) for name in models),
        Table("Causal generation at growing lengths", ("length", "seconds per token"), growth),
    ]


def _modes(title: str, values: dict[str, float]) -> Table:
    rows = [(mode, f"{values[f'{mode}_ratio']:.2f}×") for mode in MODES]
    rows.append(("tokens per second of the base", f"{values['base_tokens_per_second']:.0f}"))
    return Table(title, ("mode", "against the base"), rows)


def headlines(record: Record) -> list[tuple[str, str]]:
    """The three modes on the embedded base, of a quick run."""
    what = "a generated token in `compatible`; `standard`; `causal`, against the base's"
    return [(what, "; ".join(f"{record.figures[f'{mode}_ratio']:.2f}×" for mode in list(MODES)[:3]))]


if __name__ == "__main__":
    main()
