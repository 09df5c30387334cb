"""Numbers in vLLM: values of the prompt are read, generated ones are fed back, as generate() does."""

import pytest
import torch

from causal_qwen.conversion import load_model

NEW_TOKENS = 16
PROMPTS = (
    "The train leaves at 9.30 and the ticket costs ",
    "In 1969 there were 3 astronauts, and the flight took ",
    "She bought 12 apples for 4.50 dollars, so each of them was ",
    "2, 4, 8, 16, ",
)
MODES = ("standard", "causal", "compatible")


@pytest.fixture(scope="module")
def writer(base_directory, tmp_path_factory):
    """The base with <NUM> let loose, as training would: it writes numbers among its words."""
    model, processor = load_model(base_directory, dtype="float32")
    num = model.config.num_token_id
    with torch.no_grad():
        model.action.bias[num] = 4.0
        model.action.number.bias.fill_(3.0)
        model.action.number_noise.fill_(0.1)
    model.config.value_range = [0.0, 1000.0]
    directory = tmp_path_factory.mktemp("models") / "writer"
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return model, processor, str(directory)


def settings_of(mode, index):
    generate = {"inference_mode": mode, "do_sample": mode == "causal", "max_new_tokens": NEW_TOKENS}
    extra = {"inference_mode": mode, "numbers": "kept", "record": f"{mode} {index}"}
    if mode == "causal":
        generate |= {"individual": index, "top_k": 0}
        extra["individual"] = index
    params = {"max_tokens": NEW_TOKENS, "temperature": 0.0 if mode == "compatible" else 1.0}
    return generate, params | {"extra_args": extra}


def test_numbers_are_read_and_written_as_generate_does(writer, ask):
    model, processor, directory = writer
    num = model.config.num_token_id
    expected, requests = [], []
    for index, text in enumerate(PROMPTS):
        for mode in MODES:
            encoded = processor(text, numbers="value", return_tensors="pt")
            ids, values = encoded["input_ids"][0].tolist(), encoded["numeric_values"][0].tolist()
            generate, params = settings_of(mode, index)
            params["extra_args"]["numeric_values"] = [
                value for token, value in zip(ids, values, strict=True) if token == num
            ]
            output = model.generate(**encoded, **generate, return_dict_in_generate=True).after(len(ids))
            expected.append((output.sequences[0].tolist(), output.numbers(num)))
            requests.append({"prompt": ids, "params": params})
    (answers,) = ask(directory, {"calls": [requests]})
    assert any(numbers for _, numbers in expected)
    for (tokens, numbers), answer in zip(expected, answers, strict=True):
        assert answer["tokens"] == tokens
        assert [number["position"] for number in answer["numbers"]] == [one.position for one in numbers]
        for number, one in zip(answer["numbers"], numbers, strict=True):
            ours = (one.value, one.lower, one.upper)
            assert (number["value"], number["lower"], number["upper"]) == pytest.approx(ours, rel=1e-3)


def test_numbers_are_hidden_where_nobody_can_read_them(writer, ask):
    _, processor, directory = writer
    ids = processor(PROMPTS[0], numbers="text")["input_ids"]
    params = {"max_tokens": NEW_TOKENS}
    modes = [{"extra_args": {"inference_mode": mode}} for mode in MODES]
    requests = [{"prompt": ids, "params": params | mode} for mode in modes]
    (answers,) = ask(directory, {"calls": [requests]})
    assert all(processor.num_token_id not in answer["tokens"] for answer in answers)
