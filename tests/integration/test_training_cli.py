"""causal-qwen train, as a shell runs it."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from causal_qwen.cli import app, main
from causal_qwen.training import TrainingRecipe
from training_runs import TEMPLATE, converted, write_table

CONFIGS = sorted((Path(__file__).parents[2] / "examples" / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def model(base_directory, tmp_path_factory):
    return converted(base_directory, tmp_path_factory.mktemp("converted") / "model")


def invoke(*arguments):
    result = CliRunner().invoke(app, ["train", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_example_configs_are_recipes(path):
    assert TrainingRecipe.from_yaml(path).data


def test_a_dry_run_shows_what_the_model_will_see(model, tmp_path):
    table = write_table(tmp_path / "table.jsonl")
    flags = ("--model", model, "--data", table, "--template", TEMPLATE, "--target", "price", "--dry-run")
    shown = invoke(*flags).stdout
    assert "<NUM" in shown
    assert "2 learned" in shown  # the number and the end
    assert "value_spread" in shown
    assert "packed rows" in invoke(*flags, "--set", "packing=true", "--set", "max_length=64").stdout
    assert not list(tmp_path.glob("*.run"))


def test_prompts_keep_their_digits_unless_values_are_asked_for(model, tmp_path):
    table = write_table(tmp_path / "table.jsonl")
    flags = ("--model", model, "--data", table, "--template", TEMPLATE, "--target", "price", "--dry-run")
    assert invoke(*flags).stdout.count("<NUM") == 3  # the prices of three rows
    assert invoke(*flags, "--numbers", "value").stdout.count("<NUM") == 6


def test_templates_may_be_repeated(model, tmp_path):
    table = write_table(tmp_path / "table.jsonl")
    flags = ("--model", model, "--data", table, "--target", "price", "--template", TEMPLATE)
    shown = invoke(
        *flags,
        "--template",
        "{size} of {name} for {price}",
        "--dry-run",
        "--set",
        "seed=1",
        "--method",
        "full",
    ).stdout
    assert " makes" in shown
    assert " for" in shown
    with pytest.raises(ValueError, match=r"template 2 of 2 \('{size}'\): the template has no field 'price'"):
        invoke(*flags, "--template", "{size}", "-o", tmp_path / "out")


def test_flags_stand_above_the_config(model, tmp_path):
    table = write_table(tmp_path / "table.jsonl")
    config = tmp_path / "recipe.yaml"
    fields = {"data": str(table), "model": str(model), "template": TEMPLATE, "batch_size": 4, "max_steps": 50}
    config.write_text(yaml.safe_dump(fields))
    out = tmp_path / "out"
    result = invoke(config, "-o", out, "--max-steps", 2, "--set", "save_steps=0", "--json")
    printed = json.loads(result.stdout)
    assert printed["metrics"]["train/steps"] == 2
    assert "max_steps: 2" in (out / "recipe.yaml").read_text()


def test_a_mistake_gets_one_line(model, tmp_path, monkeypatch, capsys):
    table = write_table(tmp_path / "table.jsonl")
    for arguments, message in (
        (["--data", str(table), "-o", "x", "--set", "batchsize=2"], "did you mean 'batch_size'"),
        (["--data", str(table), "-o", "x", "--set", "batch_size"], "KEY=VALUE"),
        (["--data", str(table)], "output is missing"),
        ([str(tmp_path / "none.yaml")], "no such file"),
        (["--model", str(model), "-o", str(tmp_path / "o"), "--data", str(table)], "give a template"),
    ):
        monkeypatch.setattr(sys, "argv", ["causal-qwen", "train", *arguments])
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().err
