"""Texts become ids, values and labels; a sequence begins in training as it does at generation."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from causal_qwen import CausalQwen2Processor
from causal_qwen.data import (
    BadRow,
    BadRows,
    Encoder,
    Example,
    Reading,
    encode_prompt,
    encode_text,
    labelled_batches,
)
from causal_qwen.data.encoding import numbers_of
from causal_qwen.evaluation import predict
from causal_qwen.losses import IGNORE_INDEX
from conftest import tiny_processor, tiny_tokenizer

PROMPT = "A car of 1200 kg drives "
START, END = 256, 257
CHAT_TEMPLATE = (
    "<|start|>{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


def processor_with(single):
    """A processor whose tokenizer puts special tokens around a text."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|start|>", START), ("<|end|>", END)]
    )
    return tiny_processor(tokenizer, chat_template=CHAT_TEMPLATE)


BEGINNINGS = pytest.mark.parametrize(
    ("single", "beginning"),
    [("$A", []), ("<|start|> $A", [START]), ("<|start|> $A <|end|>", [START])],
    ids=["nothing", "begins", "begins and ends"],
)


class Recorder:
    """A model that keeps what it is to predict from."""

    config = SimpleNamespace(max_position_embeddings=512)
    device = torch.device("cpu")

    def predict_number(self, batch, level, *, raw, engine):
        self.rows = [
            row[mask.bool()].tolist()
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        nothing = torch.zeros(len(self.rows))
        laws = {"median": nothing, "lower": nothing, "upper": nothing}
        return SimpleNamespace(**laws, prob_num=nothing, extrapolates=None)


@BEGINNINGS
def test_prompts_begin_alike_wherever_they_are_encoded(single, beginning):
    """In training, in labelled batches, in predict, and in the processor's call, which generation uses."""
    processor = processor_with(single)
    bare = processor(PROMPT, add_special_tokens=False)
    expected = [*beginning, *bare["input_ids"]]
    ids, values = encode_text(processor, PROMPT, begins=True)
    assert ids == expected
    assert values == [0.0] * len(beginning) + bare["numeric_values"]
    assert values[ids.index(processor.num_token_id)] == 1200.0
    assert processor(PROMPT)["input_ids"][: len(expected)] == expected

    completion, _ = encode_text(processor, "33 miles.", begins=False)
    trained = Encoder(processor).encode(Example(PROMPT, "33 miles.", "here"))
    assert trained.input_ids == [*expected, *completion, END]
    assert trained.labels == [IGNORE_INDEX] * len(expected) + [*completion, END]

    row = {"weight": 1200, "miles": 33}
    reading = Reading("A car of {weight} kg drives {miles} miles.", "miles")
    (batch,) = labelled_batches(processor, [row], reading=reading)
    assert batch["input_ids"][0].tolist() == trained.input_ids

    model = Recorder()
    assert [one.prompt for one in predict(model, processor, [row], reading=reading)] == [PROMPT]
    assert model.rows == [expected]


@BEGINNINGS
def test_a_text_begins_once_even_if_it_is_cut(single, beginning):
    processor = processor_with(single)
    text = "abc 1 " * 20
    rows = list(Encoder(processor, max_length=16).rows([{"text": text}], BadRows()))
    bare = processor(text, add_special_tokens=False)["input_ids"]
    assert [token for row in rows for token in row.input_ids] == [*beginning, *bare, END]
    first = rows[0]
    assert first.labels[: len(beginning) or 1] == [IGNORE_INDEX]
    assert first.labels[len(beginning) or 1 :] == first.input_ids[len(beginning) or 1 :]


@BEGINNINGS
def test_a_chat_carries_its_own_beginning(single, beginning):
    processor = processor_with(single)
    chat = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes 7"})
    trained = Encoder(processor).encode(Example("", "", "here", chat))
    text, row = encode_prompt(processor, Example("", "", "here", chat[:1]))
    assert text == "<|start|>[user]hi;[assistant]"
    assert row.input_ids.count(START) == trained.input_ids.count(START) == 1
    assert trained.input_ids[: len(row)] == row.input_ids
    generation = processor.apply_chat_template(list(chat[:1]), add_generation_prompt=True, tokenize=True)
    assert generation["input_ids"] == row.input_ids


def test_encoding_learns_completions_and_the_end(processor):
    encoder = Encoder(processor, max_length=64)
    row = encoder.encode(Example("pay ", "12.5 now", "here"))
    whole = processor("pay 12.5 now")
    assert row.input_ids == [*whole["input_ids"], processor.tokenizer.eos_token_id]
    assert row.numeric_values == [*whole["numeric_values"], 0.0]
    assert row.labels == [IGNORE_INDEX] * 4 + row.input_ids[4:]
    assert numbers_of([row], processor.num_token_id).tolist() == [12.5]
    everything = Encoder(processor, Reading(completion_only=False, append_eos=False))
    row = everything.encode(Example("pay ", "12.5", "here"))
    assert row.labels == [IGNORE_INDEX, *row.input_ids[1:]]


def test_encoding_of_chats_learns_the_assistant(processor):
    reader = CausalQwen2Processor(processor.tokenizer, chat_template=CHAT_TEMPLATE)
    chat = (
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes 7"},
        {"role": "user", "content": "so"}, {"role": "assistant", "content": "no"},
    )  # fmt: skip
    row = Encoder(reader).encode(Example("", "", "here", chat))
    learned = [token for token, label in zip(row.input_ids, row.labels, strict=True) if label != IGNORE_INDEX]
    values = [7.0 if token == reader.num_token_id else 0.0 for token in learned]
    assert reader.decode(learned, values) == "yes 7;no;"


def test_long_texts_are_cut_and_long_completions_refused(processor):
    encoder, bad_rows = Encoder(processor, max_length=16), BadRows("skip")
    text = "abc 1 " * 20
    rows = list(encoder.rows([{"text": text}, {"prompt": "p", "completion": text}], bad_rows))
    assert bad_rows.count == 1
    ids = [token for row in rows for token in row.input_ids]
    assert ids == [*processor(text)["input_ids"], processor.tokenizer.eos_token_id]
    assert all(row.labels[0] == IGNORE_INDEX and len(row) <= 16 for row in rows)


# --- numbers="written": digits in prompts, values in what is learned
# ------------------------------------------------------------------------------------------------

WRITTEN = tiny_processor(numbers="written", chat_template=CHAT_TEMPLATE)
NUM = WRITTEN.num_token_id
finite = st.floats(allow_nan=False, allow_infinity=False)


def values_of(row):
    return [value for token, value in zip(row.input_ids, row.numeric_values, strict=True) if token == NUM]


@given(finite, finite, st.sampled_from(["{a} makes {b}", "{a:.3g} makes {b:.1f}!", "{a:,.2f}:\u3000{b}"]))
def test_a_tables_prompt_is_digits_and_its_target_a_value_bit_by_bit(known, target, template):
    reading, row = Reading(template, "b"), {"a": known, "b": target}
    (example,) = reading.examples([row], BadRows())
    trained = Encoder(WRITTEN, reading).encode(example)
    assert torch.tensor(values_of(trained)).equal(torch.tensor([target]))
    prompt = tiny_tokenizer()(example.prompt.rstrip())["input_ids"]
    assert trained.input_ids[: len(prompt) + 1] == [*prompt, NUM]
    assert trained.labels[: len(prompt) + 1] == [IGNORE_INDEX] * len(prompt) + [NUM]
    (asked,) = reading.prompts([row], BadRows())
    assert encode_prompt(WRITTEN, asked)[1].input_ids == prompt


@pytest.mark.parametrize("end", ["", " ", "  ", "\n", " \t\u00a0\u3000"])
@pytest.mark.parametrize(
    ("completion", "learned"),
    [(12.5, "12.5"), ("12.5", "12.5"), (" 12.5 kg", "12.5 kg"), ("- 12", "- 12"), (" no 7", " no 7")],
)
def test_white_space_at_the_end_of_a_prompt_changes_no_prediction(end, completion, learned):
    """A number follows the prompt directly; words take the space along, as their tokens carry it."""
    prompt = f"2 + 3 is{end}"
    (example,) = Reading().examples([{"prompt": prompt, "completion": completion}], BadRows())
    row = Encoder(WRITTEN, Reading(append_eos=False)).encode(example)
    _, asked = encode_prompt(WRITTEN, Example(prompt, "", "here"))
    assert asked.input_ids == WRITTEN(prompt)["input_ids"] == tiny_tokenizer()("2 + 3 is")["input_ids"]
    assert not any(asked.numeric_values)
    assert row.input_ids[: len(asked)] == asked.input_ids
    assert row.labels[len(asked) :] == row.input_ids[len(asked) :]
    text = WRITTEN.decode(row.input_ids[len(asked) :], row.numeric_values[len(asked) :])
    follows = learned.startswith("12")
    assert (row.input_ids[len(asked)] == NUM) == follows
    assert text == ("" if follows else end) + learned
    assert row.input_ids.count(NUM) == 1


def test_what_is_not_a_prompt_is_written():
    """Running text and sentences without a target are values from the first number on."""
    for reading, source in (
        (Reading(), {"text": " 3 and 4.5 "}),
        (Reading("{a} and {b}"), {"a": 3, "b": 4.5}),
    ):
        (row,) = Encoder(WRITTEN, reading).rows([source], BadRows())
        assert values_of(row) == [3.0, 4.5]


def test_the_digits_of_prompts_are_learned_where_prompts_are():
    row = Encoder(WRITTEN, Reading(completion_only=False, append_eos=False)).encode(
        Example("1 5", "7", "here")
    )
    assert row.input_ids == [*tiny_tokenizer()("1 5")["input_ids"], NUM]
    assert row.labels == [IGNORE_INDEX, *row.input_ids[1:]]


def test_what_the_assistant_said_is_read_as_it_was_written():
    chat = tuple(
        {"role": role, "content": text}
        for role, text in (("user", "1 + 1?"), ("assistant", "2"), ("user", "and 3?"), ("assistant", "5"))
    )
    trained = Encoder(WRITTEN).encode(Example("", "", "here", chat))
    text, asked = encode_prompt(WRITTEN, Example("", "", "here", chat[:3]))
    assert text == "<|start|>[user]1 + 1?;[assistant]2;[user]and 3?;[assistant]"
    assert values_of(asked) == [2.0]
    assert values_of(trained) == [2.0, 5.0]
    assert trained.input_ids[: len(asked)] == asked.input_ids
    base = tiny_processor(numbers="text", chat_template=CHAT_TEMPLATE)
    assert (
        encode_prompt(base, Example("", "", "here", chat[:3]))[1].input_ids
        == tiny_tokenizer()(text).input_ids
    )


def test_a_template_that_rewrites_what_was_said_is_read_as_text():
    template = "{% for m in messages %}[{{ m.role }}{{ messages | length }}]{{ m.content }};{% endfor %}"
    processor = tiny_processor(numbers="written", chat_template=template)
    chat = (
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3?"},
    )
    text, row = encode_prompt(processor, Example("", "", "here", chat))
    assert text == "[user3]1?;[assistant3]2;[user3]3?;"
    assert row.input_ids == tiny_tokenizer()(text)["input_ids"]


def test_a_prompt_of_white_space_is_empty_where_it_is_not_read():
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode_prompt(WRITTEN, Example(" \n", "", "here"))
    with pytest.raises(BadRow, match="prompt is empty"):
        list(predict(Recorder(), WRITTEN, [{"prompt": " \n"}]))
