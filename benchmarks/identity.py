"""Who wrote this? Whether the texts of an individual are recognisable, and what that costs.

Every writer continues the same prompts. A reader counts words: for each writer the centroid of their texts
after one half of the prompts, and the author of a text after another prompt is whoever's centroid is nearest.
Then the reader learns from the *first* halves of texts and is shown the *second* halves of texts after other
prompts: noise that is only tied to positions has nothing to show there, what persists has.

All ways to write are taken at the same nats per token under the base, by a temperature that is found on other
writers first; one row is at temperature 1, as the model comes. Intervals are of a bootstrap over writers and
prompts.

    python benchmarks/identity.py            # 24 writers, 40 prompts, 40 tokens: about half an hour on a core
    python benchmarks/identity.py --quick    # 24 writers, 20 prompts, 24 tokens, three settings
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from measure import BASE, Option, Record, Table, run_benchmark, watched
from writers import PROMPTS, Setting, Writers

Array = npt.NDArray[np.float64]
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
REFERENCE = "softmax T=0.7"
SETTINGS: dict[str, Setting] = {
    REFERENCE: Setting("softmax", 0.7),
    "softmax T=0.5": Setting("softmax", 0.5),
    "softmax T=1": Setting("softmax", 1.0),
    "Gumbel by position": Setting("gumbel", 0.7),  # the law of softmax at its temperature: no search
    "individual, as it comes": Setting("individual", 1.0),
    **{
        f"individual ρ={rho}": Setting("individual", persistence=rho)
        for rho in (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
    },
}
QUICK = (REFERENCE, "Gumbel by position", "individual, as it comes")
SCORED = 8  # writers whose nats are taken
CALIBRATORS = 1000  # seed of the first of the writers on whom temperatures are found
TRIALS = (0.8, 1.1)  # temperatures that the search for one begins with
RESAMPLES = 4000
REPEATED = 3  # words in a row that count as a repetition where they stood before
OPTIONS = {
    "base": BASE,
    "writers": Option("writers per setting", 24, smoke=3),
    "prompts": Option("prompts", 40, smoke=4, quick=20),
    "tokens": Option("tokens per text", 40, smoke=4, quick=24),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Write, read, and draw what was recognised."""
    run_benchmark(
        __file__, __doc__, OPTIONS, figures, tables,
        quick="softmax, Gumbel and individuals as they come, on shorter texts", argv=argv, picture=draw,
    )  # fmt: skip


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is recognised in each setting, and what its texts are like."""
    writers = Writers(arguments.base, PROMPTS[: arguments.prompts])
    names = QUICK if arguments.quick else tuple(SETTINGS)
    measured: dict[str, Any] = {}
    for name in watched(names, "settings"):
        setting = SETTINGS[name]
        if setting.persistence is not None:
            setting = matched(writers, setting, measured[REFERENCE]["nats"], arguments.tokens)
        measured[name] = identity(writers, setting, arguments.writers, arguments.tokens)
    shipped = measured["individual, as it comes"]
    return {
        "persistence": writers.model.config.persistence,
        "chance": 1 / arguments.writers,
        "attribution": shipped["whole"],
        "half_text": shipped["half"],
        "half_text_standard_errors": (shipped["half"] - 1 / arguments.writers)
        / max(shipped["half_se"], 1 / (arguments.writers * arguments.prompts)),
        "settings": measured,
    }


def identity(writers: Writers, setting: Setting, count: int, tokens: int) -> dict[str, float]:
    """Attribution by whole texts and by halves, fidelity and diversity, each with its interval."""
    prompts = len(writers.prompts)
    parts = [
        writers.write(setting, [(prompt, seed) for prompt in range(prompts)], tokens, scored=seed < SCORED)
        for seed in watched(range(count), f"{setting}")
    ]
    ids = [part.ids for part in parts]
    whole = [writers.texts(rows) for rows in ids]
    first, second = (
        [writers.texts(rows[:, half]) for rows in ids]
        for half in (slice(None, tokens // 2), slice(tokens // 2, None))
    )
    counted: dict[str, Array] = {
        "whole": attributions(whole, whole),
        "half": attributions(first, second),
        "nats": np.array([part.nats.mean(-1).tolist() for part in parts[:SCORED]]),
        "distinct": np.array([[len(set(row)) for row in rows.tolist()] for rows in ids], dtype=float),
        "repeated": np.array([[repetition(row) for row in rows.tolist()] for rows in ids]),
    }
    row: dict[str, float] = {"temperature": setting.temperature}
    for name, values in counted.items():
        error, low, high = bootstrap(values)
        row |= {name: float(values.mean()), f"{name}_se": error, f"{name}_low": low, f"{name}_high": high}
    return row


def matched(writers: Writers, setting: Setting, nats: float, tokens: int) -> Setting:
    """The setting at the temperature where its texts have these nats: a line in log T through two.

    Six writers and eight prompts, the same at both, so that nothing but the temperature moves.
    """
    prompts = range(0, len(writers.prompts), max(len(writers.prompts) // 8, 1))
    rows = [(prompt, CALIBRATORS + who) for who in range(6) for prompt in prompts]
    low, high = (
        float(writers.write(replace(setting, temperature=trial), rows, tokens).nats.mean())
        for trial in TRIALS
    )
    slope = math.log(TRIALS[1] / TRIALS[0]) / (high - low) if high > low else 0.0
    temperature = TRIALS[0] * math.exp(slope * (nats - low))
    return replace(setting, temperature=min(max(temperature, TRIALS[0] / 2), TRIALS[1] * 2))


# The reader -------------------------------------------------------------------------------------------------


def attributions(learned: Sequence[Sequence[str]], shown: Sequence[Sequence[str]]) -> Array:
    """1 where a text is given to its author, (writers, prompts).

    The reader learns from ``learned`` after the prompts of one half (every other prompt) and is asked about
    ``shown`` after those of the other, and the other way round.
    """
    hits = np.zeros((len(shown), len(shown[0])))
    for parity in (0, 1):
        training = [texts[1 - parity :: 2] for texts in learned]
        test = [texts[parity::2] for texts in shown]
        hits[:, parity::2] = nearest(training, test) == np.arange(len(shown))[:, None]
    return hits


def nearest(training: Sequence[Sequence[str]], test: Sequence[Sequence[str]]) -> npt.NDArray[np.int64]:
    """The writer whose centroid has the smallest angle to each text, (writers, prompts).

    A text is its words' log(1 + count), each word weighted by log(texts/texts with it) and all centred on the
    mean of the writers, so that what all of them say points to none.
    """
    vocabulary = {
        word: index
        for index, word in enumerate(sorted({w for texts in training for text in texts for w in words(text)}))
    }
    known, asked = (np.stack([_counts(texts, vocabulary) for texts in rows]) for rows in (training, test))
    documents = known.reshape(-1, len(vocabulary))
    weight = np.log(len(documents) / (documents > 0).sum(0))  # (words,)
    known, asked = known * weight, asked * weight  # (writers, prompts, words)
    mean = known.mean((0, 1))
    centroids = _unit(known.mean(1) - mean)  # (writers, words)
    return (_unit(asked - mean) @ centroids.T).argmax(-1)


def words(text: str) -> list[str]:
    """Lower-case words, without numbers and punctuation."""
    return WORD.findall(text.lower())


def _counts(texts: Sequence[str], vocabulary: dict[str, int]) -> Array:
    counts = np.zeros((len(texts), len(vocabulary)))
    for row, text in enumerate(texts):
        for word in words(text):
            if word in vocabulary:
                counts[row, vocabulary[word]] += 1
    return np.log1p(counts)


def _unit(rows: Array) -> Array:
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    unit: Array = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return unit


def repetition(tokens: Sequence[int]) -> float:
    """Share of tokens that complete a triple which the text has had before."""
    triples = [tuple(tokens[i : i + REPEATED]) for i in range(len(tokens) - REPEATED + 1)]
    return 1 - len(set(triples)) / len(triples)


def bootstrap(values: Array) -> tuple[float, float, float]:
    """Standard error and 95% interval of the mean of (writers, prompts), both resampled with replacement."""
    generator = np.random.default_rng(0)
    rows, columns = (generator.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n for n in values.shape)
    means = ((rows @ values) * columns).sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(means.std()), float(low), float(high)


# What is shown ----------------------------------------------------------------------------------------------


def tables(record: Record) -> list[Table]:
    """One row per setting."""
    rows = [
        (
            name,
            f"{row['temperature']:.2f}",
            "{nats:.2f} ({nats_low:.2f}–{nats_high:.2f})".format(**row),
            "{whole:.0%} ({whole_low:.0%}–{whole_high:.0%})".format(**row),
            "{half:.0%} ({half_low:.0%}–{half_high:.0%})".format(**row),
            "{distinct:.1f} ({distinct_low:.1f}–{distinct_high:.1f})".format(**row),
            "{repeated:.1%} ({repeated_low:.1%}–{repeated_high:.1%})".format(**row),
        )
        for name, row in record.figures["settings"].items()
    ]
    options = record.options
    title = (
        f"{options['writers']} writers, {options['prompts']} prompts, {options['tokens']} tokens; "
        f"chance is {record.figures['chance']:.1%}; in parentheses 95% intervals"
    )
    columns = (
        "setting", "T", "nats per token", "author of a text, other prompts",
        "author of a second half, from first halves", "distinct tokens", "repeated triples",
    )  # fmt: skip
    return [Table(title, columns, rows)]


def headlines(record: Record) -> list[tuple[str, str]]:
    """Attribution as the model comes."""
    found = record.figures
    return [
        (
            f"author of a text among {record.options['writers']}, by word counts, at ρ = "
            f"{found['persistence']:g}; second halves from first halves; chance",
            f"{found['attribution']:.0%}; {found['half_text']:.0%}; {found['chance']:.0%}",
        )
    ]


def draw(record: Record, file: Path) -> None:
    """Attribution against distinct tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.5), layout="constrained")
    axes = figure.subplots()
    settings = record.figures["settings"]
    for family, colour in (("softmax", "tab:gray"), ("Gumbel", "tab:orange"), ("individual", "tab:blue")):
        named = {name: row for name, row in settings.items() if name.startswith(family)}
        for measure, style, label in (
            ("whole", "o", "whole texts"),
            ("half", "s", "second halves from first halves"),
        ):
            points = list(named.values())
            axes.errorbar(
                [row["distinct"] for row in points], [row[measure] for row in points],
                yerr=[
                    [row[measure] - row[f"{measure}_low"] for row in points],
                    [row[f"{measure}_high"] - row[measure] for row in points],
                ],
                fmt=style, color=colour, capsize=2, label=f"{family}: {label}",
                fillstyle="full" if measure == "whole" else "none",
            )  # fmt: skip
        for name, row in named.items():
            short = name.removeprefix(family).strip(" ,") or name
            place = (row["distinct"], row["whole"])
            axes.annotate(short, place, xytext=(6, 4), textcoords="offset points", fontsize=8)
    axes.axhline(record.figures["chance"], color="black", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="distinct tokens per text", ylabel="texts given to their author", ylim=(0, 1.03),
        title="Who wrote this? The dotted line is chance",
    )  # fmt: skip
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
