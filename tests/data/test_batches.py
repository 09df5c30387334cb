"""Rows become batches: whole, padded, by length, and with the labels that they were read with."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.data import (
    BadRows,
    Collator,
    Encoded,
    Encoder,
    Example,
    Reading,
    encode_prompt,
    labelled_batches,
    prompt_batch,
    windows_by_length,
)
from causal_qwen.data.batches import BATCHES_SORTED, pack
from causal_qwen.losses import IGNORE_INDEX
from conftest import tiny_causal, tiny_processor


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 5))
def test_windows_hold_every_item_once_and_batches_rise_in_length(lengths, size):
    items = list(enumerate(lengths))
    windows = list(windows_by_length(items, size, length=lambda item: item[1]))
    assert [item for window, _ in windows for item in window] == items
    for window, batches in windows:
        assert len(window) <= BATCHES_SORTED * size
        assert all(len(batch) == size for batch in batches[:-1])
        order = [index for batch in batches for index in batch]
        assert sorted(order) == list(range(len(window)))
        assert [window[index][1] for index in order] == sorted(length for _, length in window)


def test_windows_are_read_one_at_a_time():
    items = iter(range(1000))
    next(windows_by_length(items, 2, length=lambda item: item))
    assert next(items) == BATCHES_SORTED * 2
    with pytest.raises(ValueError, match="batch_size is 0"):
        next(windows_by_length([1], 0, length=int))


def test_labelled_batches_hold_every_row_and_count_bad_ones(processor):
    reading = Reading("{name} costs {price}", "price", append_eos=False)
    rows = [{"name": "x" * (index % 7 + 1), "price": index} for index in range(50)]
    bad_rows = BadRows("skip")
    batches = list(
        labelled_batches(
            processor, [*rows, {"name": "fig"}], reading=reading, batch_size=4, bad_rows=bad_rows
        )
    )
    assert bad_rows.count == 1
    encoder = Encoder(processor, Reading(append_eos=False))
    expected = [
        (row.input_ids, row.numeric_values, row.labels)
        for row in map(encoder.encode, reading.examples(rows, BadRows()))
    ]
    read = [
        tuple(batch[name][index, : int(batch["attention_mask"][index].sum())].tolist()
              for name in ("input_ids", "numeric_values", "labels"))
        for batch in batches
        for index in range(len(batch["labels"]))
    ]  # fmt: skip
    assert sorted(read) == sorted(expected)
    padding = sum(int((batch["attention_mask"] == 0).sum()) for batch in batches)
    assert padding < 20  # in the order of the rows it is 105


def test_padding_is_masked_and_nothing_is_learned_there(processor):
    collate = Collator.of(processor)
    assert collate.pad_token_id == processor.tokenizer.pad_token_id
    batch = collate([Encoded([1, 2], [0.0, 5.0], [IGNORE_INDEX, 2]), Encoded([3], [0.0], [IGNORE_INDEX])])
    assert batch["input_ids"].tolist() == [[1, 2], [3, collate.pad_token_id]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 2], [IGNORE_INDEX, IGNORE_INDEX]]
    assert batch["numeric_values"].tolist() == [[0.0, 5.0], [0.0, 0.0]]
    assert batch["numeric_values"].dtype == torch.float64


@pytest.mark.parametrize(
    ("padding", "end", "expected"), [(5, 7, 5), (0, 7, 0), (None, 7, 7), (None, None, 0)]
)
def test_the_padding_is_the_tokenizers_or_the_end_of_text(padding, end, expected):
    class Tokenizer:
        pad_token_id, eos_token_id = padding, end

    class Processor:
        tokenizer = Tokenizer

    assert Collator.of(Processor).pad_token_id == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_packing_keeps_every_sequence_whole_and_in_order(lengths):
    rows = [Encoded([i] * n, [0.0] * n, [IGNORE_INDEX] + [i] * (n - 1)) for i, n in enumerate(lengths)]
    packed = list(pack(rows, 10))
    assert [length for row in packed for length in row.lengths] == lengths
    assert [token for row in packed for token in row.input_ids] == [t for row in rows for t in row.input_ids]
    assert all(len(row) <= 10 for row in packed)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_loss_equals_unpacked_loss(processor, attention):
    """Also the gradients: no sequence sees another, and the padding of a packed batch sees nobody."""
    encoder = Encoder(processor, max_length=40)
    texts = [f"item {i} at {3.5 * i} with {'x' * i}" for i in range(9)]
    rows = [encoder.encode(Example("", text, "here")) for text in texts]
    model = tiny_causal(attn_implementation=attention)
    losses, gradients = [], []
    for batch in (Collator(0)(rows), Collator(0, packed=True)(list(pack(rows, 80)))):
        model.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert len(list(pack(rows, 80))) < len(rows)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)


def test_prompts_to_be_continued_are_padded_on_the_left(processor):
    texts = ["It cost 12.5 or", "a"]
    rows = [encode_prompt(processor, Example(text, "", ""))[1] for text in texts]
    batch = prompt_batch(processor, texts)
    assert batch["attention_mask"].sum(-1).tolist() == [len(row) for row in rows]
    for ids, row in zip(batch["input_ids"], rows, strict=True):
        assert ids[-len(row) :].tolist() == row.input_ids
    assert 12.5 in batch["numeric_values"][0].tolist()
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        prompt_batch(processor, ["a", ""])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named(value):
    rows = [Encoded([1], [0.0], [IGNORE_INDEX]), Encoded([1, 2], [0.0, value], [IGNORE_INDEX, 2])]
    with pytest.raises(ValueError, match=f"the value at row 1, position 1 is {value}"):
        Collator(0)(rows)
