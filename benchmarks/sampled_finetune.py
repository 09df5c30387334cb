"""Does training on sampled negatives arrive where the exact loss arrives?

Fine-tunes the converted embedded base twice on the same batches of the manual that ships with Python, once
with the exact loss and once with sampled negatives, and measures the exact loss of both on held-out pages.

    python benchmarks/sampled_finetune.py                  # 200 steps: about 8 minutes on two cores
    python benchmarks/sampled_finetune.py --quick --json   # a few steps, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import time
from typing import Any

import torch
from torch import Tensor

from causal_qwen.conversion import Conversion, convert
from measure import progress, show


def main() -> None:
    """Train twice, and print both curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few short steps, without calibration")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=2, help="sequences per step")
    parser.add_argument("--length", type=int, default=96, help="tokens per sequence")
    parser.add_argument("--negatives", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--every", type=int, default=40, help="steps between measurements")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.rows, arguments.length, arguments.every = 4, 1, 32, 2
    result = compare(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    fused, sampled = result["fused"], result["sampled"]
    rows = [
        (str(a["step"]), f"{a['loss']:.4f}", f"{b['loss']:.4f}", f"{b['loss'] / a['loss']:.4f}")
        for a, b in zip(fused["curve"], sampled["curve"], strict=True)
    ]
    rows.append(("seconds per step", f"{fused['seconds']:.2f}", f"{sampled['seconds']:.2f}", ""))
    show("Exact One-vs-Rest loss on held-out text", ("step", "fused", "sampled", "ratio"), rows)


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both curves, and the ratio of the final losses."""
    results: dict[str, Any] = {}
    for impl in ("fused", "sampled"):
        conversion = convert("smollm2", calibration="none" if arguments.quick else "default")
        results[impl] = train(conversion, impl, arguments)
    fused, sampled = (results[impl]["curve"][-1]["loss"] for impl in ("fused", "sampled"))
    return {"final_loss_ratio": sampled / fused, **results}


def train(conversion: Conversion, impl: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The curve of the exact held-out loss, and the median time of a step."""
    model: Any = conversion.model
    pages = batches(conversion.tokenizer, arguments)
    held_out, training = pages[:8], pages[8 : 8 + arguments.steps]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.learning_rate, weight_decay=0.0, fused=True
    )
    torch.manual_seed(0)
    curve, times = [{"step": 0, "loss": exact_loss(model, held_out)}], []
    for step, ids in enumerate(progress(training, impl), start=1):
        model.train()
        model.config.loss_impl = impl
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
        if step % arguments.every == 0 or step == arguments.steps:
            curve.append({"step": step, "loss": exact_loss(model, held_out)})
    return {"curve": curve, "seconds": sorted(times)[len(times) // 2]}


@torch.no_grad()
def exact_loss(model: Any, held_out: list[Tensor]) -> float:
    """Mean One-vs-Rest loss over all of the vocabulary."""
    model.eval()
    model.config.loss_impl = "fused"
    losses = [model(input_ids=ids, labels=ids, output_logits=False).cls_loss.item() for ids in held_out]
    return sum(losses) / len(losses)


def batches(tokenizer: Any, arguments: argparse.Namespace) -> list[Tensor]:
    """Batches (rows, length) of Python's manual, in an order that is always the same."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    size = arguments.rows * arguments.length
    order = torch.randperm(len(ids) // size, generator=torch.Generator().manual_seed(0)).tolist()
    if len(order) < arguments.steps + 8:
        raise SystemExit(f"the text has {len(order)} batches of {size} tokens; ask for fewer steps")
    return [ids[i * size : (i + 1) * size].view(arguments.rows, arguments.length) for i in order]


if __name__ == "__main__":
    main()
