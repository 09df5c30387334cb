"""Parameters that processes share: the trajectory of one process, sharded checkpoints, how runs go on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from causal_qwen.training import train
from causal_qwen.training.checkpoints import last_checkpoint
from causal_qwen.training.records import read_records
from training_runs import (
    assert_same_weights,
    converted,
    ended,
    finish,
    processes,
    recipe,
    start,
    start_together,
    weights,
    write_table,
)

# Of 60 rows 21 calibrate and 33 are trained on: eight fill a step, the last one of an epoch has a single row,
# and ten steps reach into the second epoch.
ROWS = 60
OPTIONS = {
    "max_steps": 10, "accumulation": 2, "fsdp": True, "save_steps": 2, "calibration_fraction": 0.35,
    "precision_proof": False,
}  # fmt: skip
ALONE, TOGETHER = {"batch_size": 4}, {"batch_size": 2}
KILLED_AT = 8  # while this checkpoint is written; the last whole one is that of step 6
ROUNDING = {"rtol": 1e-2, "atol": 1e-3}
NAMES = ("train/total_loss", "train/cls_loss_mean", "train/reg_loss_effective", "train/grad_norm")


@pytest.fixture(scope="module")
def model(base_directory, tmp_path_factory):
    return converted(base_directory, tmp_path_factory.mktemp("converted") / "model")


class Runs:
    """Runs of one method on one table, each made when it is first asked for."""

    def __init__(self, directory, model, **options):
        write_table(directory / "table.jsonl", rows=ROWS)
        self.directory, self.model, self.options = directory, model, OPTIONS | options

    def recipe(self, name, **options):
        return recipe(self.directory, self.model, output=str(self.directory / name), **self.options | options)

    def once(self, name, count):
        """The uninterrupted run of ``count`` processes."""
        if not (self.directory / name).exists():
            if count == 1:
                finish(start(self.recipe(name, **ALONE)))
            else:
                processes(self.recipe(name, **TOGETHER), count)
        return self.directory / name

    @property
    def alone(self):
        return self.once("alone", 1)

    @property
    def together(self):
        return self.once("together", 2)

    def killed(self, count):
        """The workspace of a run of ``count`` processes, the first of which was killed."""
        workspace = self.directory / f"killed{count}.run"
        if not workspace.exists():
            made = self.recipe(f"killed{count}", **(ALONE if count == 1 else TOGETHER))
            if count == 1:
                assert ended(start(made, killed_at=KILLED_AT)) == [-signal.SIGKILL]
            else:
                assert ended(*start_together(made, count, killed_at=KILLED_AT)) == [-signal.SIGKILL, 1]
        return workspace

    def copied(self, count, name):
        """That workspace under another name."""
        workspace = self.directory / f"{name}.run"
        shutil.copytree(self.killed(count), workspace)
        return workspace


@pytest.fixture(scope="module")
def full(model, tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("full"), model)


@pytest.fixture(scope="module", params=["full", "lora"])
def runs(request, model, tmp_path_factory):
    if request.param == "full":
        return request.getfixturevalue("full")
    return Runs(tmp_path_factory.mktemp("lora"), model, method="lora")


def recorded(output):
    """What every step was recorded with."""
    records = [record for record in read_records(output / "metrics.jsonl") if NAMES[0] in record]
    assert [record["step"] for record in records] == list(range(1, 11))
    return [[record[name] for name in NAMES] for record in records]


def assert_same_run(one, other):
    """To rounding: of each step, of the weights, and of what is solved for and calibrated at the end."""
    for expected, values in zip(recorded(one), recorded(other), strict=True):
        assert values == pytest.approx(expected, rel=1e-3)
    assert_same_weights(one, other, **ROUNDING)
    expected, values = (json.loads((output / "evaluation.json").read_text()) for output in (one, other))
    for name in ("eval/reg_mdae", "eval/coverage_90", "eval/width_90_median", "eval/accuracy"):
        assert values[name] == pytest.approx(expected[name], rel=1e-2), name
    assert len(scores(one)) == 21
    assert scores(other) == pytest.approx(scores(one), rel=1e-2)


def scores(output):
    """From which intervals are made."""
    return json.loads((output / "config.json").read_text())["conformal_scores"]


@pytest.mark.slow
def test_processes_that_share_parameters_follow_the_trajectory_of_one(runs):
    facts = json.loads((runs.together / "evaluation.json").read_text())
    assert (facts["train/processes"], facts["train/sharded"]) == (2, 1)
    assert_same_run(runs.alone, runs.together)
    assert (runs.together / "adapter").is_dir() == (runs.options.get("method") == "lora")
    assert not runs.directory.joinpath("together.run").exists()


@pytest.mark.slow
def test_a_killed_run_resumed_by_as_many_is_the_uninterrupted_one(runs):
    """One of two is killed in the middle of writing a checkpoint; the other one ends too."""
    workspace = runs.copied(2, "resumed")
    assert last_checkpoint(workspace / "checkpoints").name == "checkpoint-6"
    processes(runs.recipe("resumed", **TOGETHER), 2, resume=True)
    assert_same_weights(runs.together, runs.directory / "resumed")
    assert recorded(runs.directory / "resumed") == recorded(runs.together)


@pytest.mark.slow
def test_a_run_of_two_goes_on_with_one(runs):
    runs.copied(2, "left")
    finish(start(runs.recipe("left", **ALONE), resume=True))
    assert_same_run(runs.together, runs.directory / "left")


@pytest.mark.slow
def test_a_run_of_one_goes_on_with_two(full):
    full.copied(1, "joined")
    processes(full.recipe("joined", **TOGETHER), 2, resume=True)
    assert_same_run(full.alone, full.directory / "joined")


@pytest.mark.slow
def test_another_number_of_rows_per_step_is_refused(full):
    full.copied(2, "fewer")
    with pytest.raises(
        ValueError, match=r"begun with 8 \(2 × 2 × 2\) rows per step, .*, not 4 \(1 × 2 × 2\); resume it with"
    ):
        train(full.recipe("fewer", **TOGETHER), resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_a_checkpoint_with_a_damaged_shard_is_named(full, part, damage):
    name = f"{damage}-{part}"
    checkpoint = last_checkpoint(full.copied(2, name) / "checkpoints")
    first, second = sorted((checkpoint / part).iterdir())
    assert load_file(first).keys() & load_file(second).keys(), "each process has written its share"
    if damage == "lost":
        first.unlink()
    else:
        second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"checkpoint-6 is damaged .*; delete it"):
        train(full.recipe(name, **ALONE), resume=True)


@pytest.mark.slow
def test_early_stopping_returns_the_best_shards(model, tmp_path, monkeypatch):
    options = OPTIONS | {"early_stopping": 1, "eval_steps": 1, "save_steps": 1, "save_total_limit": 1}
    options |= {"max_steps": 30, "learning_rate": 0.3, "heads_learning_rate": 0.5}
    processes(recipe(tmp_path, model, output=str(tmp_path / "together"), **TOGETHER, **options), 2)
    # What is solved for and placed at the end would change the figures of the best step.
    monkeypatch.setattr("causal_qwen.training.run.calibrate", lambda *parts: False)
    result = train(recipe(tmp_path, model, output=str(tmp_path / "alone"), **ALONE, **options))
    records = read_records(result.output / "metrics.jsonl")
    evaluated = {one["step"]: one["eval/total_loss"] for one in records if "eval/total_loss" in one}
    best = min(evaluated, key=evaluated.get)
    assert best < max(evaluated) < 30
    (at_best,) = [one for one in records if one["step"] == best and "eval/softmax_nll" in one]
    assert result.metrics["eval/softmax_nll"] == pytest.approx(at_best["eval/softmax_nll"], rel=1e-5)
    together = weights(tmp_path / "together")
    for name, tensor in weights(result.output).items():
        if name.startswith("model.layers"):
            torch.testing.assert_close(together[name], tensor, msg=name, **ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("words", [False, True], ids=["solved", "words"])
def test_heads_of_two_processes_are_those_of_one(model, tmp_path, words):
    """What is solved for and calibrated is the same in every bit; words are trained, to rounding.

    Features come from batches of the same size, because their last digits depend on the padding.
    """
    options = {"method": "heads", "max_steps": 5, "completion_only": not words, "batch_size": 2}
    write_table(tmp_path / "table.jsonl", rows=ROWS)
    finish(start(recipe(tmp_path, model, output=str(tmp_path / "alone"), accumulation=2, **options)))
    processes(recipe(tmp_path, model, output=str(tmp_path / "together"), **options), 2)
    assert_same_weights(tmp_path / "alone", tmp_path / "together", **(ROUNDING if words else {}))
    assert len(scores(tmp_path / "alone")) == 54
    assert scores(tmp_path / "alone") == scores(tmp_path / "together")


def rank_of(process):
    """Of a process that torchrun has started."""
    variables = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    return dict(variable.partition("=")[::2] for variable in variables).get("RANK")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_torchrun_starts_a_killed_run_again(full, tmp_path):
    """kill -9 of one rank in the middle: the other ends too, and what follows is the uninterrupted run."""
    made = full.recipe("restarted", **TOGETHER)
    (tmp_path / "recipe.yaml").write_text(made.to_yaml(), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    main = [sys.executable, "-c", "from causal_qwen.cli import main; main()"]
    command += ["--max-restarts", "1", "--no-python", *main]
    command += ["train", str(tmp_path / "recipe.yaml"), "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = tmp_path / "log"
    with log.open("wb") as stream:
        run = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    try:
        checkpoints = full.directory / "restarted.run" / "checkpoints"
        end = time.monotonic() + 600
        while not (checkpoints / "checkpoint-2").is_dir():
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.01)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        (second,) = [int(child) for child in children if rank_of(child) == "1"]
        os.kill(second, signal.SIGKILL)
        assert run.wait(timeout=600) == 0, log.read_text()
    finally:
        run.kill()
    said = log.read_text()
    assert "SIGTERM" in said or "another process of this run has ended" in said
    assert "is kept" in said
    assert_same_weights(full.together, full.directory / "restarted")
