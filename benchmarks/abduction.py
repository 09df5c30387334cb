"""Can observed texts be abducted, do they replay, and what does a token cost?

Texts that the model sampled itself, and texts that people could have written. A text counts as replayed if
generate() says its tokens again, all of them, with the individual that `abduct` returns.

    python benchmarks/abduction.py
    python benchmarks/abduction.py --quick --json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from causal_qwen import convert
from causal_qwen.counterfactual import Abduction, AbductionError, abduct
from causal_qwen.counterfactual.interventions import unprocessed
from causal_qwen.data import prompt_batch
from measure import BASE, Option, Record, Table, run_benchmark, watched

PROMPTS = (
    "The reason why the sea is salty is that",
    "Once upon a time, in a village by the river,",
    "To bake a good loaf of bread you need",
    "The most important thing about a bridge is",
    "When the train finally arrived,",
)
WRITTEN = (
    ("The weather today is", " cold and windy, so we stayed at home and read."),
    ("My grandmother used to say", " that patience is a river, never a wall."),
    ("The committee met on Tuesday and", " agreed to postpone the vote until the new members arrive."),
    ("If you mix blue and yellow paint,", " you get green, though my son insists it is more like soup."),
    ("Dear Anna,", " thank you for the photographs; the one with the goat made me laugh."),
    ("The battery lasts", " about nine hours if you turn the brightness down."),
    ("In the last minute of the match", " the goalkeeper slipped, and the whole stadium went quiet."),
    ("She opened the old wooden box and found", " nothing but dust, a key and a very surprised spider."),
    ("Water boils at a lower temperature", " in the mountains, which is why the beans took all evening."),
    ("def area(radius):", "\n    return 3.14159 * radius ** 2\n"),
)
OPTIONS = {
    "base": BASE,
    "sampled": Option("texts that the model samples", 20, smoke=2, quick=3),
    "written": Option("texts that people could have written", 10, smoke=1, quick=2),
    "tokens": Option("length of the sampled texts", 16, smoke=2),
    "sweeps": Option("moves of every coordinate before the draw", 4, smoke=1),
}
KINDS = ("sampled", "written")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    run_benchmark(__file__, __doc__, OPTIONS, figures, tables, quick="fewer texts", argv=argv)


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rates of replay, the size of the noise, and the cost of a token."""
    conversion = convert(arguments.base)
    model, processor = conversion.model, conversion.processor
    texts: list[tuple[str, str, Any]] = [("written", *pair) for pair in WRITTEN[: arguments.written]]
    for seed in range(arguments.sampled):
        prompt = PROMPTS[seed % len(PROMPTS)]
        inputs = prompt_batch(processor, [prompt], model.device)
        options = {**inputs, **unprocessed(model), "max_new_tokens": arguments.tokens}
        ids = model.generate(**options, inference_mode="causal", individual=seed)
        texts.append(("sampled", prompt, ids[0, inputs["input_ids"].shape[1] :].tolist()))

    abductions: dict[str, list[Abduction]] = {kind: [] for kind in KINDS}
    replayed = dict.fromkeys(KINDS, 0)
    refused: list[str] = []
    for kind, prompt, text in watched(texts, "abducting"):
        try:
            abduction = abduct(model, processor, prompt, text, sweeps=arguments.sweeps)
        except AbductionError as error:
            refused.append(str(error))
            continue
        abductions[kind].append(abduction)
        replayed[kind] += replays(model, processor, prompt, abduction)

    counts = {kind: sum(one == kind for one, _, _ in texts) for kind in KINDS}
    everything = [abduction for kind in KINDS for abduction in abductions[kind]]
    return {
        **{f"{kind}_texts": counts[kind] for kind in KINDS},
        **{f"{kind}_replay_rate": replayed[kind] / counts[kind] for kind in KINDS},
        "first_replay_rate": statistics.mean(one.replayed for one in everything),
        "seconds_per_token": statistics.median(one.seconds_per_token for one in everything),
        **{f"{kind}_nearest_noise": nearest(abductions[kind]) for kind in KINDS},
        "largest_noise": max(
            float(person.path.abs().max()) for one in everything for person in one.individuals
        ),
        "sweeps": arguments.sweeps,
        "threads": torch.get_num_threads(),
        "refused": refused,
    }


def replays(model: Any, processor: Any, prompt: str, abduction: Abduction) -> bool:
    """Whether generate() says the observed tokens once more, from outside."""
    inputs = prompt_batch(processor, [prompt], model.device)
    options = {**inputs, **unprocessed(model), **abduction.settings, "max_new_tokens": len(abduction.tokens)}
    ids = model.generate(**options, inference_mode="causal", individual=abduction.individuals[0])
    said: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return said == abduction.tokens


def nearest(abductions: list[Abduction]) -> float:
    """Median over tokens of the root mean square of the smallest noise."""
    return statistics.median(token.nearest for one in abductions for token in one.diagnostics)


def tables(record: Record) -> list[Table]:
    """Both kinds of texts beside each other, and why texts were refused."""
    values = record.figures
    rows = [
        ("texts", *(str(values[f"{kind}_texts"]) for kind in KINDS)),
        (
            "explained by an individual that replays them",
            *(f"{values[f'{kind}_replay_rate']:.0%}" for kind in KINDS),
        ),
        (
            "smallest noise that explains a token, root mean square",
            *(f"{values[f'{kind}_nearest_noise']:.3f}" for kind in KINDS),
        ),
        ("seconds per token, of all", f"{values['seconds_per_token']:.2f}", ""),
    ]
    rows += [(f"refused: {reason}", "", "") for reason in values["refused"]]
    return [Table(f"Abduction with {values['sweeps']} sweeps", ("", *KINDS), rows)]


def headlines(record: Record) -> list[tuple[str, str]]:
    """Texts of both kinds together."""
    values = record.figures
    texts = sum(values[f"{kind}_texts"] for kind in KINDS)
    replayed = sum(values[f"{kind}_texts"] * values[f"{kind}_replay_rate"] for kind in KINDS)
    return [
        ("observed texts that an abducted individual replays token for token", f"{replayed:.0f} of {texts}")
    ]


if __name__ == "__main__":
    main()
