"""How much of the bare tokenizer's speed does the processor keep, and how many tokens do values save?

Both encode the same texts with the same options and take turns; the best turn of each counts. The texts are
number-free prose and a table rendered as sentences, each as a batch of lines and of documents (padded, as
tensors) and as one long text (as lists). The tokenizers are Qwen2.5's and the embedded base's. A ratio of 1
is the bare tokenizer's speed; the worst case is the result.

    python benchmarks/processor.py
    python benchmarks/processor.py --quick --json
"""

from __future__ import annotations

import argparse
import functools
import random
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from causal_qwen import CausalQwen2Processor
from causal_qwen.conversion import bundled_text, load_base
from causal_qwen.conversion.vocabulary import choose_num_token
from measure import BASE, Option, Record, Table, best_ratio, frozen, interleaved, run_benchmark, watched

TARGETS = {"number_free_ratio": 0.5, "number_heavy_ratio": 0.3}  # at least
TABLE = "number_heavy_ratio"
QWEN_ROWS = 151_936
LINES_PER_DOCUMENT = 16
CITIES = ("Lyon", "Osaka", "Accra", "Porto", "Quito", "Turin", "Hanoi", "Basel")
ROW = (
    "In {year} the plant in {city} made {units:,} units at ${price:.2f} each, used {energy:.1f} kWh "
    "at {cold:.1f} °C and returned {share:.2f}% of them.\n"
)

OPTIONS = {
    "base": BASE,
    "vocabularies": Option("Qwen2.5's and the base's", ("Qwen2.5", "base"), smoke=("base",)),
    "size": Option("million characters per text", 1.0, smoke=0.002, quick=0.1),
    "repeat": Option("the best of so many turns counts", 7, smoke=1, quick=3),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print tables or one JSON object."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="0.1 MB, three turns", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """The worst ratio of each kind of text, tokens saved, and every case."""
    characters = round(arguments.size * 1e6)
    if characters < 1 or arguments.repeat < 1:
        raise SystemExit(f"size is {arguments.size} and repeat {arguments.repeat}; both must be positive")
    texts = {key: grow(line, characters) for key, line in zip(TARGETS, (prose, table), strict=True)}
    cases, token_ratios = [], {}
    for name in watched(arguments.vocabularies, "vocabularies"):
        tokenizer, rows = load_vocabulary(name, arguments.base)
        processor = CausalQwen2Processor(choose_num_token(tokenizer, rows).tokenizer, numbers="value")
        bare = functools.partial(tokenizer, return_token_type_ids=False, verbose=False)
        for key, lines in texts.items():
            megabytes = sum(map(len, lines)) / 1e6
            for shape, (text, options) in shapes(lines).items():
                encoders = {"bare": bare, "ours": processor}
                calls = {who: functools.partial(encode, text, **options) for who, encode in encoders.items()}
                with frozen():
                    times = interleaved(calls, repeats=arguments.repeat)
                case = {"tokenizer": name, "text": key, "shape": shape}
                case["ratio"] = best_ratio(times, "bare", "ours")
                cases.append(case | {"mb_per_second": [megabytes / min(times[who]) for who in encoders]})
        lengths = [sum(map(len, processor(texts[TABLE], numbers=m)["input_ids"])) for m in ("value", "text")]
        token_ratios[name] = lengths[0] / lengths[1]
    worst = {key: min(case["ratio"] for case in cases if case["text"] == key) for key in TARGETS}
    saved = {"token_ratio": token_ratios[arguments.vocabularies[0]], "token_ratios": token_ratios}
    return worst | saved | {"targets": TARGETS, "cases": cases}


def tables(record: Record) -> list[Table]:
    """Every case, and what comes of them."""
    cases = [
        (
            case["tokenizer"],
            case["text"].removesuffix("_ratio").replace("_", "-"),
            case["shape"],
            *(f"{speed:.2f}" for speed in case["mb_per_second"]),
            f"{case['ratio']:.2f}",
        )
        for case in record.figures["cases"]
    ]
    columns = ("vocabulary", "text", "shape", "tokenizer, MB/s", "processor, MB/s", "ratio")
    return [
        Table("Speed of the processor against the bare tokenizer", columns, cases),
        Table("In all", ("", "figure"), headlines(record)),
    ]


def headlines(record: Record) -> list[tuple[str, str]]:
    """The worst cases, and the tokens that values save."""
    values = "{number_free_ratio:.2f}×; {number_heavy_ratio:.2f}×".format(**record.figures)
    return [
        ("the processor's speed against the bare tokenizer's, worst case: prose; a table in words", values),
        ("tokens of the table, numbers as values against digits", f"{record.figures['token_ratio']:.2f}×"),
    ]


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


def load_vocabulary(name: str, source: str) -> tuple[PreTrainedTokenizerBase, int]:
    """A tokenizer, and the rows of its embedding."""
    if name == "Qwen2.5":
        # The tests' own file, so that there is one recipe for this tokenizer.
        recipe = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "qwen_vocabulary.py"))
        return recipe["qwen_tokenizer"](), QWEN_ROWS
    base = load_base(source)
    return base.tokenizer, base.model.config.vocab_size


if __name__ == "__main__":
    main()
