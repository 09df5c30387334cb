"""Counterfactuals: the same individual under another prompt, Y(t) = f(t; u).

Every text is generated alone, in ``causal`` mode, by the same noise; nothing is copied. So the null
intervention, the factual prompt once more, is the identity by computation. This module knows generate() and
text, not how noise is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from causal_qwen.generation.abduction import Abduction, Prompt, encode_prompt, unprocessed
from causal_qwen.individual import SEEDS, Individual

if TYPE_CHECKING:
    from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
    from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["Branch", "Counterfactual", "GeneratedNumber", "counterfactual", "edit_distance"]

OWN_OPTIONS = ("inference_mode", "return_dict_in_generate", "num_return_sequences", "num_beams", "streamer")


@dataclass(frozen=True)
class GeneratedNumber:
    """A number in a generated text.

    Args:
        position: Index of its token among the generated ones.
        value: What the individual says.
        lower: Lower end of the model's interval there.
        upper: Upper end.
    """

    position: int
    value: float
    lower: float
    upper: float


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
        """For JSON."""
        return {
            "prompt": self.prompt if isinstance(self.prompt, str) else [dict(turn) for turn in self.prompt],
            "text": self.text,
            "identical_to_factual": self.identical_to_factual,
            "edit_distance": self.edit_distance,
            "divergence": self.divergence,
            "numbers": [asdict(number) for number in self.numbers],
        }


@dataclass(frozen=True)
class Counterfactual:
    """What one individual says to several prompts, beside what another says to the factual one.

    Args:
        factual: The individual under the factual prompt.
        interventions: The same individual under each other prompt.
        control: Another individual under the factual prompt: how far texts differ by chance alone.
        individual: Who it is about.
    """

    factual: Branch
    interventions: tuple[Branch, ...]
    control: Branch
    individual: Individual

    def to_dict(self) -> dict[str, Any]:
        """For JSON: factual, interventions, control, and individual as `Individual.to_json` writes it."""
        return {
            "factual": self.factual.to_dict(),
            "interventions": [branch.to_dict() for branch in self.interventions],
            "control": self.control.to_dict() | {"individual": json.loads(self.control.individual.to_json())},
            "individual": json.loads(self.individual.to_json()),
        }


def counterfactual(
    model: CausalQwen2ForCausalLM,
    processor: CausalQwen2Processor,
    factual_prompt: Prompt,
    interventions: Sequence[Prompt] = (),
    individual: Individual | Abduction | int | None = None,
    *,
    max_new_tokens: int = 40,
    control: Individual | int | None = None,
    **options: Any,
) -> Counterfactual:
    """Y(t) = f(t; u) for every prompt t: one noise path ε moves each cause, loc_U(t) + T·κ·s(t)⊙ε.

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
        **options: For generate(): temperature, density_floor, persistence, noise_gain, processors, stopping
            criteria, … An individual with a path is replayed without logits processors, as it was abducted,
            unless they are asked for here.

    Raises:
        ValueError: If an option cannot be combined with counterfactuals, or a prompt is empty.
    """
    refused = [name for name in OWN_OPTIONS if name in options]
    if refused:
        raise ValueError(f"{refused[0]} cannot be given: each text is one causal path of one individual")
    if isinstance(individual, Abduction):
        options = individual.settings | options
        individual = individual.individuals[0]
    person = Individual.random() if individual is None else _person(individual)
    other = Individual((person.seed + 1) % SEEDS, person.persistence) if control is None else _person(control)
    options = {"do_sample": True, "max_new_tokens": max_new_tokens} | options
    if person.path is not None:
        options = unprocessed(model) | options  # the control too, so that it differs by its noise alone
    factual = _branch(model, processor, factual_prompt, person, options)
    branches = [_branch(model, processor, prompt, person, options) for prompt in interventions]
    redrawn = _branch(model, processor, factual_prompt, other, options)
    return Counterfactual(
        factual, tuple(_compared(branch, factual) for branch in branches), _compared(redrawn, factual), person
    )


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


def _person(given: Individual | int) -> Individual:
    return given if isinstance(given, Individual) else Individual(given)


def _branch(
    model: CausalQwen2ForCausalLM,
    processor: CausalQwen2Processor,
    prompt: Prompt,
    person: Individual,
    options: dict[str, Any],
) -> Branch:
    inputs: dict[str, Any] = {**encode_prompt(processor, prompt, model.device)}
    output = model.generate(
        **inputs, **options, inference_mode="causal", individual=person, return_dict_in_generate=True
    )
    start = inputs["input_ids"].shape[1]
    tokens = output.sequences[0, start:].cpu()  # (n,)
    none = torch.zeros(len(tokens), dtype=torch.float64)
    values, lower, upper = (
        none if column is None else column[0, start:].double().cpu()
        for column in (output.numeric_values, output.numeric_lower, output.numeric_upper)
    )
    numbers = tuple(
        GeneratedNumber(position, values[position].item(), lower[position].item(), upper[position].item())
        for position in torch.nonzero(tokens == processor.num_token_id).flatten().tolist()
    )
    spreads = (upper / 2 - lower / 2).tolist()  # halved first: both ends may be the largest float
    text = processor.decode(tokens.tolist(), values.tolist(), spreads=spreads, skip_special_tokens=True)
    return Branch(prompt, text, tuple(tokens.tolist()), numbers, person)


def _compared(branch: Branch, factual: Branch) -> Branch:
    """The branch with what sets it apart from the factual one."""
    said, told = _symbols(branch), _symbols(factual)
    first = next(
        (index for index, (one, two) in enumerate(zip(said, told, strict=False)) if one != two), None
    )
    if first is None and len(said) != len(told):
        first = min(len(said), len(told))
    return Branch(
        branch.prompt,
        branch.text,
        branch.token_ids,
        branch.numbers,
        branch.individual,
        identical_to_factual=first is None,
        divergence=first,
        edit_distance=edit_distance(said, told),
    )


def _symbols(branch: Branch) -> list[tuple[int, float]]:
    """Each generated token with its value, 0 where it has none."""
    values = {number.position: number.value for number in branch.numbers}
    return [(token, values.get(position, 0.0)) for position, token in enumerate(branch.token_ids)]
