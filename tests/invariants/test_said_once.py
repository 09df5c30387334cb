"""Rules that are said once hold everywhere: how a number is written, who is sampled, whence a setting."""

import json

import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

from causal_qwen import (
    CausalQwen2Processor,
    Individual,
    Inferencer,
    NumberStreamer,
    abduct,
    counterfactual,
    format_number,
)
from causal_qwen.cli import app
from causal_qwen.conversion.vocabulary import choose_num_token
from causal_qwen.data import prompt_batch
from causal_qwen.generation.settings import resolve
from conftest import tiny_causal, tiny_tokenizer

NEW = 16


@pytest.fixture(scope="module")
def processor():
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return CausalQwen2Processor(choose_num_token(tiny_tokenizer(), 300).tokenizer, chat_template=template)


@pytest.fixture(scope="module")
def model():
    """Says numbers often, with intervals of several widths; no token ends a text."""
    model = tiny_causal(noise_gain=0.02, value_center=3.0, value_spread=0.3)
    with torch.no_grad():
        model.action.bias[258] += 6.0
        model.action.number_noise.fill_(0.05)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def directory(model, processor, tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    model.save_pretrained(place)
    processor.save_pretrained(place)
    return place


class Collect(NumberStreamer):
    text = ""

    def on_finalized_text(self, text, stream_end=False):
        self.text += text


def test_a_number_has_the_same_digits_wherever_it_is_written(model, processor, directory):
    prompt = "It cost 12.5 or"
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "inference_mode": "causal"}
    batch = processor(prompt, return_tensors="pt")
    streamer = Collect(processor, skip_prompt=True, skip_special_tokens=True)
    output = model.generate(**batch, **options, individual=5, streamer=streamer)
    said = output.after(batch["input_ids"].shape[1])
    numbers = said.numbers(processor.num_token_id)
    assert len(numbers) >= 3
    (text,) = processor.batch_decode(said, skip_special_tokens=True)
    assert streamer.text == text
    assert counterfactual(model, processor, prompt, [], 5, max_new_tokens=NEW).factual.text == text
    arguments = ["generate", directory, prompt, "--mode", "causal", "--seed", 5, "--max-new-tokens", NEW]
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    shown = json.loads(result.stdout[result.stdout.index("{") :])
    assert shown["text"] == text
    values = [number["value"] for number in shown["numbers"]]
    assert values == pytest.approx([number.value for number in numbers], rel=1e-4)
    for number in numbers:
        assert format_number(number.value, (number.upper - number.lower) / 2) in text


def test_a_chat_keeps_what_it_showed(directory, monkeypatch):
    """The prompt of the next turn holds the digits that the reader saw."""
    prompts = []

    def recorded(processor, chats, device):
        prompts.extend([dict(message) for message in chat] for chat in chats)
        return prompt_batch(processor, chats, device)

    monkeypatch.setattr("causal_qwen.prompting.answers.prompt_batch", recorded)
    arguments = ["chat", str(directory), "--seed", "5", "--max-new-tokens", "12"]
    result = CliRunner().invoke(app, arguments, input="It cost 12.5\nand\n/quit\n")
    assert result.exit_code == 0, result.output
    answer = prompts[1][1]["content"]
    assert any(character.isdigit() for character in answer)
    assert answer in result.stdout


def test_somebody_is_drawn_by_torch_everywhere(model, processor):
    ids = torch.tensor([[5, 6, 7]])
    draws = [
        lambda: Individual.random().seed,
        lambda: (
            model.generate(ids, max_new_tokens=1, inference_mode="causal", return_dict_in_generate=True)
            .individuals[0]
            .seed
        ),
        lambda: counterfactual(model, processor, "Hi", max_new_tokens=1).individual.seed,
    ]
    seeds = set()
    for draw in draws:
        torch.manual_seed(3)
        seeds.add(draw())
    assert len(seeds) == 1
    torch.manual_seed(3)
    tokens = next(iter(Inferencer(model, "causal").steps(ids, 1))).tokens
    again = next(iter(Inferencer(model, "causal", individual=seeds.pop()).steps(ids, 1))).tokens
    assert torch.equal(tokens, again)


def test_a_setting_comes_from_the_call_then_the_generation_config_then_the_model(model, processor):
    config = GenerationConfig(persistence=0.7, noise_gain=0.5)
    settings = resolve(model, config, persistence=0.9, noise_gain=None, density_floor=None)
    assert settings == {"persistence": 0.9, "noise_gain": 0.5, "density_floor": model.config.density_floor}
    before = model.generation_config
    try:
        model.generation_config = GenerationConfig(noise_gain=0.03, pad_token_id=0)
        abduction = abduct(model, processor, "Hi", [10, 11])
        assert abduction.settings["noise_gain"] == 0.03
        assert Inferencer(model, "causal").options["noise_gain"] == 0.03
        with pytest.raises(ValueError, match="inference_mode is 'dreaming'"):
            Inferencer(model, "dreaming")
    finally:
        model.generation_config = before


@pytest.mark.parametrize("mode", ["standard", "causal", "compatible"])
def test_a_criterion_may_return_a_plain_bool(model, mode):
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    person = {"individual": 3} if mode == "causal" else {}
    stop = [lambda input_ids, scores, **_: input_ids.shape[1] >= 6]
    out = model.generate(
        ids, max_new_tokens=9, inference_mode=mode, stopping_criteria=stop, pad_token_id=0, **person
    )
    assert out.shape == (2, 6)
