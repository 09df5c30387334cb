"""causal-qwen predict: one row, standard output, the columns of the input, tables without rows."""

import csv
import gzip
import io
import json

import pytest
from typer.testing import CliRunner

from causal_qwen.cli import app
from causal_qwen.data import BadRow

TEMPLATE = "A car of {weight} kg drives {range} km."
ASKED = ("--template", TEMPLATE, "--target", "range")
OURS = ["row", "source", "prompt", "median", "lower", "upper", "prob_num", "extrapolates"]


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def converted(base_directory, tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "model"
    invoke("convert", base_directory, out, "--calibration", "none")
    return out


def test_one_row(converted):
    """As JSON and as pairs; a table for people, JSON for programs."""
    typed = ("--row", '{"weight": 900.25, "id": "x[/b]7"}')
    pairs = ("--row", "weight=900.25", "--row", "id=x[/b]7")
    shown = invoke("predict", converted, *typed, *ASKED).stdout
    assert "A car of 900.25 kg drives" in shown
    assert "90% interval" in shown
    records = [
        json.loads(invoke("predict", converted, *row, *ASKED, "--json").stdout) for row in (typed, pairs)
    ]
    assert list(records[0]) == [*OURS, "weight", "id"]
    assert records[0]["median"] == records[1]["median"]
    assert records[0]["lower"] <= records[0]["median"] <= records[0]["upper"]
    assert [record["weight"] for record in records] == [900.25, "900.25"]


def test_tables_on_standard_output_keep_the_columns_of_the_input(converted, tmp_path):
    data = tmp_path / "cars.csv.gz"
    data.write_bytes(
        gzip.compress("id;weight;row;name\n0017;900;a;café\n0018;1200.50;b;NA\n".encode("latin-1"))
    )
    options = (*ASKED, "--encoding", "latin-1")
    for output in ((), ("-o", "-")):
        printed = invoke("predict", converted, data, *options, *output).stdout
        first, second = csv.DictReader(io.StringIO(printed))
        assert list(first) == [*OURS, "id", "weight", "input_row", "name"]
        assert (first["id"], first["input_row"], first["name"]) == ("0017", "a", "café")
        assert (second["weight"], second["name"]) == ("1200.50", "NA")  # as they came
        assert (second["row"], second["prompt"]) == ("1", "A car of 1200.5 kg drives ")
    lines = invoke("predict", converted, data, *options, "--format", "jsonl").stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["0017", "0018"]
    written = tmp_path / "out.parquet"
    invoke("predict", converted, data, *options, "-o", written)
    from pyarrow import parquet

    assert parquet.read_table(written).column_names == [*OURS, "id", "weight", "input_row", "name"]


def test_an_empty_table_has_its_header(converted, tmp_path):
    data = tmp_path / "cars.csv"
    data.write_text("\ufeffid,weight\n", encoding="utf-8")
    header = ",".join([*OURS, "id", "weight"])
    assert invoke("predict", converted, data, *ASKED).stdout == header + "\n"
    invoke("predict", converted, data, *ASKED, "-o", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text(encoding="utf-8").splitlines() == [header]
    invoke("predict", converted, data, *ASKED, "-o", tmp_path / "out.parquet")
    from pyarrow import parquet

    assert parquet.read_table(tmp_path / "out.parquet").column_names == header.split(",")


def test_rows_of_different_fields_share_a_table(converted, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "It costs ", "tags": ["a"]}\n{"prompt": "It is ", "size": NaN}\n')
    invoke("predict", converted, data, "-o", tmp_path / "out.csv")
    first, second = csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text(encoding="utf-8")))
    assert (first["tags"], first["size"], first["input_prompt"]) == ('["a"]', "", "It costs ")
    assert (second["tags"], second["size"]) == ("", "")
    with pytest.raises(ValueError, match=r"row 1 has the field 'size'.*--format jsonl"):
        invoke("predict", converted, data)


def test_what_is_too_long_is_named_or_skipped(converted, tmp_path):
    """A cell that csv itself would refuse, in a row that the model cannot read."""
    data = tmp_path / "rows.csv"
    data.write_text(f"prompt\nIt costs\n{'long ' * 30_000}\nIt is\n")
    with pytest.raises(BadRow, match=r"rows\.csv:3: a prompt of 150000 tokens .* the context of 512"):
        invoke("predict", converted, data)
    result = invoke("predict", converted, data, "--on-bad-row", "skip")
    assert len(result.stdout.splitlines()) == 3
    assert "2 rows predicted; 1 row skipped: a prompt of 150000 tokens" in result.stderr
    table = tmp_path / "table.csv"
    table.write_text(f"weight,range\n900,1\n{'x' * 150_000},2\n950,3\n")
    with pytest.raises(BadRow, match=r"table\.csv:3: 150\d+ tokens; max_length is 512"):
        invoke("eval", converted, table, *ASKED, "--no-report", "--max-length", 100_000)
    measured = invoke(
        "eval",
        converted,
        table,
        *ASKED,
        "--no-report",
        "--json",
        "--max-length",
        100_000,
        "--on-bad-row",
        "skip",
    )
    assert json.loads(measured.stdout)["bad_rows"] == 1
    assert json.loads(measured.stdout)["numbers"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a file with rows, or give one with --row"),
        (("data.csv", "--row", "a=1"), "not both"),
        (("--row", "{broken"), "--row {broken: broken JSON"),
        (("--row", "weight"), "write NAME=VALUE"),
        (("--row", "weight=1", "--row", "weight=2"), "given twice"),
        (("--row", "weight=1", "--row", "{}"), "give one of them"),
        (("--row", "weight=1e999", *ASKED), "weight is 1e999"),
        (("--row", "wieght=1", *ASKED), "did you mean 'wieght'"),
        (("--row", "weight=1", "--format", "parquet"), "written to a file"),
        (("--row", "weight=1", "--json", "--format", "csv"), "give one of them"),
        (("none.csv",), "none.csv: no such file"),
        (("none.csv", "--delimiter", "ab"), "delimiter is 'ab'"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(converted, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("causal_qwen.cli.predict.load_predictor", None)
    with pytest.raises(ValueError, match=message.replace("{", r"\{").replace("(", r"\(")):
        invoke("predict", converted, *arguments)
    assert list(tmp_path.iterdir()) == []
