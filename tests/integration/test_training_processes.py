"""Processes that die, and processes that train together."""

import json
import random
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file

from causal_qwen.training.records import read_records
from training_runs import assert_same_weights, converted, finish, processes, recipe, start


@pytest.fixture(scope="module")
def model(base_directory, tmp_path_factory):
    return converted(base_directory, tmp_path_factory.mktemp("converted") / "model")


def assert_whole(checkpoints):
    """Every directory that can be taken for a checkpoint can be read to the end."""
    for path in checkpoints.glob("checkpoint-*"):
        assert load_file(path / "model.safetensors")
        assert torch.load(path / "optimizer.pt")["state"]
        assert torch.load(path / "rng_state.pth", weights_only=False)["cpu"].numel()
        assert json.loads((path / "trainer_state.json").read_text())["global_step"] == int(path.name[11:])


@pytest.mark.slow
def test_killed_ten_times_the_run_ends_with_the_same_weights(model, tmp_path):
    """At random moments, from the start of the process to some steps into training. A run that ends before
    the tenth kill is compared, and begun again.
    """
    options = {"save_steps": 1, "loss_impl": "sampled", "num_negatives": 20, "diagnostics": False}
    finish(start(recipe(tmp_path, model, output=str(tmp_path / "warm"), max_steps=1)))
    times = []
    for steps in (1, 20):  # after the first, the server has started
        begin = time.perf_counter()
        finish(
            start(recipe(tmp_path, model, output=str(tmp_path / f"whole{steps}"), max_steps=steps, **options))
        )
        times.append(time.perf_counter() - begin)
    latest = times[0] + (times[1] - times[0]) / 4
    killed = recipe(tmp_path, model, output=str(tmp_path / "killed"), max_steps=20, **options)
    moments, kills = random.Random(0), 0
    while kills < 10:
        child = start(killed, resume=True)
        child.join(timeout=moments.uniform(0, latest))
        kills += child.exitcode is None
        child.kill()
        child.join()
        assert_whole(tmp_path / "killed.run" / "checkpoints")
        if (tmp_path / "killed").exists():
            assert_same_weights(tmp_path / "whole20", tmp_path / "killed")
            shutil.rmtree(tmp_path / "killed")
    finish(start(killed, resume=True))
    assert_same_weights(tmp_path / "whole20", tmp_path / "killed")


OPTIONS = {"max_steps": 10, "accumulation": 2}  # into the second epoch


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """The run of one process, which the others are held against."""
    directory = tmp_path_factory.mktemp("alone")
    finish(start(recipe(directory, model, batch_size=4, **OPTIONS)))
    return directory / "out"


@pytest.mark.slow
def test_two_processes_follow_the_trajectory_of_one(model, tmp_path, alone):
    """Each with a copy of the model; those that share it are in test_training_shards.py."""
    processes(recipe(tmp_path, model, batch_size=2, **OPTIONS), 2)
    facts = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (facts["train/processes"], facts["train/sharded"]) == (2, 0)
    one, two = (read_records(output / "metrics.jsonl") for output in (alone, tmp_path / "out"))
    names = ("train/total_loss", "train/cls_loss_mean", "train/reg_loss_effective", "train/grad_norm")
    for name in names:
        expected = [record[name] for record in one if name in record]
        assert len(expected) == 10
        assert [record[name] for record in two if name in record] == pytest.approx(expected, rel=1e-3), name
    assert_same_weights(alone, tmp_path / "out", rtol=1e-2, atol=1e-3)
