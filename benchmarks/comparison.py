"""How many samples does a comparison on the same individuals save, against strangers and Gumbel noise?

On the embedded base: (i) float32 against int4, (ii) the base against a copy that was fine-tuned on the
texts of scikit-learn's data sets, (iii) two wordings of a question. Every prompt has individuals of its own,
who answer on both sides; the figure is Var(A − B)/(Var A + Var B) within prompts, 1 for strangers, with a
bootstrap interval. The base comes from 4 bits, so its int4 *is* its float32 to the last bits; (i) is
therefore also measured for the same function with its weights moved off that grid, at int8 too, on fewer
individuals. Training calibrates the gain κ again: "equal noise" is the copy at the temperature at which
noise moves its causes as far as the base's (``compare --noise equal``).
"independent" pairs each individual of A with the next one of B, from the same texts. What the intervals hold
is measured by comparison_coverage.py.

    python benchmarks/comparison.py                    # hours on one core; --work keeps what was generated
    python benchmarks/comparison.py --quick --json     # a few individuals and tokens, to see that it runs
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from causal_qwen.conversion import load_model
from causal_qwen.counterfactual.comparison import Judge, Said
from causal_qwen.counterfactual.comparison.scores import PLAIN
from causal_qwen.counterfactual.comparison.speakers import CausalTalker, speak
from causal_qwen.counterfactual.comparison.statistics import Estimate, estimate, known, mean_difference
from causal_qwen.decoder import Engine
from causal_qwen.individual import Individual
from causal_qwen.prompting import Settings, Speaker
from causal_qwen.training import TrainingRecipe, train
from measure import BASE, Option, Record, Table, run_benchmark, watched

TOPICS = (
    "a volcano", "inflation", "a violin", "the moon", "photosynthesis", "a passport", "bread", "democracy",
    "a computer virus", "the Roman Empire",
)  # fmt: skip
WORDINGS = ("Question: What is {}?\nAnswer:", "Question: Please explain {}.\nAnswer:")
SCORES = {"nats": "nats under the base", "distinct": "distinct tokens", "length": "characters"}
COMPARISONS = {
    "grid": "float32 against int4, as embedded",
    "int4": "float32 against int4, off the grid",
    "int8": "float32 against int8, off the grid",
    "tuned": "base against a fine-tuned copy",
    "wording": "two wordings of a question",
}
GUMBEL, COOLER, DEFAULT = "gumbel", "gumbel@0.7", "0.2"
EQUAL = "="  # behind individuals: the other side's noise is made equal
FEWER = 40  # individuals off the grid
SEEDS_APART = 1_000_000  # first individuals of neighbouring prompts
BLOCK = 40  # individuals whose texts are made together and kept in one file; native code takes up to 48
OPTIONS = {
    "base": BASE,
    "individuals": Option("who answer every prompt", 200, smoke=3, quick=6),
    "prompts": Option("questions", len(TOPICS), smoke=2, quick=3),
    "tokens": Option("per text", 24, smoke=4, quick=8),
    "persistences": Option("of individuals", (0.2, 0.5), smoke=(0.2,), quick=(0.2,)),
    "steps": Option("of fine-tuning", 60, smoke=1, quick=2),
    "work": Option("directory that keeps texts and the fine-tuned copy", "", smoke=""),
}


def figures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Estimates of every score for every comparison and coupling."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(arguments.work or temporary)
        work.mkdir(parents=True, exist_ok=True)
        texts = Texts(arguments, work)
        # Softmax at T = 1 has far more nats than individuals as they come; at 0.7 about as many.
        people = [str(rho) for rho in arguments.persistences]
        every = [*people, GUMBEL, COOLER]
        # Persistence matters where texts drift apart; elsewhere the default will do.
        couplings = {name: [DEFAULT, GUMBEL] for name in COMPARISONS} | {
            "tuned": [*people, *(who + EQUAL for who in people), GUMBEL, COOLER]
        }
        tasks = [
            (start, side, coupling)
            for start in range(0, arguments.individuals, BLOCK)
            for side in ("base", *COMPARISONS)
            for coupling in couplings.get(side, every)
            if start < texts.asked(side)
        ]
        for start, side, coupling in watched(tasks, "texts"):
            texts.block(side, coupling, start)
        compared = {
            name: {
                coupling: {score: _figures(texts, name, coupling, score) for score in SCORES}
                for coupling in couplings[name]
            }
            for name in COMPARISONS
        }
        strangers = {
            name: {score: _figures(texts, name, DEFAULT, score, shift=1) for score in SCORES}
            for name in COMPARISONS
        }
    return {"compared": compared, "independent": strangers}


def _figures(texts: Texts, name: str, coupling: str, score: str, *, shift: int = 0) -> dict[str, Any]:
    other = texts.scores(name, coupling, score)
    one = texts.scores("base", coupling.removesuffix(EQUAL), score)[: len(other)]
    found = estimate(one, np.roll(other, -shift, axis=0), seen=one.size, level=0.95)
    errors = {
        f"mean_{side}_error": known(mean_difference(scores, crossed=False).error)
        for side, scores in (("a", one), ("b", other))
    }
    return {name: getattr(found, name) for name in KEPT} | errors


KEPT = [
    "difference", "lower", "upper", "correlation", "correlation_lower", "correlation_upper", "variance_ratio",
    "variance_ratio_lower", "variance_ratio_upper", "design_effect", "samples_saved_share", "pairs", "mean_a",
    "mean_b",
]  # fmt: skip
assert set(KEPT) <= set(Estimate.__annotations__)


class Texts:
    """Texts and their scores by side, coupling and individual; made once and kept in files."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.arguments, self.work = arguments, work
        self.base = functools.cache(lambda: _speaker(*load_model(arguments.base, dtype="float32")))
        self.judge = functools.cache(lambda: Judge(self.base()))

    def block(self, side: str, coupling: str, start: int) -> dict[str, list[list[float]]]:
        """Scores (individuals of the block, prompts) by name."""
        asked, count = self.arguments, min(BLOCK, self.arguments.individuals - start)
        file = self.work / f"{side}-{coupling}-{start:03}-{count}-{asked.prompts}-{asked.tokens}.json"
        if file.is_file():
            kept: dict[str, list[list[float]]] = json.loads(file.read_text(encoding="utf-8"))["scores"]
            return kept
        speaker, wording = SIDES[side](self)
        prompts = [wording.format(topic) for topic in TOPICS[: asked.prompts]]
        who, temperature = _parts(coupling)
        if coupling.endswith(EQUAL):
            widths = [CausalTalker(one).noise_width(prompts) for one in (self.base(), speaker)]
            temperature = widths[0] / widths[1]
        law: dict[str, Any] = (
            {"mode": "compatible", "sample": True}
            if who == GUMBEL
            else {"mode": "causal", "persistence": float(who)}
        )
        settings = Settings(max_new_tokens=asked.tokens, top_k=0, temperature=temperature, **law)
        columns: dict[str, list[list[float]]] = {score: [] for score in SCORES}
        kept_texts = []
        for number, prompt in enumerate(prompts):
            people = [Individual(number * SEEDS_APART + start + index) for index in range(count)]
            answers = speak(speaker, [prompt] * count, settings, people)
            said = [
                Said(prompt, answer, side, person.seed)
                for answer, person in zip(answers, people, strict=True)
            ]
            columns["nats"].append(self.judge()(said))
            for score in ("distinct", "length"):
                columns[score].append([PLAIN[score](one) for one in said])
            kept_texts.append([answer.text for answer in answers])
        scores = {score: np.array(rows).T.tolist() for score, rows in columns.items()}
        part = file.with_suffix(".part")
        part.write_text(
            json.dumps({"scores": scores, "texts": kept_texts}, ensure_ascii=False), encoding="utf-8"
        )
        part.replace(file)
        return scores

    def scores(self, side: str, coupling: str, score: str) -> Any:
        """(individuals, prompts)."""
        blocks = range(0, self.asked(side), BLOCK)
        return np.concatenate([np.array(self.block(side, coupling, start)[score]) for start in blocks])

    def asked(self, side: str) -> int:
        """How many individuals answer on a side."""
        asked: int = self.arguments.individuals
        return min(asked, FEWER) if side in ("int4", "int8") else asked

    @functools.cached_property
    def grid(self) -> Speaker:
        """The base at four bits, which it comes from."""
        model, processor = load_model(self.arguments.base, dtype="float32")
        return _speaker(model, processor, "int4")

    @functools.cached_property
    def int4(self) -> Speaker:
        """The same function with its weights off the grid, at four bits."""
        return _speaker(*self.moved, "int4")

    @functools.cached_property
    def int8(self) -> Speaker:
        """The same at eight bits."""
        return _speaker(*self.moved, "int8")

    @functools.cached_property
    def moved(self) -> tuple[Any, Any]:
        """The base with every weight off the grid, and the same function."""
        model, processor = load_model(self.arguments.base, dtype="float32")
        leave_the_grid(model)
        return model, processor

    @functools.cached_property
    def tuned(self) -> Speaker:
        """A copy of the base, trained on running text as in examples/configs/words.yaml."""
        output = self.work / "tuned"
        if not output.is_dir():
            fields = {
                "model": self.arguments.base, "data": "package:sklearn/datasets/descr/*.rst",
                "output": str(output), "max_length": 96, "batch_size": 2, "max_steps": self.arguments.steps,
                "group_by_length": True, "bf16": True, "learning_rate": 1e-4, "ovr_gradient_bound": 0.2,
                "hold": ["embed_tokens", "abduction.scale", "abduction.common_scale", "action.balance"],
                "max_grad_norm": 0, "refit_words": True, "validation_fraction": 0.05,
                "calibration_fraction": 0.1, "save_steps": 0, "seed": 0,
            }  # fmt: skip
            train(TrainingRecipe.from_mapping(fields))
        return _speaker(*load_model(output, dtype="float32"))


SIDES: dict[str, Callable[[Texts], tuple[Speaker, str]]] = {
    "base": lambda texts: (texts.base(), WORDINGS[0]),
    "tuned": lambda texts: (texts.tuned, WORDINGS[0]),
    "wording": lambda texts: (texts.base(), WORDINGS[1]),
    "int4": lambda texts: (texts.int4, WORDINGS[0]),
    "int8": lambda texts: (texts.int8, WORDINGS[0]),
    "grid": lambda texts: (texts.grid, WORDINGS[0]),
}


def _speaker(model: Any, processor: Any, precision: Any = "float32") -> Speaker:
    return Speaker(model, processor, Engine.from_model(model, precision=precision))


@torch.no_grad()
def leave_the_grid(model: Any) -> None:
    """Scale channels and undo it where they are read: the function stays, to rounding, and no weight does."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    width = config.hidden_size // config.num_attention_heads
    shared = config.num_attention_heads // config.num_key_value_heads

    def scales(count: int) -> Any:
        return torch.exp(0.3 * torch.randn(count, generator=generator))

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            scale = scales(config.hidden_size)
            norm.weight *= scale
            for reader in readers:
                reader.weight /= scale
        scale = scales(config.num_key_value_heads * width)
        attention.v_proj.weight *= scale[:, None]
        if attention.v_proj.bias is not None:
            attention.v_proj.bias *= scale
        attention.o_proj.weight /= scale.view(-1, 1, width).expand(-1, shared, width).flatten()
        scale = scales(config.intermediate_size)
        mlp.up_proj.weight *= scale[:, None]
        mlp.down_proj.weight /= scale


def tables(record: Record) -> list[Table]:
    """One table of variance ratios per comparison."""
    shown = []
    for name, title in COMPARISONS.items():
        rows = [
            (_coupling(coupling), *_row(scores))
            for coupling, scores in record.figures["compared"][name].items()
        ]
        strangers = record.figures["independent"][name]
        rows.append(("independent", *_row(strangers)))
        columns: tuple[str, ...] = (
            "coupling",
            "nats of A and of B, ± 1.96 s.e.",
            *(f"ratio, {name}" for name in SCORES.values()),
        )
        pairs = strangers["nats"]["pairs"]
        shown.append(Table(f"Variance ratio over {pairs:,} pairs: {title}", columns, rows))
    return shown


def headlines(record: Record) -> list[tuple[str, str]]:
    """What pairs are worth where texts drift apart."""
    tuned = record.figures["compared"]["tuned"]
    shown = [DEFAULT, f"0.5{EQUAL}", GUMBEL]
    label = "; ".join(_coupling(coupling) for coupling in shown)
    first = "variance of a difference in characters against strangers', base and fine-tuned copy: " + label
    return [
        (what, "; ".join(_interval(tuned[coupling][score]) for coupling in shown))
        for what, score in ((first, "length"), ("the same of a difference in nats", "nats"))
    ]


def _parts(coupling: str) -> tuple[str, float]:
    """Who draws, and the temperature: "0.5@2" are individuals with ρ = 0.5 at T = 2."""
    who, _, temperature = coupling.removesuffix(EQUAL).partition("@")
    return who, float(temperature or 1.0)


def _coupling(name: str) -> str:
    who, temperature = _parts(name)
    if who == GUMBEL:
        return f"Gumbel, T = {temperature:g}"
    return f"individual, ρ = {float(who):g}{', equal noise' if name.endswith(EQUAL) else ''}"


def _row(scores: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """Mean nats of both sides, and the variance ratio of each score."""
    nats = scores["nats"]
    means = [
        f"{nats[f'mean_{side}']:.2f} ± {1.96 * (nats[f'mean_{side}_error'] or 0.0):.2f}" for side in "ab"
    ]
    return ", ".join(means), *(_interval(scores[score]) for score in SCORES)


def _interval(found: dict[str, Any]) -> str:
    ends = [found[f"variance_ratio{end}"] for end in ("", "_lower", "_upper")]
    if None in ends:
        return "–"
    return "{:.2f} ({:.2f}–{:.2f})".format(*ends)


def main(argv: list[str] | None = None) -> None:
    """Run it."""
    run_benchmark(
        __file__, __doc__, OPTIONS, figures, tables, quick="a few individuals, prompts and tokens", argv=argv
    )


if __name__ == "__main__":
    main()
