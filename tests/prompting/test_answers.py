"""Answers: the same tokens by both engines, streamed as returned, ended where they should."""

import pytest
import torch

from causal_qwen import Engine
from causal_qwen.prompting import Settings, Speaker
from causal_qwen.prompting.answers import _Pieces, before_stop
from conftest import tiny_causal, tiny_processor

PROMPTS = ["It cost 12.5 euros", "Hello", "7"]


@pytest.fixture(scope="module")
def speakers(one_thread):
    model, processor = tiny_causal(), tiny_processor()
    with torch.no_grad():
        model.action.bias[model.config.num_token_id] = 8.0  # so that it writes numbers
    return Speaker(model, processor), Speaker(model, processor, Engine.from_model(model))


@pytest.mark.parametrize("mode", ["standard", "causal", "compatible"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sample": True},
        {"sample": True, "top_k": 5, "repetition_penalty": 1.3},
        {"sample": True, "top_p": 0.8, "temperature": 0.7},
        {"repetition_penalty": 2.0},
    ],
)
def test_both_engines_say_the_same(speakers, mode, options):
    settings = Settings(mode=mode, max_new_tokens=8, seed=3, **options)
    people = settings.people(len(PROMPTS))
    ours, theirs = (speaker.answer(PROMPTS, settings, people) for speaker in speakers)
    for one, two in zip(ours, theirs, strict=True):
        assert (one.text, one.seed, one.finish_reason, one.tokens) == (
            two.text,
            two.seed,
            two.finish_reason,
            two.tokens,
        )
        assert [number.position for number in one.numbers] == [number.position for number in two.numbers]


def test_what_is_streamed_is_what_is_returned(speakers):
    numbers = several = 0
    for seed in range(5):
        settings = Settings(mode="causal", max_new_tokens=24, seed=seed)
        for speaker in speakers:
            pieces = []
            (answer,) = speaker.answer(PROMPTS[:1], settings, settings.people(1), tell=pieces.append)
            assert "".join(pieces) == answer.text
            several += len(pieces) > 1
            numbers += len(answer.numbers)
    assert several
    assert numbers


def test_a_text_ends_before_the_stop_string(speakers):
    settings = Settings(mode="causal", max_new_tokens=16, seed=1)
    for speaker in speakers:
        (whole,) = speaker.answer(["Hello"], settings, settings.people(1))
        letters = [character for character in whole.text if character.isascii() and not character.isdigit()]
        stop = letters[len(letters) // 2]
        stopped, pieces = settings.updated({"stop": ["never said", stop]}), []
        (answer,) = speaker.answer(["Hello"], stopped, settings.people(1), tell=pieces.append)
        assert answer.text == whole.text.split(stop)[0] == "".join(pieces)
        assert answer.finish_reason == "stop_string"
        assert answer.tokens <= whole.tokens


def test_the_end_of_text_is_told_from_the_last_token(speakers):
    speaker = Speaker(speakers[0].model, speakers[0].processor)
    settings = Settings(mode="standard", max_new_tokens=3)
    (cut,) = speaker.answer(["Hello"], settings, [])
    assert (cut.finish_reason, cut.tokens, cut.seed) == ("length", 3, None)
    inputs = speaker.processor("Hello", return_tensors="pt")
    first = speaker.model.generate(**inputs, max_new_tokens=1, do_sample=False)[0, -1].item()
    speaker._eos = frozenset([first])
    (ended,) = speaker.answer(["Hello"], settings, [])
    assert (ended.finish_reason, ended.tokens) == ("eos", 1)


def test_padding_is_no_repetition(speakers):
    """Alone or beside a longer prompt, a penalty sees the same tokens."""
    for mode in ("standard", "causal"):
        settings = Settings(mode=mode, max_new_tokens=6, repetition_penalty=1.5, seed=2)
        people = settings.people(1) * 2
        (alone,) = speakers[0].answer(["Hello"], settings, people[:1])
        beside = speakers[0].answer(["Hello", "a much longer prompt than that"], settings, people)[0]
        assert beside.text == alone.text


def test_a_seed_repeats_a_text_of_compatible_in_any_batch(speakers):
    settings = Settings(mode="compatible", sample=True, max_new_tokens=6, seed=8)
    people = settings.people(3)
    together = speakers[0].answer(["Hello"] * 3, settings, people)
    torch.manual_seed(0)
    (alone,) = speakers[0].answer(["Hello"], settings, people[2:])
    assert alone == together[2]
    assert len({answer.text for answer in together}) > 1


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("aab aaab", ["aaab"], "aab "),
        ("no stop at al", ["all"], "no stop at al"),
        ("xyz", ["z", "yz"], "x"),
    ],
)
def test_text_that_may_become_a_stop_string_waits(size, text, stop, expected):
    assert before_stop(text, stop)[0] == expected
    pieces = []
    streamer = _Pieces(tiny_processor(), stop, pieces.append)
    for start in range(0, len(text), size):
        streamer._take(text[start : start + size])
    streamer._take("", last=True)
    assert "".join(pieces) == expected
