"""Numbers in ids: digits that any tokenizer decodes, the same in every way out."""

import pytest
import torch
from transformers import DynamicCache, TextIteratorStreamer, TextStreamer

from causal_qwen import NumberStreamer
from causal_qwen.generation.spelling import Speller
from number_speakers import number_processor, number_speaker

PROMPT = "It cost 12.5 or"
MODES = {
    "standard": {"do_sample": False},
    "causal": {"inference_mode": "causal", "individual": 5},
    "compatible": {"inference_mode": "compatible", "do_sample": True},
}


@pytest.fixture(scope="module")
def processor():
    return number_processor()


@pytest.fixture(scope="module")
def model():
    return number_speaker()


def generate(model, batch, mode, **options):
    torch.manual_seed(0)
    return model.generate(**batch, **MODES[mode], max_new_tokens=8, pad_token_id=257, **options)


@pytest.mark.parametrize("mode", MODES)
def test_ids_alone_decode_to_what_the_output_says(model, processor, mode):
    batch = processor([PROMPT, "0 and 3,"], padding=True, return_tensors="pt")
    output = generate(model, batch, mode, return_dict_in_generate=True)
    ids = generate(model, batch, mode)
    texts = processor.batch_decode(output, skip_special_tokens=True)
    assert processor.batch_decode(ids, skip_special_tokens=True) == texts
    assert processor.decode(ids[0], skip_special_tokens=True) == texts[0]
    assert texts[0].startswith(PROMPT)
    assert sum(character.isdigit() for character in texts[0]) > 8
    start = batch["input_ids"].shape[1]
    assert torch.equal(ids[:, :start], batch["input_ids"]), "the prompt keeps its columns"
    answers = processor.batch_decode(output.after(start), skip_special_tokens=True)
    assert processor.tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True) == answers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("streamer", ["tokenizer", "processor", "NumberStreamer", "iterator"])
def test_streams_have_the_same_digits(model, processor, mode, streamer, capsys):
    batch = processor(PROMPT, return_tensors="pt")
    (expected,) = processor.batch_decode(generate(model, batch, mode), skip_special_tokens=True)
    if streamer == "iterator":
        stream = TextIteratorStreamer(processor.tokenizer, skip_special_tokens=True)
        generate(model, batch, mode, streamer=stream)
        assert "".join(stream) == expected
        return
    kinds = {"tokenizer": (TextStreamer, processor.tokenizer), "processor": (TextStreamer, processor)}
    kind, knows = kinds.get(streamer, (NumberStreamer, processor))
    generate(model, batch, mode, streamer=kind(knows, skip_special_tokens=True))
    assert capsys.readouterr().out == expected + "\n"


def test_ids_that_lost_their_values_are_refused(model, processor):
    ids = processor(PROMPT, return_tensors="pt")["input_ids"]
    assert processor.decode(model.generate(ids, max_new_tokens=1, pad_token_id=0)[0]).startswith(PROMPT)
    with pytest.raises(ValueError, match=r"<NUM> tokens, but no numeric_values; .*generate\(\*\*batch\)"):
        model.generate(torch.cat([ids, ids]), max_new_tokens=1)
    with pytest.raises(ValueError, match="return_dict_in_generate=True"):
        processor.decode(ids.tolist()[0])


def test_a_cache_and_ids_in_digits_do_not_go_together(model, processor):
    batch = processor("Two", return_tensors="pt")
    with pytest.raises(ValueError, match=r"past_key_values would hold <NUM>.*return_dict_in_generate=True"):
        model.generate(**batch, max_new_tokens=2, past_key_values=DynamicCache())
    output = model.generate(
        **batch, max_new_tokens=2, past_key_values=DynamicCache(), return_dict_in_generate=True
    )
    again = {"input_ids": output.sequences, "numeric_values": output.numeric_values}
    longer = model.generate(
        **again, max_new_tokens=2, past_key_values=output.past_key_values, return_dict_in_generate=True
    )
    at_once = model.generate(**batch, max_new_tokens=4, return_dict_in_generate=True)
    assert torch.equal(longer.sequences, at_once.sequences)
    torch.testing.assert_close(longer.numeric_values, at_once.numeric_values)


def test_numbers_stay_apart_in_ids(processor):
    comma = processor.spelling[","]
    speller, other = Speller(processor.spelling), 70
    tokens = [*speller.add_number(1, 1, 1), *speller.add(comma), *speller.add_number(200, 200, 200)]
    tokens += [*speller.add_number(3, 3, 3), *speller.add(other), *speller.end()]
    assert processor.tokenizer.decode(tokens) == "1.0,200 3" + processor.tokenizer.decode([other])


def test_without_a_spelling_num_stays(processor):
    model = number_speaker()
    model.config.number_spelling = None
    ids = model.generate(**processor("Two", return_tensors="pt"), max_new_tokens=4, pad_token_id=0)
    assert (ids == processor.num_token_id).any()
    assert ids.shape[1] == 7
