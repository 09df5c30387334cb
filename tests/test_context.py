"""One rule for prompts that do not fit, wherever they are read."""

import pytest

from causal_qwen import Engine
from causal_qwen.context import ContextError, check_context
from causal_qwen.data import BadRows
from causal_qwen.evaluation import evaluate, predict
from causal_qwen.prompting import Settings, Speaker
from conftest import tiny_causal, tiny_processor


def test_the_last_new_token_takes_no_position():
    check_context(8, 8)
    check_context(8, 3, 6)
    with pytest.raises(ContextError, match=r"8 tokens and 2 new .* context of 8: lower max_new_tokens to 1"):
        check_context(8, 8, 2)
    with pytest.raises(
        ContextError, match=r"9 tokens and 1 new .* context of 8: shorten the prompt to 8 tokens"
    ):
        check_context(8, 9)
    with pytest.raises(ContextError, match="shorten the prompt to 5 tokens"):
        check_context(8, 9, 4)
    check_context(8, 5, 4)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("length", [30, 33])
def test_both_engines_refuse_in_the_same_words_before_the_first_token(native, length):
    model, pieces = tiny_causal(max_position_embeddings=32), []
    speaker = Speaker(model, tiny_processor(), Engine.from_model(model) if native else None)
    settings = Settings(mode="standard", max_new_tokens=4)
    with pytest.raises(ContextError) as caught:
        speaker.answer(["x" * length], settings, [], tell=pieces.append)
    assert f"a prompt of {length} tokens and 4 new do not fit the context of 32" in str(caught.value)
    assert pieces == []
    (answer,) = speaker.answer(["x" * 29], settings, [])
    assert answer.tokens == 4


def test_the_native_engine_refuses_in_generate_too():
    model = tiny_causal(max_position_embeddings=32)
    inputs = tiny_processor()("x" * 30, return_tensors="pt")
    with pytest.raises(ContextError, match="30 tokens and 4 new do not fit the context of 32"):
        model.generate(**inputs, max_new_tokens=4, engine=Engine.from_model(model))


def test_prediction_follows_the_same_rule():
    model, processor, bad_rows = tiny_causal(max_position_embeddings=32), tiny_processor(), BadRows("skip")
    rows = [{"prompt": "x" * 32}, {"prompt": "x" * 33}]
    assert len(list(predict(model, processor, rows, bad_rows=bad_rows))) == 1
    (reason,) = bad_rows.reasons
    assert reason.startswith("a prompt of 33 tokens and 1 new do not fit the context of 32: shorten")


def test_evaluation_cuts_texts_at_the_context():
    model, processor = tiny_causal(max_position_embeddings=32), tiny_processor()
    rows = [{"text": "x" * 50 + "abc " * 10}]
    assert evaluate(model, processor, rows) == evaluate(model, processor, rows, max_length=32)
