"""Predictions for rows: the same as one at a time, in order, and resumed after any stop."""

import csv
import json
import math

import pytest

from causal_qwen import CausalQwen2Processor
from causal_qwen.evaluation.predict import predict
from causal_qwen.evaluation.tables import GrowingTable
from conftest import tiny_causal, tiny_tokenizer

PROMPTS = [f"{'a very ' * (index % 5)}old thing of {index * 7} years costs " for index in range(23)]


@pytest.fixture(scope="module")
def processor():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<NUM>"]})
    return CausalQwen2Processor(tokenizer)


@pytest.fixture(scope="module")
def model():
    return tiny_causal(conformal_scores=[0.1 * rank for rank in range(40)])


def test_batches_equal_single_prompts_in_their_order(model, processor):
    together = list(predict(model, processor, PROMPTS, batch_size=3, level=0.8))
    for prompt, found in zip(PROMPTS, together, strict=True):
        alone = model.predict_number(processor([prompt], return_tensors="pt"), 0.8)
        for name in ("median", "lower", "upper", "prob_num"):
            assert getattr(found, name) == pytest.approx(getattr(alone, name).item(), rel=1e-3, abs=1e-5)
        assert found.lower <= found.median <= found.upper


def test_raw_intervals(model, processor):
    mapped = next(predict(model, processor, PROMPTS[:1]))
    raw = next(predict(model, processor, PROMPTS[:1], raw=True))
    assert raw.median == mapped.median
    assert raw.upper - raw.lower > mapped.upper - mapped.lower


def test_prompts_are_read_as_they_are_needed(model, processor):
    """Memory is bounded: eight batches of two are read before the first prediction leaves."""
    read = []

    def endless():
        index = 0
        while True:
            read.append(index)
            yield f"thing {index} costs "
            index += 1

    predictions = predict(model, processor, endless(), batch_size=2)
    next(predictions)
    assert len(read) == 16


@pytest.mark.parametrize(("prompt", "message"), [("", "prompt 1 is empty"), ("x" * 600, "600 tokens")])
def test_impossible_prompts_are_named(model, processor, prompt, message):
    with pytest.raises(ValueError, match=message):
        list(predict(model, processor, ["fine", prompt]))


def test_no_prompts_no_predictions(model, processor):
    assert list(predict(model, processor, [])) == []
    with pytest.raises(ValueError, match="batch_size is 0"):
        list(predict(model, processor, ["a"], batch_size=0))


# ---- tables


def rows(count):
    return [{"row": index, "prompt": f"„{index}“, \n", "median": index / 3} for index in range(count)]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_tables_are_read_back(tmp_path, suffix):
    out = tmp_path / f"out{suffix}"
    with GrowingTable(out, {"level": 0.9}) as table:
        for row in rows(5):
            table.write(row)
        assert table.finish() == 5
    if suffix == ".csv":
        with out.open(newline="", encoding="utf-8") as stream:
            back = [
                {"row": int(row["row"]), "prompt": row["prompt"], "median": float(row["median"])}
                for row in csv.DictReader(stream)
            ]
    elif suffix == ".jsonl":
        back = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    else:
        from pyarrow import parquet

        back = parquet.read_table(out).to_pylist()
    assert back == rows(5)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_table_goes_on_wherever_it_was_cut(tmp_path, cut):
    """The partial file cut at any byte: whole lines are kept, the rest is written again, nothing twice."""
    out = tmp_path / "out.jsonl"
    with GrowingTable(out, {"level": 0.9}) as table:
        for row in rows(4):
            table.write(row)
    partial = tmp_path / "out.jsonl.partial"
    whole = partial.read_bytes()
    partial.write_bytes(whole[: min(cut, len(whole))])
    with GrowingTable(out, {"level": 0.9}) as table:
        assert table.done <= 4
        for row in rows(6)[table.done :]:
            table.write(row)
        assert table.finish() == 6
    assert [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] == rows(6)


def test_other_settings_do_not_continue(tmp_path):
    with GrowingTable(tmp_path / "out.csv", {"level": 0.9}) as table:
        table.write({"row": 0})
    with pytest.raises(ValueError, match="begun with other settings"):
        GrowingTable(tmp_path / "out.csv", {"level": 0.5})


def test_other_settings_may_replace_an_attempt_without_rows(tmp_path):
    with GrowingTable(tmp_path / "out.jsonl", {"level": 0.9}):
        pass
    with GrowingTable(tmp_path / "out.jsonl", {"level": 0.5}) as table:
        table.write({"row": 0})
        assert table.finish() == 1
    assert (tmp_path / "out.jsonl").read_text() == '{"row": 0}\n'


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_an_empty_table_is_a_table(tmp_path, suffix):
    with GrowingTable(tmp_path / f"out{suffix}", {}) as table:
        assert table.finish() == 0
    assert (tmp_path / f"out{suffix}").exists()


def test_unknown_formats_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"choose \.csv, \.parquet or \.jsonl"):
        GrowingTable(tmp_path / "out.xlsx", {})
    assert list(tmp_path.iterdir()) == []


def test_predictions_are_numbers(model, processor):
    for found in predict(model, processor, PROMPTS):
        assert all(math.isfinite(entry) for entry in (found.median, found.lower, found.upper))
        assert 0 <= found.prob_num <= 1
