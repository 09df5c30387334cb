"""Can observed texts be abducted, do they replay, and what does a token cost?

On the embedded base: texts that the model sampled itself, and texts that people could have written. A text
counts as replayed if generate() says its tokens again, all of them, with the individual that `abduct` found.

    python benchmarks/abduction.py
    python benchmarks/abduction.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch

from causal_qwen import convert
from causal_qwen.counterfactual.abduction import Abduction, AbductionError, abduct, encode_prompt, unprocessed
from measure import progress, show

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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="3 sampled and 2 written texts")
    parser.add_argument("--sweeps", type=int, default=4, help="moves of every coordinate before the draw")
    parser.add_argument("--tokens", type=int, default=16, help="length of the sampled texts")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args()
    sampled, written = (3, 2) if arguments.quick else (20, 10)

    conversion = convert("smollm2")
    model, processor = conversion.model, conversion.processor
    texts: list[tuple[str, str, Any]] = [("written", *pair) for pair in WRITTEN[:written]]
    for seed in range(sampled):
        prompt = PROMPTS[seed % len(PROMPTS)]
        inputs = encode_prompt(processor, prompt, model.device)
        options = {**inputs, **unprocessed(model), "max_new_tokens": arguments.tokens}
        ids = model.generate(**options, inference_mode="causal", individual=seed)
        texts.append(("sampled", prompt, ids[0, inputs["input_ids"].shape[1] :].tolist()))

    found: dict[str, list[Abduction]] = {"sampled": [], "written": []}
    refused: list[str] = []
    replayed = {"sampled": 0, "written": 0}
    for kind, prompt, text in progress(texts, "abducting"):
        try:
            result = abduct(model, processor, prompt, text, sweeps=arguments.sweeps)
        except AbductionError as error:
            refused.append(str(error))
            continue
        found[kind].append(result)
        replayed[kind] += replays(model, processor, prompt, result)

    counts = {kind: sum(one == kind for one, _, _ in texts) for kind in found}
    everything = found["sampled"] + found["written"]
    bound = max(float(person.path.abs().max()) for one in everything for person in one.individuals)
    report = {
        "sampled_texts": counts["sampled"],
        "written_texts": counts["written"],
        "sampled_replay_rate": replayed["sampled"] / counts["sampled"],
        "written_replay_rate": replayed["written"] / counts["written"],
        "first_replay_rate": statistics.mean(one.replayed for one in everything),
        "seconds_per_token": statistics.median(one.seconds_per_token for one in everything),
        "sampled_nearest_noise": nearest(found["sampled"]),
        "written_nearest_noise": nearest(found["written"]),
        "largest_noise": bound,
        "sweeps": arguments.sweeps,
        "threads": torch.get_num_threads(),
        "refused": refused,
    }
    if arguments.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return
    show(
        f"Abduction on the embedded base, {arguments.sweeps} sweeps",
        ("", "sampled", "written"),
        [
            ("texts", str(counts["sampled"]), str(counts["written"])),
            ("replayed", *(f"{report[f'{kind}_replay_rate']:.0%}" for kind in found)),
            ("smallest noise (rms)", *(f"{report[f'{kind}_nearest_noise']:.3f}" for kind in found)),
            ("seconds per token", *(f"{cost(found[kind]):.2f}" for kind in found)),
        ],
    )
    for reason in refused:
        print(f"refused: {reason}")


def replays(model: Any, processor: Any, prompt: str, found: Abduction) -> bool:
    """Whether generate() says the observed tokens, asked once more and from outside."""
    inputs = encode_prompt(processor, prompt, model.device)
    options = {**inputs, **unprocessed(model), **found.settings, "max_new_tokens": len(found.tokens)}
    ids = model.generate(**options, inference_mode="causal", individual=found.individuals[0])
    said: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return said == found.tokens


def nearest(results: list[Abduction]) -> float:
    """Median over tokens of the root mean square of the smallest noise."""
    return statistics.median(token.nearest for one in results for token in one.diagnostics)


def cost(results: list[Abduction]) -> float:
    """Median over texts of the seconds per token."""
    return statistics.median(one.seconds_per_token for one in results)


if __name__ == "__main__":
    main()
