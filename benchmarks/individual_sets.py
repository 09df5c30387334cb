"""Does it matter whom one asks? The variance of an average over n individuals, and distinct answers among n.

Sets of n are drawn again and again by each scheme, for each prompt: independent individuals, mirrored pairs,
and sets that are stratified by first token; beside them independent draws from softmax, and arithmetic
sampling (Vilnis et al. 2023: evenly spaced codes, one random shift, through the distribution function of
softmax). Each family is held against its own independent draws: a ratio of 1 is no gain. Once for the first
token, which is cheap, over many sets; and once for short texts. Intervals are of a bootstrap over prompts.

    python benchmarks/individual_sets.py            # first tokens and short texts: 15 minutes on a core
    python benchmarks/individual_sets.py --quick    # fewer sets of fewer prompts
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from causal_qwen import Cauchy, Individual
from causal_qwen.counterfactual.cohort import POOL, by_first_token, individuals, stratified
from causal_qwen.generation import Causes
from measure import BASE, Option, Record, Table, run_benchmark, watched
from writers import PROMPTS, Setting, Writers

Array = npt.NDArray[np.float64]
SOFTMAX = 0.7  # temperature of the softmax families
# Each scheme, and the one that it is held against.
SCHEMES = {
    "independent": "independent",
    "antithetic": "independent",
    "stratified": "independent",
    "softmax": "softmax",
    "arithmetic": "softmax",
}
STRANGERS = 1 << 20  # seeds of one set are this far from those of the next
CANDIDATES = (
    2048  # tokens among which a first token is looked for; the rest has a share of less than a per cent
)
LEAST_VARIANCE = 1e-12  # where all say the same
RESAMPLES = 2000
OPTIONS = {
    "base": BASE,
    "prompts": Option("prompts", 16, smoke=2, quick=8),
    "size": Option("individuals per set", 16, smoke=2),
    "sets": Option("sets per prompt and scheme, of first tokens", 24, smoke=4, quick=12),
    "text_prompts": Option("prompts of texts", 8, smoke=2, quick=4),
    "text_sets": Option("sets per prompt and scheme, of texts", 6, smoke=2, quick=4),
    "tokens": Option("tokens per text", 8, smoke=3, quick=6),
}
# What is averaged over a set of texts: their nats per token, and their length in characters.
Scores = dict[str, Array]  # (prompts, sets, individuals) each


def main(argv: Sequence[str] | None = None) -> None:
    """Draw sets, average over them, and compare."""
    run_benchmark(
        __file__, __doc__, OPTIONS, figures, tables, quick="fewer sets and prompts, shorter texts", argv=argv
    )  # fmt: skip


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios of variance and distinct answers of every scheme, of first tokens and of texts."""
    writers = Writers(arguments.base, PROMPTS[: arguments.prompts])
    causes = writers.causes()
    first = {
        scheme: first_tokens(writers, causes, scheme, arguments.size, arguments.sets)
        for scheme in watched(list(SCHEMES), "first tokens")
    }
    texts = {
        scheme: written(writers, causes, scheme, arguments) for scheme in watched(list(SCHEMES), "texts")
    }
    return {"first": compared(first), "texts": compared(texts)}


# Who is in a set --------------------------------------------------------------------------------------------


def people(
    writers: Writers, causes: Causes, prompt: int, scheme: str, size: int, index: int
) -> list[Individual]:
    """The set of one scheme; no two sets have anybody in common."""
    seed = STRANGERS * (index + 1000 * prompt + 1_000_000 * list(SCHEMES).index(scheme))
    if scheme != "stratified":
        return individuals(size, scheme, seed=seed)
    pool = individuals(size * POOL, seed=seed)
    noise, gain = noise_of(writers, pool), writers.model.config.noise_gain
    order = by_first_token(writers.model, causes.U[prompt : prompt + 1], noise, gain=gain)
    return [pool[place] for place in stratified(order, size, seed)]


def noise_of(writers: Writers, group: Sequence[Individual]) -> Tensor:
    """ε of the first token of each, (n, D)."""
    config = writers.model.config
    settings = {"density_floor": config.density_floor, "persistence": config.persistence}
    return torch.stack([one.noise(0, config.causal_size, **settings)[:-1] for one in group])


def codes(size: int, index: int) -> Array:
    """(i + v)/n: evenly spaced, with one random shift."""
    shift = np.random.default_rng(index).random()
    return (np.arange(size) + shift) / size


# What they say ----------------------------------------------------------------------------------------------


@torch.no_grad()
def first_tokens(writers: Writers, causes: Causes, scheme: str, size: int, sets: int) -> Scores:
    """The first token of everybody, its log-probability under the base, and whether it is the favourite."""
    logits = writers.model.token_logits(causes.U.loc).float()  # (P, V)
    said = np.zeros((len(logits), sets, size), dtype=np.int64)
    for prompt, index in itertools.product(range(len(logits)), range(sets)):
        if SCHEMES[scheme] == "softmax":
            prob = (logits[prompt] / SOFTMAX).double().softmax(-1)
            generator = torch.Generator().manual_seed(1000 * prompt + index)
            uniform = (
                torch.from_numpy(codes(size, 1000 * prompt + index))
                if scheme == "arithmetic"
                else torch.rand(size, dtype=torch.float64, generator=generator)
            )
            said[prompt, index] = torch.searchsorted(prob.cumsum(0), uniform).clamp(max=len(prob) - 1).numpy()
        else:
            group = people(writers, causes, prompt, scheme, size, index)
            said[prompt, index] = decided(writers, causes.U[prompt], logits[prompt], group)
    logprob = logits.log_softmax(-1).numpy()
    return {
        "answers": said.astype(np.float64),
        "log-probability of the first token": np.stack(
            [row[ids] for row, ids in zip(logprob, said, strict=True)]
        ),
        "share of the favourite": (said == logits.argmax(-1).numpy()[:, None, None]).astype(np.float64),
    }


def decided(writers: Writers, U: Cauchy, logits: Tensor, group: Sequence[Individual]) -> Array:
    """argmax_k W_k·u + b_k among the likeliest tokens, (n,)."""
    model = writers.model
    moves = noise_of(writers, group) * (U.scale + model.action.b_noise.abs())  # (n, D)
    best, tokens = logits.topk(min(CANDIDATES, len(logits)))
    scores = best + model.config.noise_gain * moves @ model.lm_head.weight[tokens].float().T  # (n, K)
    return tokens[scores.argmax(-1)].numpy().astype(np.float64)


def written(writers: Writers, causes: Causes, scheme: str, arguments: argparse.Namespace) -> Scores:
    """Nats and length of short texts, and the texts themselves by number."""
    prompts, sets, size = arguments.text_prompts, arguments.text_sets, arguments.size
    rows, code = [], []
    for prompt, index in itertools.product(range(prompts), range(sets)):
        if SCHEMES[scheme] == "softmax":
            rows += [(prompt, 1000 * prompt + index)] * size
            code += list(codes(size, 1000 * prompt + index))
        else:
            rows += [(prompt, one) for one in people(writers, causes, prompt, scheme, size, index)]
    family = "individual" if SCHEMES[scheme] == "independent" else scheme
    setting = Setting(family, 1.0 if family == "individual" else SOFTMAX, codes=tuple(code))
    texts = writers.write(setting, rows, arguments.tokens)
    shape = (prompts, sets, size)
    spoken = writers.texts(texts.ids)
    number = {text: float(index) for index, text in enumerate(dict.fromkeys(spoken))}
    return {
        "answers": np.array([number[text] for text in spoken]).reshape(shape),
        "nats per token": texts.nats.mean(-1).double().numpy().reshape(shape),
        "characters": np.array([float(len(text)) for text in spoken]).reshape(shape),
    }


# What is compared -------------------------------------------------------------------------------------------


def compared(scores: dict[str, Scores]) -> dict[str, Any]:
    """Of each scheme: the variance of a set's mean over that of as many independent draws, and how many
    different answers a set has.
    """
    return {
        scheme: {
            "distinct": interval(distinct(own["answers"]), lambda rows: float(rows.mean())),
            **{
                name: interval(
                    np.stack(
                        [values.mean(-1).var(-1, ddof=1), single(scores[SCHEMES[scheme]][name])], axis=1
                    ),
                    lambda rows: float(rows[:, 0].sum() / max(rows[:, 1].sum(), LEAST_VARIANCE)),
                )
                for name, values in own.items()
                if name != "answers"
            },
        }
        for scheme, own in scores.items()
    }


def single(values: Array) -> Array:
    """The variance of a mean of n independent draws by all draws of each prompt, (prompts,)."""
    prompts, _, size = values.shape
    return values.reshape(prompts, -1).var(-1, ddof=1) / size


def distinct(answers: Array) -> Array:
    """Different answers per set, mean over the sets of each prompt, (prompts,)."""
    return np.array([np.mean([len(set(group)) for group in sets.tolist()]) for sets in answers])


def interval(rows: Array, statistic: Callable[[Array], float]) -> list[float]:
    """The statistic of rows (prompts, …), and the ends of its 95% interval: prompts drawn again."""
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(rows), size=(RESAMPLES, len(rows)))
    low, high = np.quantile([statistic(rows[which]) for which in drawn], (0.025, 0.975))
    return [statistic(rows), float(low), float(high)]


def tables(record: Record) -> list[Table]:
    """First tokens, then texts: one row per scheme."""
    options = record.options
    titles = {
        "first": f"First tokens: {options['sets']} sets of {options['size']} after each of "
        f"{options['prompts']} prompts",
        "texts": f"Texts of {options['tokens']} tokens: {options['text_sets']} sets of {options['size']} "
        f"after each of {options['text_prompts']} prompts",
    }
    shown = []
    for part, title in titles.items():
        schemes = record.figures[part]
        names = [name for name in schemes["independent"] if name != "distinct"]
        rows = [
            (
                scheme if against == scheme else f"{scheme}, against {against}",
                "{:.2f} ({:.2f}–{:.2f})".format(*schemes[scheme]["distinct"]),
                *("{:.2f} ({:.2f}–{:.2f})".format(*schemes[scheme][name]) for name in names),
            )
            for scheme, against in SCHEMES.items()
        ]
        columns = ("scheme", "distinct answers", *(f"variance, {name}" for name in names))
        shown.append(Table(f"{title}; in parentheses 95% intervals", columns, rows))
    return shown


if __name__ == "__main__":
    main()
