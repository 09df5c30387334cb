"""Every command that takes a model says in one line what is wrong with it, and writes nothing."""

import shutil

import pytest

from causal_qwen import convert
from causal_qwen.cli import main
from damage import DAMAGES

COMMANDS = {
    "convert": ["convert", "MODEL", "out"],
    "generate": ["generate", "MODEL", "hello"],
    "chat": ["chat", "MODEL"],
    "counterfactual": ["counterfactual", "MODEL", "hello", "--do", "bye"],
    "predict": ["predict", "MODEL", "rows.jsonl", "-o", "out.csv", "--template", "{a} is {b}"],
    "eval": ["eval", "MODEL", "rows.jsonl", "--template", "{a} is {b}", "--no-report"],
    "train": ["train", "--model", "MODEL", "--data", "rows.jsonl", "--template", "{a} is {b}", "-o", "out"],
    "train --dry-run": ["train", "--model", "MODEL", "--data", "rows.jsonl", "--dry-run"],
    "parity": ["parity", "MODEL"],
    "info": ["info", "MODEL"],
    "kv-memory": ["kv-memory", "MODEL"],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(base_directory, tmp_path_factory):
    """A base and a converted model."""
    directory = tmp_path_factory.mktemp("models")
    shutil.copytree(base_directory, directory / "base")
    convert(base_directory, directory / "converted", calibration="none")
    return directory


def error_of(command, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["causal-qwen", *command])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if line.startswith("error: ")]
    assert lines[-1] == error
    assert not any("Traceback" in line for line in lines)
    return error


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "kv-memory"])
def test_a_truncated_base_is_one_line(models, tmp_path, monkeypatch, capsys, name):
    assert_one_line(models / "base", "truncated weights", name, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", ["generate", "chat", "counterfactual", "predict", "eval", "train", "info"])
def test_a_truncated_converted_model_is_one_line(models, tmp_path, monkeypatch, capsys, name):
    assert_one_line(models / "converted", "truncated weights", name, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_list_as_configuration_is_one_line(models, tmp_path, monkeypatch, capsys, name):
    assert_one_line(models / "base", "config is a list", name, tmp_path, monkeypatch, capsys)


def assert_one_line(model, damage, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "model")
    change, _ = DAMAGES[damage]
    change(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "x", "a": "x", "b": 1}\n')
    command = ["model" if word == "MODEL" else word for word in COMMANDS[name]]
    assert error_of(command, monkeypatch, capsys).startswith("error: model: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "rows.jsonl"]


def test_the_output_is_checked_before_the_model(tmp_path, monkeypatch, capsys):
    """./nowhere would be an error as well: the first one is of the output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"text": "x", "a": "x", "b": 1}\n')
    for command in (
        ["convert", "./nowhere", "file/out"],
        ["train", "--model", "./nowhere", "--data", "rows.jsonl", "-o", "file/out"],
        ["predict", "./nowhere", "rows.jsonl", "-o", "file/out.csv"],
        ["eval", "./nowhere", "rows.jsonl", "--report", "file/report.html"],
        ["simulate", "--plot", "file/plot.png"],
        ["demo", "--base", "./nowhere", "--out", "file/demo"],
    ):
        assert "file is a file, not a directory" in error_of(command, monkeypatch, capsys), command
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "rows.jsonl"]


def test_the_space_is_checked_before_the_weights_are_read(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("causal_qwen.conversion.checkpoints.Checkpoint.bytes", lambda self, dtype: 10**17)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "x"}\n')
    for command in (
        ["convert", str(models / "base"), str(tmp_path / "out")],
        ["train", "--model", str(models / "base"), "--data", str(rows), "-o", str(tmp_path / "out")],
    ):
        assert "out: not enough space" in error_of(command, monkeypatch, capsys)
    assert list(tmp_path.iterdir()) == [rows]


def test_a_base_is_not_written_over(models, monkeypatch, capsys):
    command = ["convert", str(models / "base"), str(models / "base"), "--overwrite"]
    assert "holds the base itself" in error_of(command, monkeypatch, capsys)
    assert (models / "base" / "config.json").is_file()


def test_a_device_that_is_not_there(models, monkeypatch, capsys):
    for verb in (
        ["generate", "MODEL", "x"],
        ["chat", "MODEL"],
        ["parity", "MODEL"],
        ["counterfactual", "MODEL", "x"],
    ):
        command = [str(models / "converted") if word == "MODEL" else word for word in verb]
        line = error_of([*command, "--device", "tpu"], monkeypatch, capsys)
        assert line == "error: device 'tpu' is not available; here there is cpu"
