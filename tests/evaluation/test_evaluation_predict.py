"""Predictions for rows: the same as one at a time, in order, and resumed after any stop."""

import csv
import json
import math

import pytest

from causal_qwen.data import BadRow, BadRows, Reading
from causal_qwen.evaluation import predict
from causal_qwen.evaluation.tables import GrowingTable
from conftest import tiny_causal, tiny_processor

PROMPTS = [f"{'a very ' * (index % 5)}old thing of {index * 7} years costs " for index in range(23)]
ROWS = [{"prompt": prompt} for prompt in PROMPTS]


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


@pytest.fixture(scope="module")
def model():
    return tiny_causal(conformal_scores=[0.1 * rank for rank in range(40)])


def test_batches_equal_single_prompts_in_their_order(model, processor):
    together = list(predict(model, processor, ROWS, batch_size=3, level=0.8))
    for index, (prompt, prediction) in enumerate(zip(PROMPTS, together, strict=True)):
        assert (prediction.source, prediction.prompt) == (f"row {index}", prompt)
        alone = model.predict_number(processor([prompt], return_tensors="pt"), 0.8)
        for name in ("median", "lower", "upper", "prob_num"):
            assert getattr(prediction, name) == pytest.approx(getattr(alone, name).item(), rel=1e-3, abs=1e-5)
        assert prediction.lower <= prediction.median <= prediction.upper


def test_raw_intervals(model, processor):
    mapped = next(predict(model, processor, ROWS[:1]))
    raw = next(predict(model, processor, ROWS[:1], raw=True))
    assert raw.median == mapped.median
    assert raw.upper - raw.lower > mapped.upper - mapped.lower


def test_prompts_are_read_as_they_are_needed(model, processor):
    """Memory is bounded: eight batches of two are read before the first prediction leaves."""
    read = []

    def endless():
        index = 0
        while True:
            read.append(index)
            yield {"prompt": f"thing {index} costs "}
            index += 1

    predictions = predict(model, processor, endless(), batch_size=2)
    next(predictions)
    assert len(read) == 16


def test_files_are_read_with_the_template_that_a_model_carries(model, processor, tmp_path):
    (tmp_path / "recipe.yaml").write_text("template: A {name} costs {price} coins.\ntarget: price\n")
    reading = Reading.of(tmp_path)
    names = ["pear", "plum", "very long name of a fruit"]
    table = tmp_path / "new.csv"
    table.write_text("\n".join(["name", *names]) + "\n")
    by_file = list(predict(model, processor, table, reading=reading))
    by_rows = list(predict(model, processor, [{"name": name} for name in names], reading=reading))
    assert [one.source for one in by_file] == [f"{table}:{line}" for line in (2, 3, 4)]
    assert [one.prompt for one in by_file] == [f"A {name} costs " for name in names]
    assert [one.median for one in by_file] == [one.median for one in by_rows]


@pytest.mark.parametrize(
    ("prompt", "message"), [("", "row 1: prompt is empty"), ("x" * 600, "row 1: a prompt of 600 tokens")]
)
def test_impossible_prompts_are_named_or_skipped(model, processor, prompt, message):
    rows = [{"prompt": "fine"}, {"prompt": prompt}, {"prompt": "good"}]
    with pytest.raises(BadRow, match=message):
        list(predict(model, processor, rows))
    bad_rows = BadRows("skip")
    predictions = list(predict(model, processor, rows, bad_rows=bad_rows))
    assert [one.prompt for one in predictions] == ["fine", "good"]
    assert bad_rows.count == 1


def test_a_run_goes_on_behind_the_rows_that_were_predicted(model, processor):
    rows = [*ROWS[:4], {"prompt": ""}, *ROWS[4:]]
    whole, rest = (
        list(predict(model, processor, rows, bad_rows=BadRows("skip"), batch_size=2, start=start))
        for start in (0, 7)
    )
    assert [one.prompt for one in rest] == PROMPTS[7:]
    for one, other in zip(whole[7:], rest, strict=True):
        assert one.median == pytest.approx(other.median, rel=1e-3, abs=1e-5)


def test_no_rows_no_predictions(model, processor):
    assert list(predict(model, processor, [])) == []
    with pytest.raises(ValueError, match="batch_size is 0"):
        list(predict(model, processor, ROWS, batch_size=0))


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
    for prediction in predict(model, processor, ROWS):
        assert all(math.isfinite(entry) for entry in (prediction.median, prediction.lower, prediction.upper))
        assert 0 <= prediction.prob_num <= 1
