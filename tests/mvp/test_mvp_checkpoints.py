"""Checkpoints of the known trainer: exact, whole or absent, and never unpickled."""

import os
import pickle
import shutil

import pytest
import torch

from causal_qwen_mvp import CausalQwen2Config, CausalQwenMVPForCausalLM, CausalTrainer
from conftest import TINY

DROPOUT = {"attention_dropout": 0.3}  # so that the generator matters


def trainer(seed=0, scheduled=True, **overrides):
    torch.manual_seed(seed)
    model = CausalQwenMVPForCausalLM(CausalQwen2Config(**(TINY | DROPOUT | overrides)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9) if scheduled else None
    return CausalTrainer(model, optimizer, scheduler)


def test_training_goes_on_exactly_where_it_was(ids, tmp_path):
    batch = {"input_ids": ids}
    first = trainer()
    for _ in range(3):
        first.training_step(batch)
    first.save_checkpoint(tmp_path / "checkpoint", epoch=2, metrics={"val_loss": 1.5})
    expected = [first.training_step(batch) for _ in range(3)]
    second = trainer(seed=9)
    assert second.load_checkpoint(tmp_path / "checkpoint") == {
        "epoch": 2, "global_step": 3, "metrics": {"val_loss": 1.5},
    }  # fmt: skip
    assert [second.training_step(batch) for _ in range(3)] == expected
    assert second.loss_history == first.loss_history
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    # It is a model directory as well, and replaced in one step.
    assert CausalQwenMVPForCausalLM.from_pretrained(tmp_path / "checkpoint").config.hidden_size == 32
    second.save_checkpoint(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_what_is_no_checkpoint_is_kept_and_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="exists"):
        trainer().save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"no training_state\.pt there"):
        trainer().load_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return trainer().save_checkpoint(tmp_path_factory.mktemp("known") / "checkpoint")


def test_a_checkpoint_of_something_else_is_refused(checkpoint):
    with pytest.raises(ValueError, match="saved with a scheduler"):
        trainer(scheduled=False).load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="of another model"):
        trainer(num_hidden_layers=3).load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="of another model or optimizer"):
        trainer(intermediate_size=48).load_checkpoint(checkpoint)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize("damage", ["truncated", "pickled", "weights"])
def test_damage_is_named_and_nothing_is_unpickled(checkpoint, tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    file = damaged / ("model.safetensors" if damage == "weights" else "training_state.pt")
    if damage == "pickled":
        file.write_bytes(pickle.dumps({"optimizer": Trap()}, protocol=2))
    else:
        file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(ValueError, match="this checkpoint is damaged"):
        trainer().load_checkpoint(damaged)
    assert not (tmp_path / "unpickled").exists()
