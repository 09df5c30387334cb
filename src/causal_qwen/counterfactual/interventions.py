"""Counterfactuals: the same individual under another prompt, Y(t) = f(t; u).

Every text is generated alone, in ``causal`` mode; nothing is copied. "The same" has two readings: all noise
is kept, and the null intervention, the factual prompt once more, is the identity by computation; or the
individual is kept and the exogenous noise redrawn, and it is equal in law. This module knows generate() and
text, not how noise is drawn.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from causal_qwen.causal_lm import CausalLM
from causal_qwen.counterfactual.abduction import Abduction, Noise
from causal_qwen.data import Prompt, prompt_batch
from causal_qwen.generation.decoding import GeneratedNumber
from causal_qwen.individual import SEEDS, Individual, one_per_row
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = [
    "Branch",
    "Counterfactual",
    "check_prompts",
    "compared",
    "counterfactual",
    "edit_distance",
]

# What switches off the processors that a generation config may ask for.
NEUTRAL = {
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}
REPLAYED = 1e-3  # relative: a number that is so near to the observed one is that one
OWN_OPTIONS = ("inference_mode", "return_dict_in_generate", "num_return_sequences", "num_beams", "streamer")


@dataclass(frozen=True)
class Branch:
    """One text, compared with the factual one; another value at a number is another token.

    Args:
        prompt: What was asked.
        text: What was generated, without the prompt.
        token_ids: The generated ids.
        numbers: The generated numbers.
        individual: Who spoke.
        identical_to_factual: Whether all tokens and values are the factual ones.
        divergence: Index of the first generated token that differs; None if none does.
        edit_distance: Insertions, deletions and substitutions between the generated tokens.
    """

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    numbers: tuple[GeneratedNumber, ...]
    individual: Individual
    identical_to_factual: bool = True
    divergence: int | None = None
    edit_distance: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON; with ``world`` where the individual is in one."""
        world = self.individual.world
        return {
            "prompt": self.prompt if isinstance(self.prompt, str) else [dict(turn) for turn in self.prompt],
            "text": self.text,
            "identical_to_factual": self.identical_to_factual,
            "edit_distance": self.edit_distance,
            "divergence": self.divergence,
            "numbers": [asdict(number) for number in self.numbers],
        } | ({} if world is None else {"world": world})


@dataclass(frozen=True)
class Counterfactual:
    """What one individual says to several prompts, beside what another says to the factual one.

    Args:
        factual: The individual under the factual prompt.
        interventions: The same individual under each other prompt; where noise is redrawn, each in a world of
            its own.
        control: Another individual under the factual prompt: how far texts differ by chance alone.
        individual: Who it is about.
        noise: What was kept of them: "kept", everything, or "redrawn", all but the exogenous noise.
    """

    factual: Branch
    interventions: tuple[Branch, ...]
    control: Branch
    individual: Individual
    noise: Noise = "kept"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: factual, interventions, control, and individual as `Individual.to_json` writes it; and
        ``noise`` where it was redrawn.
        """
        return {
            "factual": self.factual.to_dict(),
            "interventions": [branch.to_dict() for branch in self.interventions],
            "control": self.control.to_dict() | {"individual": json.loads(self.control.individual.to_json())},
            "individual": json.loads(self.individual.to_json()),
        } | ({} if self.noise == "kept" else {"noise": self.noise})


def counterfactual(
    model: CausalLM,
    processor: CausalQwen2Processor,
    factual_prompt: Prompt,
    interventions: Sequence[Prompt] = (),
    individual: Individual | Abduction | int | None = None,
    *,
    max_new_tokens: int = 40,
    control: Individual | int | None = None,
    noise: Noise = "kept",
    **options: Any,
) -> Counterfactual:
    """Y(t) = f(t; u) for every prompt t, with u = loc_U(t) + T·κ·(scale_U(t)⊙ε + |b_noise|⊙ε').

    ``noise`` says what an intervention keeps. "kept": ε' = ε, all noise is the individual's (Pearl's
    counterfactual), and the null intervention is the identity. "redrawn": scale_U⊙ε is the individual's, and
    |b_noise|⊙ε' the world's, drawn anew for each intervention; so is the read-out noise of numbers. Then the
    null intervention equals the factual text in law, not in value.

    Each prompt is generated alone, with batch size 1: rows of a batch would agree only up to the rounding of
    their products, and a tie decided by rounding would break the identity of the null intervention.

    Args:
        model: Who infers and acts.
        processor: Reads prompts and writes texts.
        factual_prompt: Text, or chat messages.
        interventions: Other prompts for the same individual; the factual one among them is the null
            intervention.
        individual: An `Individual`, a seed, or an `Abduction`, whose first individual is replayed with its
            settings. Somebody by default.
        max_new_tokens: Length of each text, at most.
        control: Another individual, or a seed; the next seed by default.
        noise: "kept" or "redrawn".
        **options: For generate(): temperature, density_floor, persistence, noise_gain, processors, stopping
            criteria, … An individual with a path is replayed without logits processors, as it was abducted,
            unless they are asked for here.

    Raises:
        ValueError: If an option cannot be combined with counterfactuals, or a prompt is empty.
    """
    refused = [name for name in OWN_OPTIONS if name in options]
    if refused:
        raise ValueError(f"{refused[0]} cannot be given: each text is one causal path of one individual")
    check_prompts(interventions)
    if noise not in get_args(Noise):
        raise ValueError(f"noise is {noise!r:.80}; choose one of {', '.join(get_args(Noise))}")
    observed: Sequence[float] = ()
    if isinstance(individual, Abduction):
        options, observed = individual.settings | options, individual.values
        individual = individual.individuals[0]
    (person,) = one_per_row(individual, 1)
    after = Individual((person.seed + 1) % SEEDS, person.persistence, world=person.world)
    (other,) = one_per_row(after if control is None else control, 1)
    options = {"do_sample": True, "max_new_tokens": max_new_tokens} | options
    if person.path is not None:
        options = unprocessed(model) | options  # the control too, so that it differs by its noise alone
    factual = _branch(model, processor, factual_prompt, person, options, observed)
    branches, same = [], person
    for prompt in interventions:
        same = same.redrawn() if noise == "redrawn" else same
        branches.append(compared(_branch(model, processor, prompt, same, options, observed), factual))
    chance = compared(_branch(model, processor, factual_prompt, other, options), factual)
    return Counterfactual(factual, tuple(branches), chance, person, noise)


def check_prompts(interventions: Any) -> None:
    """Refuse one prompt where several are meant.

    Raises:
        ValueError: If it is a text, or the messages of one chat.
    """
    if isinstance(interventions, str) or any(isinstance(one, Mapping) for one in interventions):
        raise ValueError("interventions are several prompts; give a list, also of a single one")


def edit_distance(first: Sequence[object], second: Sequence[object]) -> int:
    """Levenshtein: the least number of insertions, deletions and substitutions between two sequences.

    d(i, j) = min(d(i−1, j) + 1, d(i, j−1) + 1, d(i−1, j−1) + [a_i ≠ b_j]); only two rows of d exist.
    """
    above = list(range(len(second) + 1))
    for row, one in enumerate(first, start=1):
        current = [row]
        for column, other in enumerate(second, start=1):
            current.append(min(above[column] + 1, current[-1] + 1, above[column - 1] + (one != other)))
        above = current
    return above[-1]


def unprocessed(model: CausalLM) -> dict[str, Any]:
    """Options of generate() under which no logits processor runs, whatever the generation config says."""
    configured = {name: getattr(model.generation_config, name, None) for name in NEUTRAL}
    return {"do_sample": True, "top_k": 0} | {
        name: NEUTRAL[name] for name, value in configured.items() if value not in (None, NEUTRAL[name])
    }


def _branch(
    model: CausalLM,
    processor: CausalQwen2Processor,
    prompt: Prompt,
    person: Individual,
    options: dict[str, Any],
    observed: Sequence[float] = (),
) -> Branch:
    """One text; numbers that were observed are written as they were, not as an interval would round them."""
    inputs: dict[str, Any] = {**prompt_batch(processor, [prompt], model.device)}
    output = model.generate(
        **inputs, **options, inference_mode="causal", individual=person, return_dict_in_generate=True
    )
    said = output.after(inputs["input_ids"].shape[1])
    columns = [said.numeric_values, said.numeric_lower, said.numeric_upper]
    if any(observed) and None not in columns:
        columns = [column.clone() for column in columns]
        for position, value in enumerate(observed[: said.sequences.shape[1]]):
            is_number = said.sequences[0, position] == processor.num_token_id
            if is_number and math.isclose(float(said.numeric_values[0, position]), value, rel_tol=REPLAYED):
                for column in columns:
                    column[0, position] = value
    values, lower, upper = columns
    (text,) = processor.batch_decode(
        said.sequences, values, numeric_lower=lower, numeric_upper=upper, skip_special_tokens=True
    )
    tokens = tuple(said.sequences[0].tolist())
    return Branch(prompt, text, tokens, said.numbers(processor.num_token_id), person)


def compared(branch: Branch, factual: Branch) -> Branch:
    """The branch with what sets it apart from the factual one: another value at a number is another token."""
    ours, theirs = _symbols(branch), _symbols(factual)
    pairs = itertools.zip_longest(ours, theirs)
    first = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
    distance = edit_distance(ours, theirs)
    return replace(branch, identical_to_factual=first is None, divergence=first, edit_distance=distance)


def _symbols(branch: Branch) -> list[tuple[int, float]]:
    """Each generated token with its value, 0 where it has none."""
    values = {number.position: number.value for number in branch.numbers}
    return [(token, values.get(position, 0.0)) for position, token in enumerate(branch.token_ids)]
