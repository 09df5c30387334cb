"""How much of the bare tokenizer's speed does the processor keep, and how many tokens do values save?

Both encode the same texts with the same options, taking turns; the best turn of each counts. Texts are number-free prose
and a table rendered as sentences, as a batch of documents (padded, as tensors) and as one long text (as lists). The
tokenizers are Qwen2.5's and, where it is installed, the embedded base's. A ratio of 1 is the bare tokenizer's speed; the
worst case is the result.

    python benchmarks/processor.py
    python benchmarks/processor.py --quick --json
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import runpy
import time
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from causal_qwen import CausalQwen2Processor, scan
from causal_qwen.conversion import ConversionError, bundled_text, load_base
from causal_qwen.conversion.vocabulary import choose_num_token

TARGETS = {"number_free_ratio": 0.5, "number_heavy_ratio": 0.3}
QWEN_ROWS = 151_936
CITIES = "Lyon Osaka Accra Porto Quito Turin Hanoi Basel".split()
ROW = (
    "In {year} the plant in {city} made {units:,} units at ${price:.2f} each, used {energy:.1f} kWh at {cold:.1f} °C "
    "and returned {share:.2f}% of them. "
)


def prose(size: int, draw: random.Random) -> list[str]:
    """Documents of bundled sentences without a digit, up to a size in characters."""
    lines = (bundled_text("calibration") + "\n" + bundled_text("heldout")).splitlines()
    lines = [line for line in lines if line.strip() and not any(character.isdigit() for character in line)]
    return grow(lambda: draw.choice(lines) + "\n", size)


def table(size: int, draw: random.Random) -> list[str]:
    """Documents of table rows in words, seven numbers each, up to a size in characters."""

    def row() -> str:
        return ROW.format(
            year=draw.randrange(1990, 2030),
            city=draw.choice(CITIES),
            units=draw.randrange(100, 10_000_000),
            price=draw.uniform(1, 500),
            energy=draw.lognormvariate(6, 2),
            cold=draw.gauss(-5, 20),
            share=draw.uniform(0, 30),
        )

    return grow(row, size)


def grow(line: Callable[[], str], size: int, document: int = 2000) -> list[str]:
    """Documents of about ``document`` characters each, ``size`` characters together."""
    documents = []
    for _ in range(max(1, size // document)):
        text = ""
        while len(text) < document:
            text += line()
        documents.append(text)
    return documents


def best_times(calls: list[Callable[[], object]], repeat: int) -> list[float]:
    """The least wall-clock seconds of each call; they take turns, so that a busy machine slows all of them."""
    best = [math.inf] * len(calls)
    for call in calls:  # the first call fills caches
        call()
    gc.collect()
    gc.freeze()  # else every collection would walk over the vocabularies
    for _ in range(repeat):
        for index, call in enumerate(calls):
            gc.collect()
            start = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def tokenizers() -> dict[str, tuple[PreTrainedTokenizerBase, int]]:
    """Name → (tokenizer, rows of its embedding)."""
    # The tests' own file, so that there is one recipe for this tokenizer.
    recipe = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "qwen_vocabulary.py"))
    found = {"Qwen2.5": (recipe["qwen_tokenizer"](), QWEN_ROWS)}
    try:
        base = load_base("smollm2")
    except ConversionError:
        return found
    return found | {"SmolLM2": (base.tokenizer, base.model.config.vocab_size)}


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=1.0, metavar="MB", help="characters per text, in millions")
    parser.add_argument("--repeat", type=int, default=9, help="the best of so many turns counts")
    parser.add_argument("--quick", action="store_true", help="a tenth of the text, five turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    size, repeat = (arguments.size / 10, 5) if arguments.quick else (arguments.size, arguments.repeat)
    if size <= 0 or repeat < 1:
        parser.error("there must be some text and at least one turn")

    documents = {
        "number_free_ratio": prose(round(size * 1e6), random.Random(0)),
        "number_heavy_ratio": table(round(size * 1e6), random.Random(0)),
    }
    assert not any(scan(text) for text in documents["number_free_ratio"])
    rows, token_ratios = [], {}
    for name, (tokenizer, vocabulary) in tokenizers().items():
        processor = CausalQwen2Processor(choose_num_token(tokenizer, vocabulary).tokenizer, numbers="value")
        for key, texts in documents.items():
            for shape, text, options in (
                ("documents", texts, {"padding": True, "return_tensors": "pt"}),
                ("one text", "".join(texts), {}),
            ):
                bare, ours = best_times(
                    [
                        lambda t=tokenizer, x=text, o=options: t(x, return_token_type_ids=False, verbose=False, **o),
                        lambda p=processor, x=text, o=options: p(x, **o),
                    ],
                    repeat,
                )
                megabytes = sum(map(len, texts)) / 1e6
                rows.append({"tokenizer": name, "text": key, "shape": shape, "ratio": bare / ours})
                rows[-1] |= {"tokenizer_mb_per_second": megabytes / bare, "processor_mb_per_second": megabytes / ours}
        lengths = {
            mode: sum(map(len, processor(documents["number_heavy_ratio"], numbers=mode)["input_ids"]))
            for mode in ("value", "text")
        }
        token_ratios[name] = lengths["value"] / lengths["text"]

    result = {key: min(row["ratio"] for row in rows if row["text"] == key) for key in TARGETS}
    result |= {"token_ratio": token_ratios["Qwen2.5"]}
    if arguments.json:
        print(json.dumps(result | {"token_ratios": token_ratios, "targets": TARGETS, "cases": rows}))
        return
    print(f"{'tokenizer':<11}{'text':<22}{'shape':<11}{'tokenizer':>14}{'processor':>14}{'ratio':>8}")
    for row in rows:
        speeds = "".join(f"{row[f'{who}_mb_per_second']:>9.2f} MB/s" for who in ("tokenizer", "processor"))
        print(f"{row['tokenizer']:<11}{row['text']:<22}{row['shape']:<11}{speeds}{row['ratio']:>8.2f}")
    for name, ratio in token_ratios.items():
        print(f"{name}: the table takes {ratio:.2f} of the tokens when its numbers are values")
    for key, target in TARGETS.items():
        print(f"{key} {result[key]:.2f}, target {target}: {'met' if result[key] >= target else 'MISSED'}")


if __name__ == "__main__":
    main()
