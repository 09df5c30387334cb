"""The processor: aligned in every case, exact round trips, and the base's own ids when numbers stay text."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoProcessor

from causal_qwen import CausalQwen2Config, CausalQwen2Processor, format_number, scan
from causal_qwen.conversion import bundled_text
from causal_qwen.conversion.vocabulary import choose_num_token
from causal_qwen.numbers import Number
from conftest import tiny_tokenizer
from qwen_vocabulary import qwen_tokenizer

CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
TEXTS = ["it costs 99.9 or -5e3 dollars", "no number here", "7", "", "价格是99.9元, 第3章"]


def make_processor(**options):
    tokenizer = choose_num_token(tiny_tokenizer(), 300).tokenizer
    tokenizer.chat_template = CHAT
    return CausalQwen2Processor(tokenizer, **options)


PROCESSOR = make_processor()
NUM = PROCESSOR.num_token_id


def pairs(ids, values):
    return [value for token, value in zip(ids, values, strict=True) if token == NUM]


# --- with the real Qwen2.5 vocabulary
# -------------------------------------------------------------------------------


@pytest.mark.slow
def test_qwen_vocabulary_gives_num_its_first_spare_row():
    tokenizer = qwen_tokenizer()
    assert len(tokenizer) == 151_665
    assert tokenizer("价格是99.9元")["input_ids"] == [97480, 20412, 24, 24, 13, 24, 23305]
    chosen = choose_num_token(tokenizer, 151_936)
    assert chosen.id == 151_665, "no matrix is resized: 151,936 rows are there"
    processor = CausalQwen2Processor(chosen.tokenizer)
    encoded = processor("价格是99.9元")
    assert encoded["input_ids"] == [97480, 20412, 151_665, 23305]
    assert encoded["numeric_values"] == [0.0, 0.0, 99.9, 0.0]
    assert processor.decode(encoded["input_ids"], encoded["numeric_values"]) == "价格是99.9元"
    spelled = [processor.spelling[character] for character in "-1.5e-7, 2346890"]
    assert tokenizer.decode(spelled) == "-1.5e-7, 2346890"


@pytest.mark.slow
def test_text_mode_gives_the_bases_ids_on_a_megabyte_with_numbers():
    tokenizer = qwen_tokenizer()
    processor = CausalQwen2Processor(choose_num_token(tokenizer, 151_936).tokenizer, numbers="text")
    piece = (
        bundled_text("calibration")
        + bundled_text("heldout")
        + "\n".join(f"{k}: {k * 1.37:.2f} km, -{k}e3" for k in range(500))
    )
    text = piece * (1_000_000 // len(piece) + 1)
    assert len(text) >= 1_000_000
    assert len(scan(piece)) > 500
    assert processor(text)["input_ids"] == tokenizer(text)["input_ids"]


# --- alignment
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_keeps_values_at_their_tokens(side):
    batch = PROCESSOR(TEXTS, padding=True, padding_side=side, return_tensors="pt")
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["numeric_values"].shape
    assert batch["numeric_values"].dtype == torch.float64
    for row, text in enumerate(TEXTS):
        real = batch["attention_mask"][row].bool()
        alone = PROCESSOR(text)
        assert batch["input_ids"][row][real].tolist() == alone["input_ids"]
        assert batch["numeric_values"][row][real].tolist() == alone["numeric_values"]
        assert batch["numeric_values"][row][~real].eq(0).all()
        assert pairs(alone["input_ids"], alone["numeric_values"]) == [number.value for number in scan(text)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [1, 4, 9, 14, 50])
def test_truncation_keeps_values_at_their_tokens(side, length):
    processor = make_processor()
    processor.tokenizer.truncation_side = side
    text = "a 1 b -2.5 c 3e4 d"
    whole = processor(text)
    cut = processor(text, truncation=True, max_length=length)
    window = slice(-length, None) if side == "left" else slice(0, length)
    assert cut["input_ids"] == whole["input_ids"][window]
    assert cut["numeric_values"] == whole["numeric_values"][window]


@given(
    st.lists(st.floats(-1e6, 1e6).map(lambda v: round(v, 3)), max_size=12),
    st.integers(4, 20),
    st.integers(0, 3),
)
def test_overflowing_rows_tile_the_text(values, length, stride):
    text = " x ".join(map(format_number, values)) + " end"
    whole = PROCESSOR(text)
    rows = PROCESSOR(
        [text], truncation=True, max_length=length, stride=stride, return_overflowing_tokens=True
    )
    assert set(rows["overflow_to_sample_mapping"]) == {0}
    start = 0
    for ids, numbers in zip(rows["input_ids"], rows["numeric_values"], strict=True):
        assert ids == whole["input_ids"][start : start + length]
        assert numbers == whole["numeric_values"][start : start + length]
        start += length - stride


def test_a_batch_of_one_and_lists_and_tensors():
    assert PROCESSOR("5 a")["input_ids"] == PROCESSOR(["5 a"])["input_ids"][0]
    assert PROCESSOR("5 a", return_tensors="pt")["input_ids"].shape == (1, 3)
    assert PROCESSOR("5 a", return_tensors="np")["numeric_values"].dtype == "float64"
    with pytest.raises(ValueError, match="padding=True"):
        PROCESSOR(["a", "ab"], return_tensors="pt")
    with pytest.raises(ValueError, match="return_tensors is 'tf'"):
        PROCESSOR("a", return_tensors="tf")
    with pytest.raises(TypeError, match="give a string"):
        PROCESSOR(5)


# --- round trips
# ----------------------------------------------------------------------------------------------------

fragments = st.one_of(
    st.text(max_size=6),
    st.floats(allow_nan=False, allow_infinity=False).map(format_number),
    st.sampled_from(
        ["-", "(", ")", " ", ",", ".", "%", "$", "元", "e", "<NUM>", "1,000", "2026-11-15", "A4", "5kg", "\n"]
    ),
)


@settings(max_examples=300)
@given(st.lists(fragments, max_size=12).map("".join))
def test_encode_decode_encode_is_the_identity(text):
    text = text.encode("utf-8", "replace").decode("utf-8")
    first = PROCESSOR(text)
    decoded = PROCESSOR.decode(first["input_ids"], first["numeric_values"])
    second = PROCESSOR(decoded)
    assert second["input_ids"] == first["input_ids"]
    assert second["numeric_values"] == first["numeric_values"]


@settings(max_examples=200)
@given(st.lists(fragments, max_size=12).map("".join))
def test_text_mode_is_the_bases_tokenizer(text):
    encoded = PROCESSOR(text, numbers="text")
    assert encoded["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    assert not any(encoded["numeric_values"])


@settings(max_examples=200)
@given(st.lists(fragments, max_size=12).map("".join), st.text(" \t\n\u00a0\u3000", max_size=3))
def test_prompts_of_a_model_that_writes_values_are_the_bases_without_white_space_at_the_end(text, blanks):
    processor = make_processor(numbers="written")
    encoded = processor(text + blanks)
    assert encoded["input_ids"] == tiny_tokenizer()(text.rstrip())["input_ids"]
    assert not any(encoded["numeric_values"])
    assert PROCESSOR(text + blanks, numbers="written")["input_ids"] == encoded["input_ids"]


def test_a_chat_ends_as_its_template_does():
    processor = make_processor(numbers="written", chat_template=CHAT + " ")
    chat = [{"role": "user", "content": "What is 2 plus 2?"}]
    expected = tiny_tokenizer()("<|start|>user: What is 2 plus 2?<|end|> ")["input_ids"]
    assert processor(chat)["input_ids"] == expected
    for options in ({}, {"numbers": "written"}):
        assert processor.apply_chat_template(chat, tokenize=True, **options)["input_ids"] == expected


def test_a_typed_num_is_ordinary_text():
    for mode in ("value", "text", "written"):
        encoded = PROCESSOR("<NUM> is not 5", numbers=mode)
        assert encoded["input_ids"][:5] == tiny_tokenizer()("<NUM>")["input_ids"]
        assert encoded["input_ids"].count(NUM) == (mode == "value")
    batch = PROCESSOR(["<NUM>", "7 <|end|>"], padding=True, padding_side="left")
    assert batch["input_ids"][1][-1] == 257
    assert pairs(batch["input_ids"][1], batch["numeric_values"][1]) == [7.0]


def test_decoding_writes_values_and_skips_special_tokens():
    encoded = PROCESSOR("-3.5<|end|>")
    decode = PROCESSOR.decode
    assert decode(encoded["input_ids"], encoded["numeric_values"]) == "-3.5<|end|>"
    assert decode(encoded["input_ids"], encoded["numeric_values"], skip_special_tokens=True) == "-3.5"
    batch = PROCESSOR(TEXTS, padding=True, return_tensors="pt")
    assert (
        PROCESSOR.batch_decode(batch["input_ids"], batch["numeric_values"], skip_special_tokens=True)[1:3]
        == TEXTS[1:3]
    )
    assert decode([NUM], [99.8734], numeric_lower=[99.5], numeric_upper=[100.1]) == "99.9"


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([65, NUM], [0.0, float("nan")], "position 1 is nan"),
        ([NUM, 65], [float("-inf"), 0.0], "position 0 is -inf"),
        ([65, 65, NUM], None, "position 2, but no numeric_values"),
        ([65, NUM], [1.0], "1 numeric_values for 2 ids"),
    ],
)
def test_values_that_cannot_be_written_are_named(ids, values, message):
    with pytest.raises(ValueError, match=message):
        PROCESSOR.decode(ids, values)


# --- chats and files
# ------------------------------------------------------------------------------------------------


def test_chats_go_through_the_template():
    chat = [{"role": "user", "content": "What is 2 plus 2?"}]
    text = PROCESSOR.apply_chat_template(chat, add_generation_prompt=True)
    assert text == "<|start|>user: What is 2 plus 2?<|end|><|start|>"
    encoded = PROCESSOR.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
    assert encoded["input_ids"][0] == encoded["input_ids"][-1] == 256
    assert pairs(encoded["input_ids"], encoded["numeric_values"]) == [2.0, 2.0]
    assert PROCESSOR(chat)["input_ids"] == PROCESSOR(PROCESSOR.apply_chat_template(chat))["input_ids"]
    assert len(PROCESSOR([chat, chat])["input_ids"]) == 2


@pytest.mark.parametrize("numbers", ["value", "text", "written"])
def test_saved_processors_come_back(tmp_path, numbers):
    make_processor(numbers=numbers).save_pretrained(tmp_path)
    CausalQwen2Config(vocab_size=300, hidden_size=32, num_token_id=258).save_pretrained(tmp_path)
    for loaded in (CausalQwen2Processor.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)):
        assert type(loaded) is CausalQwen2Processor
        assert loaded.numbers == numbers
        assert loaded.chat_template == CHAT
        assert loaded("x 5")["input_ids"] == make_processor(numbers=numbers)("x 5")["input_ids"]


def test_unknown_modes_and_tokenizers_are_named():
    with pytest.raises(ValueError, match="numbers is 'words'; choose 'value', 'text' or 'written'"):
        make_processor(numbers="words")
    with pytest.raises(ValueError, match="no <NUM> token"):
        CausalQwen2Processor(tiny_tokenizer())


def test_known_numbers_are_not_looked_for():
    """A code in running text is a number where it is known to be one; "text" leaves it alone."""
    processor = make_processor()
    text = "pay 2721.6018972544634 for A4"
    known = [Number(4, 22, "2721.6018972544634", 2721.6018972544634)]
    encoded = processor(text, spans=[known])
    assert encoded["input_ids"].count(processor.num_token_id) == 1
    assert encoded["numeric_values"][4] == 2721.6018972544634
    assert (
        processor(text, spans=[known], numbers="text")["input_ids"] == processor.tokenizer(text)["input_ids"]
    )


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[Number(4, 5, "5", math.nan)]], r"the value at \[4, 5\) of text 0 is nan"),
        ([[Number(4, 5, "5", math.inf)]], r"the value at \[4, 5\) of text 0 is inf"),
        ([[Number(4, 9, "5", 5.0)]], r"a number at \[4, 9\) of text 0"),
        ([[Number(4, 5, "5", 5.0)] * 2], "numbers are in their order"),
        ([], "spans of 0 texts for 1 texts"),
    ],
)
def test_known_numbers_are_checked(spans, message):
    with pytest.raises(ValueError, match=message):
        make_processor()("pay 5", spans=spans)
