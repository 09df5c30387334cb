"""Checkpoints are whole or absent."""

import pytest

from causal_qwen.training.checkpoints import (
    check_written,
    clear_debris,
    last_checkpoint,
    process_count,
    publish,
    rotate,
)


def checkpoint(directory, step):
    path = directory / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "state").write_text(str(step))
    return path


def test_debris_is_never_a_checkpoint(tmp_path):
    for name in (
        "checkpoint-2",
        "checkpoint-10",
        ".staging/checkpoint-12",
        ".gone-checkpoint-11",
        "checkpoint-x",
    ):
        (tmp_path / name).mkdir(parents=True)
    assert last_checkpoint(tmp_path).name == "checkpoint-10"
    clear_debris(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-10",
        "checkpoint-2",
        "checkpoint-x",
    ]


def test_publishing_replaces_what_had_the_name(tmp_path):
    old = checkpoint(tmp_path, 4)
    staged = checkpoint(tmp_path / ".staging", 4)
    (staged / "state").write_text("new")
    publish(staged, old)
    assert (old / "state").read_text() == "new"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


def test_rotation_keeps_the_latest_and_the_best(tmp_path):
    paths = [checkpoint(tmp_path, step) for step in (2, 4, 10, 12)]
    rotate(tmp_path, keep=1, protected=str(paths[1]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-4"]


def test_a_checkpoint_without_the_files_of_another_node_is_refused(tmp_path):
    for rank in (0, 1, 3):
        (tmp_path / f"rng_state_{rank}.pth").touch()
    with pytest.raises(OSError, match=r"lacks rng_state_2.pth; the output must be in a file system that all"):
        check_written(tmp_path, processes=4)
    (tmp_path / "rng_state_2.pth").touch()
    check_written(tmp_path, processes=4)
    assert process_count(tmp_path) == 4
