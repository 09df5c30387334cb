"""No file of a user can run code: nothing is unpickled, and code that comes with a checkpoint never runs."""

import ast
from pathlib import Path

import pytest
import torch

from causal_qwen.training import train
from causal_qwen.training.checkpoints import readable
from damage import Trap
from training_runs import converted, recipe

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
UNPICKLERS = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}


def test_no_source_unpickles_or_trusts_code():
    for file in SOURCES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not UNPICKLERS & {alias.name.split(".")[0] for alias in node.names}, file
            if isinstance(node, ast.ImportFrom) and node.module in UNPICKLERS:
                assert [alias.name for alias in node.names] == ["UnpicklingError"], file
        for function, options in calls(tree):
            if function.endswith("torch.load"):
                assert options.get("weights_only") == "True", file
            assert options.get("trust_remote_code", "False") == "False", file
            assert options.get("allow_pickle", "False") == "False", file


def test_a_run_is_not_resumed_from_a_pickle(base_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = converted(base_directory, tmp_path / "model")
    plan = recipe(tmp_path, model, save_steps=1, max_steps=3, diagnostics=False)
    monkeypatch.setattr("causal_qwen.training.run._save", stop)
    with pytest.raises(KeyboardInterrupt):
        train(plan)
    checkpoints = tmp_path / "out.run" / "checkpoints"
    last = max(checkpoints.glob("checkpoint-*"))
    (last / "trainer_state.json").write_text(
        (last / "trainer_state.json").read_text().replace('"global_step": 3', '"global_step": 2')
    )
    torch.save({"state": Trap()}, last / "optimizer.pt")
    with pytest.raises(ValueError, match="is damaged"):
        train(plan, resume=True)
    assert not (tmp_path / "unpickled").exists()
    assert last.is_dir(), "it is the user's to delete"


def stop(*args, **options):
    raise KeyboardInterrupt


def test_errors_of_ours_pass_through(tmp_path):
    with pytest.raises(RuntimeError, match="ours"), readable(tmp_path):
        raise RuntimeError("a mistake of ours")
