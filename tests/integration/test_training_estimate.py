"""causal-qwen train --estimate, as a shell runs it."""

import json
import sys

import pytest
import yaml
from typer.testing import CliRunner

from causal_qwen.cli import app, main
from training_runs import TEMPLATE, converted, write_table

FLOPS = ("--flops", "1e12")


@pytest.fixture(scope="module")
def model(base_directory, tmp_path_factory):
    return converted(base_directory, tmp_path_factory.mktemp("converted") / "model")


def invoke(*arguments):
    result = CliRunner().invoke(app, ["train", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def estimated(*arguments):
    return json.loads(invoke(*arguments, "--estimate", "--json", *FLOPS).stdout)


def test_a_recipe_is_estimated_by_its_rows(model, tmp_path):
    table = write_table(tmp_path / "table.jsonl")
    config = tmp_path / "recipe.yaml"
    fields = {"data": str(table), "model": str(model), "template": TEMPLATE, "method": "full", "epochs": 2}
    config.write_text(yaml.safe_dump(fields | {"output": str(tmp_path / "out"), "batch_size": 4}))
    estimate = estimated(config)
    assert estimate["rows"] == 32  # of 40, a tenth to evaluate on and a tenth to calibrate on
    assert estimate["steps"] == 16
    assert 8 < estimate["batch"]["length"] < 60  # the longest row, not max_length
    assert estimate["batch"]["padded"]
    assert estimate["total"] == sum(estimate["bytes"][estimate["peak"]].values())
    assert estimate["seconds_per_step"] == estimate["flops_per_step"] / 1e12
    assert not list(tmp_path.glob("out*"))


def test_a_table_whose_head_is_solved_for_takes_no_step(model, tmp_path):
    table = write_table(tmp_path / "table.jsonl")
    estimate = estimated("--model", model, "--data", table, "--template", TEMPLATE, "--target", "price")
    assert estimate["steps"] == 0
    assert set(estimate["bytes"]) == {"loading", "solving"}


def test_tables_are_shown_and_the_rate_is_measured(model):
    shown = invoke("--model", model, "--estimate", "--max-steps", 5).stdout
    for word in ("parameters", "optimizer", "vocabulary loss", "framework", "last gradient", "total", "rate"):
        assert word in shown
    assert "the run takes at least" in shown
    unknown = invoke("--model", model, "--estimate", *FLOPS).stdout
    assert "not known: set max_steps" in unknown


def test_a_shape_is_estimated_without_a_hub(tmp_path):
    table = write_table(tmp_path / "table.jsonl")
    flags = ("--model", "Qwen2.5-72B", "--data", table, "--template", TEMPLATE, "--method", "full")
    flags += ("--device", "cuda", "--set", "bf16=true")
    whole = estimated(*flags)
    shared = estimated(*flags, "--processes", 8, "--set", "fsdp=true", "--set", "save_steps=0")
    assert whole["bytes"]["backward"]["framework"] == 0  # what a driver takes is not known here
    assert whole["steps"] == 12  # 32 rows in batches of 8, three times
    assert shared["bytes"]["backward"]["optimizer"] == pytest.approx(
        whole["bytes"]["backward"]["optimizer"] / 8, rel=0.01
    )
    assert shared["batch"]["length"] == 512


def test_what_is_not_here_has_no_rate():
    estimate = json.loads(
        invoke("--model", "Qwen2.5-0.5B", "--estimate", "--json", "--device", "xpu", "--max-steps", 2).stdout
    )
    assert estimate["flops_per_second"] is None
    assert estimate["hours"] is None


def test_a_mistake_gets_one_line(model, monkeypatch, capsys):
    for arguments, message in (
        (["--processes", "0"], "--processes is 0; at least 1"),
        (["--flops", "0"], "--flops is 0; it must be above 0"),
        (["--device", "gpu"], "--device is 'gpu'; it must be a type of torch's"),
        (["--set", "max_length=100000"], "max_length is 100000"),
        (["--set", "batch_size=0"], "'batch_size': 0 does not serve; it must be at least 1"),
        (["--model", "nobody/nothing"], "a shape can be named without one: Qwen2.5-0.5B"),
    ):
        monkeypatch.setattr(
            sys, "argv", ["causal-qwen", "train", "--model", str(model), "--estimate", *arguments]
        )
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().err


def test_options_of_the_estimate_are_no_options_of_a_run(model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["causal-qwen", "train", "--model", str(model), "--processes", "2"])
    with pytest.raises(SystemExit):
        main()
    assert "go with --estimate" in capsys.readouterr().err
