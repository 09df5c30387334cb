"""Texts that are continued together are what generate() makes of each alone, bit for bit."""

import pytest
import torch

from causal_qwen import Individual
from causal_qwen.decoder import Engine
from causal_qwen.generation.batching import NativeBatch, SingleBatch, prepared
from conftest import tiny_causal

NEW = 12
NUM = 258
# Each text has settings of its own.
SETTINGS = [
    {"inference_mode": "causal", "individual": 1, "top_k": 0},
    {"inference_mode": "causal", "individual": 2, "top_k": 5},
    {"inference_mode": "causal", "individual": 3, "top_p": 0.7, "temperature": 0.5},
    {"inference_mode": "causal", "individual": Individual(4, 0.9, 3), "repetition_penalty": 1.3},
    {"inference_mode": "standard", "do_sample": False},
    {"inference_mode": "standard", "do_sample": False, "repetition_penalty": 1.2},
    {"inference_mode": "standard", "do_sample": True, "individual": 5, "top_k": 0},
    {"inference_mode": "standard", "do_sample": True, "individual": 6, "top_k": 4},
    {"inference_mode": "compatible", "do_sample": False},
    {"inference_mode": "compatible", "do_sample": False, "normalisation": "ovr"},
    {"inference_mode": "causal", "individual": 1, "top_k": 0},
]


@pytest.fixture(scope="module")
def model():
    """Says numbers often; no token ends a text."""
    model = tiny_causal(noise_gain=0.02, value_center=3.0, value_spread=0.3)
    with torch.no_grad():
        model.action.bias[NUM] += 6.0
        model.action.number_noise.fill_(0.05)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def engine(model, request, one_thread):
    return Engine.from_model(model, precision=request.param)


def prompt(index):
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, 256, (1, 3 + 17 * index % 60), generator=generator)
    values = torch.zeros(ids.shape, dtype=torch.float64)
    if index % 2:
        ids[0, 1], values[0, 1] = NUM, 12.5 * index
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "numeric_values": values}


def alone(model, engine, index):
    output = model.generate(
        **prompt(index), **SETTINGS[index], engine=engine, max_new_tokens=NEW, return_dict_in_generate=True
    )
    return output.sequences, output.numeric_values, output.numeric_lower, output.numeric_extrapolates


def same(text, expected):
    sequences, values, lower, extrapolates = expected
    assert torch.equal(text.texts.ids, sequences)
    for mine, theirs in zip(
        (*text.texts.numbers[:2], text.texts.extrapolates), (values, lower, extrapolates), strict=True
    ):
        assert (mine is None and theirs is None) or torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


def run(batch, texts, joins):
    """Each text joins before a given step and leaves with its last token."""
    waiting, running, done, step = sorted(zip(joins, range(len(texts)), strict=True)), 0, {}, 0
    while waiting or running:
        while waiting and waiting[0][0] <= step and running < batch.size:
            batch.join(texts[waiting.pop(0)[1]])
            running += 1
        for text, inference in batch.step():
            assert len(inference.tokens) == 1
            if text.position == NEW:
                batch.leave(text)
                running -= 1
                done[id(text)] = step
        step += 1
    return done


def test_together_as_alone(model, engine):
    everybody = range(len(SETTINGS))
    texts = [prepared(model, prompt(i), SETTINGS[i], max_new_tokens=NEW) for i in everybody]
    run(NativeBatch(model, engine, 6), texts, joins=[0, 0, 3, 1, 5, 5, 6, 9, 2, 4, 14])
    for index, text in enumerate(texts):
        same(text, alone(model, engine, index))
    assert any(text.texts.numbers[0] is not None for text in texts)


def test_a_token_drawn_by_softmax_is_that_of_the_seed(model, engine):
    settings = {"inference_mode": "compatible", "do_sample": True, "temperature": 0.8}
    texts = [prepared(model, prompt(i), settings, max_new_tokens=NEW) for i in (2, 3)]
    for seed, text in enumerate(texts):
        object.__setattr__(text.decision, "generator", torch.Generator().manual_seed(seed))
    run(NativeBatch(model, engine, 2), texts, joins=[0, 1])
    for seed, text in enumerate(texts):
        torch.manual_seed(seed)
        output = model.generate(
            **prompt(seed + 2), **settings, engine=engine, max_new_tokens=NEW, return_dict_in_generate=True
        )
        assert torch.equal(text.texts.ids, output.sequences)


def test_a_text_joins_within_two_steps(model, engine):
    texts = [prepared(model, prompt(0), SETTINGS[0], max_new_tokens=NEW) for _ in range(3)]
    batch = NativeBatch(model, engine, 3)
    batch.join(texts[0])
    batch.step()
    batch.join(texts[1])
    assert {id(text) for text, _ in batch.step()} == {id(texts[0]), id(texts[1])}


def test_a_shared_beginning_is_read_once_and_changes_nothing(model, engine):
    batch, inputs = NativeBatch(model, engine, 2), prompt(3)
    more = {"input_ids": 9, "attention_mask": 1, "numeric_values": 0.0}
    longer = {
        name: torch.cat([part, torch.full((1, 5), more[name], dtype=part.dtype)], 1)
        for name, part in inputs.items()
    }
    first = prepared(model, inputs, SETTINGS[0], max_new_tokens=NEW)
    run(batch, [first], joins=[0])
    second = prepared(model, longer, SETTINGS[1], max_new_tokens=NEW)
    assert batch.join(second) == inputs["input_ids"].shape[1]
    while second.position < NEW:
        batch.step()
    output = model.generate(
        **longer, **SETTINGS[1], engine=engine, max_new_tokens=NEW, return_dict_in_generate=True
    )
    assert torch.equal(second.texts.ids, output.sequences)
    other = {**longer, "numeric_values": longer["numeric_values"] * 2}
    assert batch.join(prepared(model, other, SETTINGS[1], max_new_tokens=NEW)) == 0


def test_one_that_leaves_early_frees_its_place(model, engine):
    batch = NativeBatch(model, engine, 1)
    text = prepared(model, prompt(0), SETTINGS[0], max_new_tokens=NEW)
    batch.join(text)
    batch.step()
    batch.leave(text)
    batch.leave(text)
    assert batch.step() == []


def test_the_model_itself_continues_one_text(model):
    text = prepared(model, prompt(1), SETTINGS[0], max_new_tokens=NEW)
    text.keeps_logits = True
    batch = SingleBatch(model)
    batch.join(text)
    for _ in range(NEW):
        ((_, inference),) = batch.step()
        assert inference.choice.logits is not None
    batch.leave(text)
    assert batch.step() == []
    output = model.generate(**prompt(1), **SETTINGS[0], max_new_tokens=NEW, return_dict_in_generate=True)
    assert torch.equal(text.texts.ids, output.sequences)


def test_logits_are_there_where_they_are_asked_for(model, engine):
    texts = [prepared(model, prompt(i), SETTINGS[i], max_new_tokens=NEW) for i in (0, 4)]
    batch = NativeBatch(model, engine, 2)
    texts[0].keeps_logits = True
    for text in texts:
        batch.join(text)
    decided = dict(batch.step())
    readout = decided[texts[0]].readout
    assert torch.equal(decided[texts[0]].choice.logits, readout.logits(decided[texts[0]].U.loc))
