"""Files and mappings become rows; what is no row is named by its file and line."""

import json

import pytest

from causal_qwen.data import BadRow, BadRows, Reading, read_rows


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    import pandas

    rows = [{"name": "pear", "price": 1.5}, {"name": "plum, red", "price": 20.25}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pandas.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    pandas.DataFrame(rows).to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    reading = Reading("A {name} costs {price} coins.", "price")
    expected = [("A pear costs ", "1.5 coins."), ("A plum, red costs ", "20.25 coins.")]
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet"):
        examples = list(reading.examples(tmp_path / name, BadRows()))
        assert [(one.prompt, one.completion) for one in examples] == expected, name
        assert all(name in one.where for one in examples)
    assert len(list(read_rows([tmp_path / "a.csv", tmp_path / "a.json"]))) == 4
    assert len(list(read_rows(str(tmp_path / "a.*v")))) == 4


def test_iterables_of_mappings_are_read_as_they_are_needed():
    """As a `datasets` object is: it can be iterated, and its items are mappings."""

    class Rows:
        def __init__(self):
            self.taken = 0

        def __iter__(self):
            for number in range(1000):
                self.taken += 1
                yield {"text": f"number {number}"}

    source = Rows()
    reader = read_rows(source)
    assert next(reader) == ("row 0", {"text": "number 0"})
    assert next(reader) == ("row 1", {"text": "number 1"})
    assert source.taken == 2
    with pytest.raises(BadRow, match="row 1: int, not an object with fields"):
        list(read_rows([{"text": "one"}, 2]))


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
    reading, bad_rows = Reading("{name} {price}"), BadRows("skip")
    with pytest.raises(BadRow, match=rf"rows\.jsonl:2: .*{reason}"):
        list(reading.examples(path, BadRows()))
    assert [one.completion for one in reading.examples(path, bad_rows)] == ["fig 2", "nut 3"]
    assert bad_rows.count == 1


@pytest.mark.parametrize("row", ["pear,1,2", "pear"])
def test_a_ragged_csv_row_is_bad(tmp_path, row):
    path = tmp_path / "rows.csv"
    path.write_text(f"name,price\nfig,2\n{row}\n")
    with pytest.raises(BadRow, match=r"rows\.csv:3: .* cells than the header"):
        list(read_rows(path))


def test_unknown_files_are_refused(tmp_path):
    (tmp_path / "a.xlsx").touch()
    for source, message in (
        (tmp_path / "a.xlsx", "known are"),
        (tmp_path / "none.csv", "no such file"),
        (str(tmp_path / "*.csv"), "no such file"),
        ("package:no_such_package_x/a.csv", "not installed"),
    ):
        with pytest.raises(ValueError, match=message):
            list(read_rows(source))
