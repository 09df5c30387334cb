"""causal-qwen eval and predict, as a shell runs them."""

import base64
import csv
import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from causal_qwen.cli import app, main

TEMPLATE = "A car of {weight} kg drives {range} km."


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def converted(base_directory, tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "model"
    invoke("convert", base_directory, out, "--calibration", "none")
    return out


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "cars.csv"
    lines = ["weight,range", *(f"{900 + 7 * index},{300 + index}" for index in range(40))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_eval_prints_every_metric_and_writes_a_report(converted, table, tmp_path):
    report = tmp_path / "deep" / "report.html"
    arguments = ("eval", converted, table, "--template", TEMPLATE, "--target", "range", "--report", report)
    measured = json.loads(invoke(*arguments, "--json").stdout)
    assert measured["numbers"] == 40
    assert {"eval/num_f1", "eval/reg_mdae", "eval/coverage_90", "eval/coverage_90_raw", "eval/ece"} <= set(
        measured
    )
    assert measured["report"] == str(report)
    page = report.read_text(encoding="utf-8")
    assert len(re.findall("<img", page)) == 4
    assert 'src="http' not in page
    for picture in re.findall(r"base64,([^\"]+)", page):
        assert base64.b64decode(picture).startswith(b"\x89PNG")
    assert "eval/reg_mdae" in page


def test_a_trained_model_brings_its_template(converted, table, tmp_path):
    from causal_qwen.training.recipe import TrainingRecipe

    trained = tmp_path / "trained"
    shutil.copytree(converted, trained)
    recipe = TrainingRecipe(output="trained", template=TEMPLATE, target="range", append_eos=False)
    (trained / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    template = ("--template", TEMPLATE, "--target", "range")
    measured = [
        json.loads(invoke("eval", model, table, "--json", *options).stdout)
        for model, options in ((trained, ()), (converted, template))
    ]
    assert [one["numbers"] for one in measured] == [40, 40]
    assert measured[0]["report"] is None  # with --json nothing is written unless it is asked for
    assert measured[1]["tokens"] - measured[0]["tokens"] == 40  # its recipe has no end-of-text tokens
    invoke("predict", trained, table, "-o", tmp_path / "out.jsonl")
    first = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["prompt"] == "A car of 900 kg drives "


def test_eval_of_plain_text_has_no_numbers(converted, tmp_path):
    text = tmp_path / "words.txt"
    text.write_text("There is nothing to count here. " * 20)
    report = tmp_path / "report.md"
    result = invoke("eval", converted, text, "--report", report, "--json")
    measured = json.loads(result.stdout)  # NaN would not be JSON
    assert measured["eval/reg_mdae"] is None
    assert measured["numbers"] == 0
    assert measured["eval/accuracy"] >= 0
    assert report.read_text(encoding="utf-8").count("![") == 1


def test_eval_skips_bad_rows_when_asked(converted, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "It costs 5 euros."}\nnonsense\n{"prompt": "It costs ", "completion": "7"}\n')
    arguments = ("eval", converted, data, "--no-report", "--json")
    measured = json.loads(invoke(*arguments, "--on-bad-row", "skip").stdout)
    assert measured["bad_rows"] == 1
    assert measured["numbers"] == 2
    with pytest.raises(ValueError, match=r"rows\.jsonl:2"):
        invoke(*arguments)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_predict_writes_one_line_per_row(converted, table, tmp_path, suffix):
    out = tmp_path / f"out.{suffix}"
    options = ("--template", TEMPLATE, "--target", "range", "--level", "0.5")
    summary = json.loads(invoke("predict", converted, table, "-o", out, *options, "--json").stdout)
    assert summary["rows"] == 40
    assert summary["intervals"] == "cauchy"
    with out.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream)) if suffix == "csv" else [json.loads(line) for line in stream]
    assert [int(row["row"]) for row in rows] == list(range(40))
    assert rows[3]["prompt"] == "A car of 921 kg drives "
    assert rows[3]["source"].endswith("cars.csv:5")
    for row in rows:
        assert float(row["lower"]) <= float(row["median"]) <= float(row["upper"])
        assert 0 <= float(row["prob_num"]) <= 1


def test_predict_continues_and_ends_with_the_same_table(converted, table, tmp_path, monkeypatch):
    """Stopped in the middle of a row's write, and begun again."""
    options = ("--template", TEMPLATE, "--target", "range", "--batch-size", 2)
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    invoke("predict", converted, table, "-o", whole, *options)
    from causal_qwen.evaluation.tables import GrowingTable

    written = GrowingTable.write

    def fail(self, row):
        if row["row"] == 21:
            self.stream.write('{"row": 21, "prom')
            raise KeyboardInterrupt
        written(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(GrowingTable, "write", fail)
        arguments = ["predict", converted, table, "-o", stopped, *options]
        assert CliRunner().invoke(app, [str(argument) for argument in arguments]).exit_code
    assert not stopped.exists()
    assert (tmp_path / "stopped.jsonl.partial").exists()
    summary = json.loads(invoke("predict", converted, table, "-o", stopped, *options, "--json").stdout)
    assert summary["continued_from"] == 21
    first, second = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (whole, stopped)
    )
    assert [row["prompt"] for row in first] == [row["prompt"] for row in second]
    for one, other in zip(first, second, strict=True):
        assert one["median"] == pytest.approx(other["median"], rel=1e-4)
    assert not (tmp_path / "stopped.jsonl.partial").exists()


def test_predict_reads_prompts_texts_and_missing_targets(converted, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "It costs "}\n{"text": "They are "}\n')
    invoke("predict", converted, data, "-o", tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["It costs ", "They are "]
    unknown = tmp_path / "unknown.csv"
    unknown.write_text("weight\n1000\n")
    options = ("--template", TEMPLATE, "--target", "range")
    invoke("predict", converted, unknown, "-o", tmp_path / "known.csv", *options)
    assert (tmp_path / "known.csv").read_text().count("A car of 1000 kg drives ") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "out.xlsx"], "choose .csv, .parquet or .jsonl"),
        (["-o", "out.csv", "--level", "1.5"], "strictly between 0 and 1"),
        (["-o", "there.csv"], "there.csv exists"),
        (["-o", "out.csv", "--template", TEMPLATE, "--target", "price"], "no field 'price'"),
    ],
)
def test_mistakes_get_one_line(converted, table, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.csv").touch()
    monkeypatch.setattr("sys.argv", ["causal-qwen", "predict", str(converted), str(table), *options])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_eval_and_predict_run_on_the_native_engine(converted, table, dtype):
    rows = (converted, table, "--template", TEMPLATE, "--target", "range", "--json", "--dtype")
    native = ("--engine", "native")
    measured = json.loads(invoke("eval", *rows, dtype, *native).stdout)
    assert measured["numbers"] == 40
    predicted = [json.loads(line) for line in invoke("predict", *rows, dtype, *native).stdout.splitlines()]
    assert len(predicted) == 40
    if dtype == "float32":
        reference = json.loads(invoke("eval", *rows, dtype, "--engine", "transformers").stdout)
        for name in ("eval/reg_mdae", "eval/width_90_median", "eval/softmax_nll", "eval/coverage_90"):
            assert measured[name] == pytest.approx(reference[name], rel=1e-3)


@pytest.mark.parametrize("command", ["eval", "predict"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dtype", "int8", "--engine", "transformers"), "--dtype int8 needs --engine native"),
        (
            ("--dtype", "float16", "--engine", "native"),
            "--dtype float16 is not the native engine's; give float32",
        ),
        (
            ("--device", "cuda", "--engine", "native"),
            "--device cuda: the native engine runs on the CPU; give",
        ),
    ],
    ids=["int8 on transformers", "float16 on native", "native on a GPU"],
)
def test_a_precision_or_device_that_an_engine_lacks_is_named(converted, table, command, options, message):
    arguments = (command, converted, table, "--template", TEMPLATE, "--target", "range", *options)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
