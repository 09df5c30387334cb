"""One individual under several prompts: what stays, what changes, and against what it is held."""

import functools
import itertools
import json
import random

import pytest
import torch
from typer.testing import CliRunner

from causal_qwen import convert
from causal_qwen.cli import app
from causal_qwen.conversion import Base, bundled_text
from causal_qwen.counterfactual.interventions import counterfactual, edit_distance
from causal_qwen.individual import Individual
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from conftest import tiny_base, tiny_causal, tiny_tokenizer

KEYS = {"prompt", "text", "identical_to_factual", "edit_distance", "divergence", "numbers"}


@pytest.fixture(scope="module")
def converted():
    base = Base("tiny", tiny_base(tie_word_embeddings=True), tiny_tokenizer())
    return convert(base, calibration_text=bundled_text("heldout"))


@pytest.fixture(scope="module")
def writes_numbers(converted):
    """A model that often says <NUM>, with noise of a size that suits its random logits."""
    model = tiny_causal(noise_gain=0.02)
    with torch.no_grad():
        model.action.bias[258] += 8.0
        model.action.number_noise.fill_(0.1)
    return model, CausalQwen2Processor(converted.tokenizer, numbers="value")


@pytest.mark.parametrize("individual", [3, Individual(4, persistence=0.0), Individual(5, persistence=1.0)])
def test_the_null_intervention_is_the_identity(converted, individual):
    result = counterfactual(
        converted.model, converted.processor, "Hello", ["Hello"], individual, max_new_tokens=24
    )
    (null,) = result.interventions
    assert null.token_ids == result.factual.token_ids
    assert null.text == result.factual.text
    assert null.identical_to_factual
    assert null.divergence is None
    assert null.edit_distance == 0


def test_the_null_intervention_keeps_the_values(writes_numbers):
    model, processor = writes_numbers
    result = counterfactual(model, processor, "It cost 12.5 or", ["It cost 12.5 or"], 1, max_new_tokens=24)
    assert result.factual.numbers
    assert result.interventions[0].numbers == result.factual.numbers
    assert result.interventions[0].identical_to_factual
    for number in result.factual.numbers:
        assert result.factual.token_ids[number.position] == processor.num_token_id
        assert number.lower < number.upper


@pytest.mark.parametrize("individual", [3, Individual(4, persistence=1.0), Individual(5, world=6)])
def test_redrawn_noise_keeps_the_fact_and_gives_each_intervention_a_world_of_its_own(converted, individual):
    model, processor = converted.model, converted.processor
    result, kept = (
        counterfactual(model, processor, "Hello", ["Hello"] * 3, individual, max_new_tokens=24, noise=noise)
        for noise in ("redrawn", "kept")
    )
    assert result.factual.token_ids == kept.factual.token_ids
    assert all(branch.identical_to_factual for branch in kept.interventions)
    assert len({branch.token_ids for branch in (result.factual, *result.interventions)}) == 4
    first = 0 if result.individual.world is None else result.individual.world + 1
    assert [branch.individual.world for branch in result.interventions] == [first, first + 1, first + 2]
    fields = json.loads(json.dumps(result.to_dict()))
    assert fields["noise"] == "redrawn"
    assert [branch["world"] for branch in fields["interventions"]] == [first, first + 1, first + 2]
    for branch in result.interventions:  # who spoke, and where, is enough to repeat it
        person = Individual.from_json(branch.individual.to_json())
        again = counterfactual(model, processor, "Hello", [], person, max_new_tokens=24)
        assert again.factual.token_ids == branch.token_ids


def test_where_nothing_is_exogenous_redrawn_noise_is_kept_noise(writes_numbers):
    model, processor = writes_numbers
    noise = model.action.b_noise.data.clone(), model.action.number_noise.data.clone()
    prompt = "It cost 12.5 or"
    redraw = functools.partial(
        counterfactual, model, processor, prompt, [prompt], 1, max_new_tokens=24, noise="redrawn"
    )
    model.action.b_noise.data.zero_()
    try:
        (null,) = redraw().interventions
        values = [number.value for number in null.numbers]
        assert values != [number.value for number in redraw().factual.numbers]  # ε_Y is the world's
        model.action.number_noise.data.zero_()
        assert redraw().interventions[0].identical_to_factual
    finally:
        model.action.b_noise.data, model.action.number_noise.data = noise


def test_a_reading_that_does_not_exist_is_named(converted):
    with pytest.raises(ValueError, match="noise is 'lost'; choose one of kept, redrawn"):
        counterfactual(converted.model, converted.processor, "abc", noise="lost")


def test_another_value_in_the_prompt_is_an_intervention(writes_numbers):
    model, processor = writes_numbers
    result = counterfactual(model, processor, "It cost 12.5 or", ["It cost 99999 or"], 1, max_new_tokens=24)
    (branch,) = result.interventions
    assert not branch.identical_to_factual
    assert branch.edit_distance > 0


def test_each_text_is_what_generate_gives_alone(converted):
    """Another prompt, the same individual: nothing but generate() with that prompt and that individual."""
    model, processor = converted.model, converted.processor
    person = Individual(11)
    result = counterfactual(
        model, processor, "abc", ["xyz", "a longer prompt"], person, max_new_tokens=12, top_k=5
    )
    for branch in (result.factual, *result.interventions):
        inputs = processor(branch.prompt, return_tensors="pt")
        ids = model.generate(
            **inputs, inference_mode="causal", individual=person, max_new_tokens=12, top_k=5, do_sample=True
        )
        assert tuple(ids[0, inputs["input_ids"].shape[1] :].tolist()) == branch.token_ids
    assert not any(branch.identical_to_factual for branch in result.interventions)
    assert result.individual is person


def test_the_control_is_another_individual_under_the_same_prompt(converted):
    model, processor = converted.model, converted.processor
    result = counterfactual(model, processor, "abc", individual=2**64 - 1, max_new_tokens=12)
    assert result.control.prompt == "abc"
    assert result.control.individual.seed == 0
    assert not result.control.identical_to_factual
    assert result.control.divergence is not None
    chosen = counterfactual(model, processor, "abc", individual=7, control=7, max_new_tokens=12)
    assert chosen.control.identical_to_factual


def test_divergence_is_the_first_token_that_differs(converted):
    result = counterfactual(
        converted.model, converted.processor, "abc", ["abd", "abc "], 3, max_new_tokens=16, temperature=0.2
    )
    for branch in (*result.interventions, result.control):
        pairs = zip(branch.token_ids, result.factual.token_ids, strict=False)
        expected = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
        assert branch.divergence == expected
        assert branch.edit_distance == brute_force(branch.token_ids, result.factual.token_ids)


def test_chat_messages_are_prompts(converted):
    processor = CausalQwen2Processor(
        converted.tokenizer,
        numbers="text",
        chat_template="{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    )
    chat = [{"role": "user", "content": "Hi"}]
    result = counterfactual(converted.model, processor, chat, [chat, "Hi"], 3, max_new_tokens=8)
    assert [branch.identical_to_factual for branch in result.interventions] == [True, False]
    assert json.loads(json.dumps(result.to_dict()))["factual"]["prompt"] == chat


def test_json_has_the_promised_keys(writes_numbers):
    model, processor = writes_numbers
    result = counterfactual(model, processor, "It cost 12.5 or", ["Or"], 1, max_new_tokens=16)
    fields = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert set(fields) == {"factual", "interventions", "control", "individual"}
    assert set(fields["interventions"][0]) == KEYS
    assert set(fields["factual"]["numbers"][0]) == {"position", "value", "lower", "upper", "extrapolates"}
    again = Individual.from_json(json.dumps(fields["individual"]))
    assert again.seed == result.individual.seed == 1
    assert fields["control"]["individual"]["seed"] == 2


@pytest.mark.parametrize("option", ["inference_mode", "num_return_sequences", "num_beams"])
def test_options_that_would_break_the_comparison_are_refused(converted, option):
    with pytest.raises(ValueError, match=option):
        counterfactual(converted.model, converted.processor, "abc", **{option: 2})


def test_an_empty_prompt_is_refused(converted):
    with pytest.raises(ValueError, match="empty"):
        counterfactual(converted.model, converted.processor, "")


def test_edit_distance_against_brute_force():
    draw = random.Random(0)
    for _ in range(200):
        first, second = ([draw.randrange(3) for _ in range(draw.randrange(7))] for _ in range(2))
        assert edit_distance(first, second) == brute_force(first, second)
        assert edit_distance(second, first) == edit_distance(first, second)


def brute_force(first, second):
    """The textbook recursion on suffixes, with a full table: another direction, another shape."""
    table = {}
    for i, j in itertools.product(range(len(first), -1, -1), range(len(second), -1, -1)):
        if i == len(first) or j == len(second):
            table[i, j] = len(first) - i + len(second) - j
        elif first[i] == second[j]:
            table[i, j] = table[i + 1, j + 1]
        else:
            table[i, j] = 1 + min(table[i + 1, j + 1], table[i + 1, j], table[i, j + 1])
    return table[0, 0]


@pytest.fixture(scope="module")
def directory(converted, tmp_path_factory):
    return converted.save(tmp_path_factory.mktemp("counterfactual") / "model")


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["counterfactual", *map(str, arguments)])


def test_the_command_prints_json(directory):
    result = invoke(directory, "Hi", "--do", "Hi", "--do", "Ho", "--seed", 5, "--max-new-tokens", 8, "--json")
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert [branch["identical_to_factual"] for branch in fields["interventions"]] == [True, False]
    assert fields["individual"]["seed"] == 5


def test_the_command_redraws_noise(directory):
    arguments = [directory, "Hi", "--do", "Hi", "--seed", 5, "--max-new-tokens", 8, "--noise", "redrawn"]
    fields = json.loads(invoke(*arguments, "--json").stdout)
    assert fields["noise"] == "redrawn"
    assert fields["interventions"][0]["world"] == 0
    assert not fields["interventions"][0]["identical_to_factual"]
    kept = json.loads(invoke(*arguments[:-2], "--json").stdout)
    assert fields["factual"] == kept["factual"]
    assert "exogenous noise redrawn" in " ".join(invoke(*arguments).stdout.split())
    assert invoke(*arguments[:-1], "lost").exit_code == 2


def test_the_command_prints_a_table_and_the_seed(directory):
    result = invoke(directory, "Hi", "--do", "Ho", "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    assert "control" in result.stdout
    assert "Repeat with --seed" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_command_abducts_what_was_observed(directory):
    result = invoke(
        directory, "Hi", "--observed", " you", "--do", "Hi", "--seed", 5, "--max-new-tokens", 8, "--json"
    )
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields["factual"]["text"].startswith(" you")
    assert fields["interventions"][0]["identical_to_factual"]
    assert fields["individual"]["path_shape"] == [4, 33]
