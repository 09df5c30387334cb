"""Who wrote this? Whether the texts of an individual are recognisable, and what that costs.

Every writer continues the same prompts. A reader counts words: for each writer the centroid of their texts
after one half of the prompts, and the author of what was written after the other half is whoever's centroid
is nearest; asked about one text alone, and about all texts of somebody together. Then the reader learns from
the *first* halves of texts and is shown the *second* halves of texts after other prompts: noise that is only
tied to positions has nothing to show there, what persists has.

All ways to write are taken at the same nats per token under the base, by a temperature that is found on other
writers first; some rows are at other temperatures. Intervals are of a bootstrap over writers and, for what is
known text by text, over prompts.

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
}
QUICK = (REFERENCE, "Gumbel by position", "individual, as it comes")
SCORED = 8  # writers whose nats are taken
CALIBRATORS = 1000  # seed of the first of the writers on whom temperatures are found
TRIALS = (0.8, 1.1)  # temperatures that the search for one begins with
RESAMPLES = 4000
HALVINGS = 20  # of the prompts
LEAST_SPREAD = 0.1  # of a word, so that rare ones do not decide alone
REPEATED = 3  # words in a row that count as a repetition where they stood before
OPTIONS = {
    "base": BASE,
    "writers": Option("writers per setting", 24, smoke=3),
    "prompts": Option("prompts", 40, smoke=4, quick=20),
    "tokens": Option("tokens per text", 40, smoke=4, quick=24),
    "persistences": Option(
        "ρ of individuals at equal nats", (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0), smoke=(0.0, 1.0)
    ),
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
    settings = (
        {name: SETTINGS[name] for name in QUICK} if arguments.quick else SETTINGS | matchable(arguments)
    )
    measured: dict[str, Any] = {}
    for name, setting in watched(list(settings.items()), "settings"):
        if setting.persistence is not None:
            setting = matched(writers, setting, measured[REFERENCE]["nats"], arguments.tokens)
        measured[name] = identity(writers, setting, arguments.writers, arguments.tokens)
    shipped = measured["individual, as it comes"]
    return {
        "persistence": writers.model.config.persistence,
        "chance": 1 / arguments.writers,
        "attribution": shipped["author"],
        "half_text": shipped["half_author"],
        "half_text_standard_errors": errors_above(shipped, "half_author", arguments.writers),
        "half_single_standard_errors": errors_above(shipped, "half_text", arguments.writers),
        "settings": measured,
    }


def matchable(arguments: argparse.Namespace) -> dict[str, Setting]:
    """Individuals whose temperature is found by matching nats."""
    return {f"individual ρ={rho}": Setting("individual", persistence=rho) for rho in arguments.persistences}


def errors_above(row: dict[str, float], name: str, writers: int) -> float:
    """By how many standard errors a share lies above chance."""
    return (row[name] - 1 / writers) / max(row[f"{name}_se"], 1e-3)


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
    (text, author), (half_text, half_author) = attributions(whole, whole), attributions(first, second)
    counted: dict[str, Array] = {
        "text": text,
        "author": author,
        "half_text": half_text,
        "half_author": half_author,
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


def attributions(learned: Sequence[Sequence[str]], shown: Sequence[Sequence[str]]) -> tuple[Array, Array]:
    """How often each text is given to its author, and how often all texts of an author together are.

    The prompts are halved at random, again and again: the reader learns ``learned`` after one half, and is
    asked about ``shown`` after the other.

    Returns:
        Shares of the halvings, (writers, prompts) of single texts and (writers, 1) of all together.
    """
    vocabulary = {
        word: i for i, word in enumerate(sorted({w for row in learned for t in row for w in words(t)}))
    }
    known, asked = (np.stack([_counts(texts, vocabulary) for texts in rows]) for rows in (learned, shown))
    count, prompts = len(shown), len(shown[0])
    generator = np.random.default_rng(0)
    right, seen, together = np.zeros((count, prompts)), np.zeros(prompts), np.zeros((count, 1))
    for _ in range(HALVINGS):
        training, test = np.split(generator.permutation(prompts), [prompts // 2])
        single, pooled = nearest(known[:, training], asked[:, test])
        right[:, test] += single == np.arange(count)[:, None]
        seen[test] += 1
        together[:, 0] += pooled == np.arange(count)
    return right[:, seen > 0] / seen[seen > 0], together / HALVINGS


def nearest(known: Array, asked: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The writer whose centroid has the smallest angle to each text, (writers, prompts), and to the mean of
    all texts of a writer, (writers,).

    Words weigh by the inverse of their spread over texts, and all is centred on the mean of the writers, so
    that what everybody says points to nobody: Burrows's Delta with cosines.

    Args:
        known: (writers, prompts, words) log(1 + count) of the texts to learn from.
        asked: The same of other texts.
    """
    spread = known.reshape(-1, known.shape[-1]).std(0) + LEAST_SPREAD  # (words,)
    mean = known.mean((0, 1))
    centroids = _unit((known.mean(1) - mean) / spread)  # (writers, words)
    texts = (asked - mean) / spread
    single, pooled = (_unit(rows) @ centroids.T for rows in (texts, texts.mean(1)))
    return single.argmax(-1), pooled.argmax(-1)


def words(text: str) -> list[str]:
    """Lower-case words, without numbers and punctuation."""
    return WORD.findall(text.lower())


def _counts(texts: Sequence[str], vocabulary: dict[str, int]) -> Array:
    """log(1 + count) of each word in each text, (texts, words)."""
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
    """One row per setting: what was recognised, and what the texts are like."""
    settings, options = record.figures["settings"], record.options
    recognised = [
        (name, *(_share(row, test) for test in ("author", "text", "half_author", "half_text")))
        for name, row in settings.items()
    ]
    texts = [
        (
            name,
            f"{row['temperature']:.2f}",
            "{nats:.2f} ({nats_low:.2f}–{nats_high:.2f})".format(**row),
            "{distinct:.1f} ({distinct_low:.1f}–{distinct_high:.1f})".format(**row),
            "{repeated:.1%} ({repeated_low:.1%}–{repeated_high:.1%})".format(**row),
        )
        for name, row in settings.items()
    ]
    half = options["prompts"] // 2
    chance = f"chance is {record.figures['chance']:.1%}"
    title = (
        f"{options['writers']} writers ({chance}), {options['prompts']} prompts, {options['tokens']} tokens; "
        "in parentheses 95% intervals"
    )
    columns = (
        "texts given to their author", f"{half} texts together", "one text",
        f"{half} second halves, from first halves", "one second half",
    )  # fmt: skip
    return [
        Table(title, columns, recognised),
        Table(
            "The same texts",
            ("setting", "T", "nats per token", "distinct tokens", "repeated triples"),
            texts,
        ),
    ]


def _share(row: dict[str, float], name: str) -> str:
    return f"{row[name]:.0%} ({row[f'{name}_low']:.0%}–{row[f'{name}_high']:.0%})"


def headlines(record: Record) -> list[tuple[str, str]]:
    """Attribution as the model comes."""
    found, options = record.figures, record.options
    shipped = found["settings"]["individual, as it comes"]
    return [
        (
            f"author of {options['prompts'] // 2} texts among {options['writers']}, by word counts, at ρ = "
            f"{found['persistence']:g}; of second halves from first halves; chance",
            f"{_share(shipped, 'author')}; {_share(shipped, 'half_author')}; {found['chance']:.0%}",
        )
    ]


def draw(record: Record, file: Path) -> None:
    """Attribution, and what it costs in variety, against ρ at equal nats."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    recognised, varied = figure.subplots(1, 2)
    settings = record.figures["settings"]
    rows = {float(name.partition("=")[2]): row for name, row in settings.items() if "ρ=" in name}
    rhos = sorted(rows)
    shipped = settings["individual, as it comes"]

    def curve(axes: Any, test: str, colour: str, label: str, marker: str) -> None:
        middle, low, high = (
            np.array([rows[rho][f"{test}{end}"] for rho in rhos]) for end in ("", "_low", "_high")
        )
        bars = [middle - low, high - middle]
        axes.errorbar(rhos, middle, yerr=bars, color=colour, marker=marker, capsize=2, label=label)
        axes.plot(
            record.figures["persistence"], shipped[test], "*", color="tab:green", markersize=13, zorder=3
        )

    curve(recognised, "author", "tab:blue", "individuals, whole texts", "o")
    curve(recognised, "half_author", "tab:purple", "individuals, second halves from first", "s")
    for test, style, of in (("author", "--", "whole texts"), ("half_author", ":", "second halves")):
        height = settings["Gumbel by position"][test]
        recognised.axhline(height, color="tab:orange", linestyle=style, label=f"Gumbel noise, {of}")
    recognised.axhline(settings[REFERENCE]["author"], color="tab:gray", label=f"{REFERENCE}, whole texts")
    recognised.set(
        xlabel="persistence ρ", ylabel="given to their author", ylim=(0, 1.05),
        title=f"Who wrote this? (chance {record.figures['chance']:.1%})",
    )  # fmt: skip
    curve(varied, "distinct", "tab:blue", "individuals", "o")
    varied.axhline(settings[REFERENCE]["distinct"], color="tab:gray", label=REFERENCE)
    varied.axhline(
        settings["Gumbel by position"]["distinct"], color="tab:orange", linestyle="--", label="Gumbel noise"
    )
    varied.set(
        xlabel="persistence ρ", ylabel=f"distinct tokens of {record.options['tokens']}", ylim=(0, None),
        title="What it costs, at equal nats",
    )  # fmt: skip
    for axes in (recognised, varied):
        axes.plot([], [], "*", color="tab:green", markersize=10, label="as they come, T = 1")
        axes.legend(fontsize=8, loc="center right" if axes is recognised else "lower left")
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()
