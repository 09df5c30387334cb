"""How much of the bare tokenizer's speed does the processor keep, and how many tokens do values save?

Both encode the same texts with the same options and take turns; the best turn of each counts. The texts are
number-free prose and a table rendered as sentences, each as a batch of lines and of documents (padded, as
tensors) and as one long text (as lists). The tokenizers are Qwen2.5's and, where it is installed, the
embedded base's. A ratio of 1 is the bare tokenizer's speed; the worst case is the result.

    python benchmarks/processor.py
    python benchmarks/processor.py --quick --json
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import random
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from causal_qwen import CausalQwen2Processor
from causal_qwen.conversion import ConversionError, bundled_text, load_base
from causal_qwen.conversion.vocabulary import choose_num_token

TARGETS = {"number_free_ratio": 0.5, "number_heavy_ratio": 0.3}
TABLE = "number_heavy_ratio"
QWEN_ROWS = 151_936
LINES_PER_DOCUMENT = 16
CITIES = ("Lyon", "Osaka", "Accra", "Porto", "Quito", "Turin", "Hanoi", "Basel")
ROW = (
    "In {year} the plant in {city} made {units:,} units at ${price:.2f} each, used {energy:.1f} kWh "
    "at {cold:.1f} °C and returned {share:.2f}% of them.\n"
)


def prose(draw: random.Random) -> str:
    """A line of the bundled texts without a digit."""
    return draw.choice(_digitless_lines())


@functools.cache
def _digitless_lines() -> list[str]:
    lines = (bundled_text("calibration") + "\n" + bundled_text("heldout")).splitlines(keepends=True)
    return [line for line in lines if line.strip() and not any(map(str.isdigit, line))]


def table(draw: random.Random) -> str:
    """A row of a table, in words: six numbers."""
    return ROW.format(
        year=draw.randrange(1990, 2030),
        city=draw.choice(CITIES),
        units=draw.randrange(100, 10_000_000),
        price=draw.uniform(1, 500),
        energy=draw.lognormvariate(6, 2),
        cold=draw.gauss(-5, 20),
        share=draw.uniform(0, 30),
    )


def grow(line: Callable[[random.Random], str], size: int) -> list[str]:
    """Lines of ``size`` characters together."""
    draw = random.Random(0)
    lines, length = [], 0
    while length < size:
        lines.append(line(draw))
        length += len(lines[-1])
    return lines


def shapes(lines: list[str]) -> dict[str, tuple[str | list[str], dict[str, Any]]]:
    """The same characters as (text, options) in three shapes."""
    starts = range(0, len(lines), LINES_PER_DOCUMENT)
    documents = ["".join(lines[start : start + LINES_PER_DOCUMENT]) for start in starts]
    tensors = {"padding": True, "return_tensors": "pt"}
    return {"lines": (lines, tensors), "documents": (documents, tensors), "one text": ("".join(lines), {})}


def best_times(calls: list[Callable[[], object]], repeat: int) -> list[float]:
    """The least seconds of each call; they take turns, so that a busy machine slows all of them."""
    for call in calls:  # the first call fills caches
        call()
    gc.collect()
    gc.freeze()  # else every collection would walk over the vocabularies
    best = [math.inf] * len(calls)
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
    parser.add_argument("--size", type=float, default=1.0, metavar="MB", help="million characters per text")
    parser.add_argument("--repeat", type=int, default=7, help="the best of so many turns counts")
    parser.add_argument("--quick", action="store_true", help="0.1 MB, three turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    size, repeat = (0.1, 3) if arguments.quick else (arguments.size, arguments.repeat)
    if size <= 0 or repeat < 1:
        parser.error("there must be some text and at least one turn")

    texts = {key: grow(line, round(size * 1e6)) for key, line in zip(TARGETS, (prose, table), strict=True)}
    cases, token_ratios = [], {}
    for name, (tokenizer, rows) in tokenizers().items():
        processor = CausalQwen2Processor(choose_num_token(tokenizer, rows).tokenizer, numbers="value")
        bare = functools.partial(tokenizer, return_token_type_ids=False, verbose=False)
        for key, lines in texts.items():
            megabytes = sum(map(len, lines)) / 1e6
            for shape, (text, options) in shapes(lines).items():
                calls = [functools.partial(encode, text, **options) for encode in (bare, processor)]
                seconds = best_times(calls, repeat)
                case = {"tokenizer": name, "text": key, "shape": shape, "ratio": seconds[0] / seconds[1]}
                cases.append(case | {"mb_per_second": [megabytes / second for second in seconds]})
        lengths = [sum(map(len, processor(texts[TABLE], numbers=m)["input_ids"])) for m in ("value", "text")]
        token_ratios[name] = lengths[0] / lengths[1]

    result = {key: min(case["ratio"] for case in cases if case["text"] == key) for key in TARGETS}
    if arguments.json:
        result |= {"token_ratio": token_ratios["Qwen2.5"], "token_ratios": token_ratios}
        print(json.dumps(result | {"targets": TARGETS, "cases": cases}))
        return
    print(f"{'vocabulary':<12}{'text':<20}{'shape':<11}{'tokenizer':>13}{'processor':>13}{'ratio':>7}")
    for case in cases:
        speeds = "".join(f"{speed:>8.2f} MB/s" for speed in case["mb_per_second"])
        label = case["text"].removesuffix("_ratio").replace("_", "-")
        print(f"{case['tokenizer']:<12}{label:<20}{case['shape']:<11}{speeds}{case['ratio']:>7.2f}")
    for name, ratio in token_ratios.items():
        print(f"{name}: with its numbers as values the table takes {ratio:.3f} of the tokens")
    for key, target in TARGETS.items():
        print(f"{key} {result[key]:.2f}, target {target}: {'met' if result[key] >= target else 'MISSED'}")


if __name__ == "__main__":
    main()
