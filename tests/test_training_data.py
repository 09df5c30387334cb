"""Rows, examples, encodings and recipes: what comes in, and what is refused."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen import CausalQwen2Processor
from causal_qwen.conversion.vocabulary import choose_num_token
from causal_qwen.losses import IGNORE_INDEX
from causal_qwen.training.data import BadRow, BadRows, Example, Template, read_examples, read_rows
from causal_qwen.training.encoding import Collator, Encoder, numbers_of, pack
from causal_qwen.training.sampling import EpochSampler, StreamedRows
from conftest import tiny_causal, tiny_tokenizer


@pytest.fixture(scope="module")
def processor():
    return CausalQwen2Processor(choose_num_token(tiny_tokenizer(), 300).tokenizer)


def examples(source, template=None, action="error"):
    bad_rows = BadRows(action)
    return list(read_examples(source, template=template, bad_rows=bad_rows)), bad_rows


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    import pandas

    rows = [{"name": "pear", "price": 1.5}, {"name": "plum, red", "price": 20.25}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pandas.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    pandas.DataFrame(rows).to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    template = Template("A {name} costs {price} coins.", "price")
    expected = [("A pear costs ", "1.5 coins."), ("A plum, red costs ", "20.25 coins.")]
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet"):
        found, _ = examples(tmp_path / name, template)
        assert [(one.prompt, one.completion) for one in found] == expected, name
        assert all(name in one.where for one in found)
    assert len(examples([tmp_path / "a.csv", tmp_path / "a.json"], template)[0]) == 4
    assert len(examples(str(tmp_path / "a.*v"), template)[0]) == 4


def test_datasets_objects_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "one 1"}, {"text": "two 2"}])
    assert [one.completion for one in examples(rows)[0]] == ["one 1", "two 2"]
    assert [one.completion for one in examples(rows.to_iterable_dataset())[0]] == ["one 1", "two 2"]


def test_shapes_of_rows():
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    found, _ = examples([{"text": "all"}, {"prompt": "p", "completion": "c"}, {"messages": chat}])
    assert [(one.prompt, one.completion) for one in found] == [("", "all"), ("p", "c"), ("", "")]
    assert list(found[2].messages) == chat


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"name": "pear", "price"', "broken JSON"),
        ('{"name": "pear"}', "no field 'price'"),
        ('{"name": "pear", "price": NaN}', "price is nan"),
        ('{"name": "pear", "price": null}', "price is empty"),
        ('{"name": "pear", "prices": 3}', "did you mean 'prices'"),
        ('[1, 2]', "not an object"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_or_skipped(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"name": "fig", "price": 2}\n' + line + '\n{"name": "nut", "price": 3}\n')
    template = Template("{name} {price}")
    with pytest.raises(BadRow, match=rf"rows\.jsonl:2: .*{reason}"):
        examples(path, template)
    found, bad_rows = examples(path, template, "skip")
    assert [one.completion for one in found] == ["fig 2", "nut 3"]
    assert bad_rows.count == 1


@pytest.mark.parametrize("row", ["pear,1,2", "pear"])
def test_a_ragged_csv_row_is_bad(tmp_path, row):
    path = tmp_path / "rows.csv"
    path.write_text(f"name,price\nfig,2\n{row}\n")
    with pytest.raises(BadRow, match=r"rows\.csv:3: .* cells than the header"):
        examples(path, Template("{name} {price}"))


def test_templates():
    template = Template("In {year:.4} {name!r} cost {price:.1f}, {{really}} {name}.", "price")
    row = {"year": "1970-01-01", "name": "fig", "price": 2}
    assert template.render(row) == ("In 1970 'fig' cost ", "2.0, {really} fig.")
    assert Template("{a} is {b}").render({"a": 1, "b": 2}) == ("", "1 is 2")
    for text, target, message in (
        ("no field", None, "needs fields"),
        ("{a} {}", None, "by name"),
        ("{a", None, "cannot be read"),
        ("{a}", "b", "no field 'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            Template(text, target)
    with pytest.raises(ValueError, match="cannot write"):
        Template("{a:.1f}").render({"a": "word"})


def test_unknown_files_are_refused(tmp_path):
    (tmp_path / "a.xlsx").touch()
    for source, message in (
        (tmp_path / "a.xlsx", "known are"),
        (tmp_path / "none.csv", "no such file"),
        (str(tmp_path / "*.csv"), "no such file"),
        ("package:no_such_package_x/a.csv", "not installed"),
    ):
        with pytest.raises(ValueError, match=message):
            list(read_rows(source, bad_rows=BadRows()))


def test_encoding_learns_completions_and_the_end(processor):
    encoder = Encoder(processor, max_length=64)
    row = encoder.encode(Example("pay ", "12.5 now", "here"))
    whole = processor("pay 12.5 now")
    assert row.input_ids == [*whole["input_ids"], processor.tokenizer.eos_token_id]
    assert row.numeric_values == [*whole["numeric_values"], 0.0]
    assert row.labels == [IGNORE_INDEX] * 4 + row.input_ids[4:]
    assert numbers_of([row], processor.num_token_id).tolist() == [12.5]
    everything = Encoder(processor, completion_only=False, append_eos=False)
    row = everything.encode(Example("pay ", "12.5", "here"))
    assert row.labels == [IGNORE_INDEX, *row.input_ids[1:]]


def test_encoding_of_chats_learns_the_assistant(processor):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    reader = CausalQwen2Processor(processor.tokenizer, chat_template=template)
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
    rows = list(encoder.rows([Example("", text, "a"), Example("p", text, "b")], bad_rows))
    assert bad_rows.count == 1
    ids = [token for row in rows for token in row.input_ids]
    assert ids == [*processor(text)["input_ids"], processor.tokenizer.eos_token_id]
    assert all(row.labels[0] == IGNORE_INDEX and len(row) <= 16 for row in rows)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_packing_keeps_every_sequence_whole_and_in_order(lengths):
    from causal_qwen.training.encoding import Encoded

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


def test_the_order_depends_on_seed_and_epoch_alone():
    lengths = [5, 1, 9, 3, 7, 2, 8, 4]
    sampler = EpochSampler(lengths, seed=1)
    first = list(sampler)
    assert sorted(first) == list(range(8))
    assert first == list(EpochSampler(lengths, seed=1))
    sampler.set_epoch(1)
    assert list(sampler) != first
    grouped = list(EpochSampler(lengths, seed=1, group=2))
    assert sorted(grouped) == list(range(8))
    pairs = sorted(tuple(sorted(lengths[i] for i in grouped[k : k + 2])) for k in range(0, 8, 2))
    assert pairs == [(1, 2), (3, 4), (5, 7), (8, 9)]


def test_a_stream_is_shuffled_and_never_held_whole():
    taken = 0

    def read():
        nonlocal taken
        for index in range(1000):
            taken += 1
            yield index

    stream = StreamedRows(read, buffer=10, seed=0)
    found = [row for row, _ in zip(stream, range(50), strict=False)]
    assert taken <= 62
    assert found != sorted(found)
    passes = [
        row for row, _ in zip(StreamedRows(lambda: range(7), buffer=3, seed=0), range(14), strict=False)
    ]
    assert sorted(passes[:7]) == sorted(passes[7:]) == list(range(7))
    with pytest.raises(ValueError, match="no row"):
        next(iter(StreamedRows(list, buffer=3, seed=0)))
