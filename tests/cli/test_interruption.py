"""An interrupted command cleans up, says what is kept and how to go on, and ends with the signal's code."""

import os
import shlex
import signal

import pytest

from causal_qwen import convert
from command_processes import start, wait_for
from training_runs import TEMPLATE, write_table

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture(scope="module")
def model(base_directory, tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted") / "model"
    convert(base_directory, directory, calibration="none")
    return directory


def end(child, number):
    os.kill(child.pid, number)
    child.join(timeout=30)
    if child.is_alive():
        child.kill()
    assert child.exitcode == CODES[number]


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_conversion_keeps_nothing(base_directory, tmp_path, number):
    place, stderr = tmp_path / "place", tmp_path / "stderr"
    place.mkdir()
    (place / "out").mkdir()
    (place / "out" / "old").write_text("old")
    command = ["convert", base_directory, "out", "--overwrite", "--calibration", "none"]
    child = start(command, directory=place, stderr=stderr, slow=True)
    wait_for(lambda: list(place.glob(".out.*.partial/model.safetensors")), child)
    end(child, number)
    assert [path.name for path in place.rglob("*")] == ["out", "old"]
    assert stderr.read_text().splitlines()[-1] == "interrupted: nothing is kept"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_training_says_how_to_go_on(model, tmp_path, number):
    stderr = tmp_path / "stderr"
    table = write_table(tmp_path / "table.jsonl")
    place = tmp_path / "place"
    place.mkdir()
    flags = ["--set", "save_steps=2", "--set", "max_length=64", "--batch-size", "4"]
    command = ["train", "--model", model, "--data", table, "--template", TEMPLATE, "-o", "out", *flags]
    checkpoints = place / "out.run" / "checkpoints"
    child = start([*command, "--max-steps", "5000"], directory=place, stderr=stderr, OMP_NUM_THREADS="1")
    wait_for(lambda: list(checkpoints.glob("checkpoint-*")), child)
    end(child, number)
    assert [path.name for path in place.iterdir()] == ["out.run"]
    assert not [path for path in checkpoints.iterdir() if path.name.startswith(".")]
    line = stderr.read_text().splitlines()[-1]
    kept, _, command = line.partition(" is kept; go on with: ")
    assert kept.startswith("interrupted: out.run/checkpoints/checkpoint-")
    verb, *arguments = shlex.split(command)
    assert (verb, arguments[0], arguments[-1]) == ("causal-qwen", "train", "--resume")
    assert arguments[arguments.index("--template") + 1] == TEMPLATE


def test_training_without_a_checkpoint_leaves_nothing(model, tmp_path):
    """Before the first one there is nothing to go on from, and the same command begins anew."""
    place, stderr = tmp_path / "place", tmp_path / "stderr"
    place.mkdir()
    table = write_table(tmp_path / "table.jsonl")
    command = ["train", "--model", model, "--data", table, "--template", TEMPLATE, "-o", "out"]
    child = start([*command, "--max-steps", "5000"], directory=place, stderr=stderr, OMP_NUM_THREADS="1")
    wait_for(lambda: (place / "out.run" / "run.json").is_file(), child)
    end(child, signal.SIGTERM)
    assert not list(place.iterdir())
    assert "interrupted: nothing is kept, there was no checkpoint yet" in stderr.read_text()
