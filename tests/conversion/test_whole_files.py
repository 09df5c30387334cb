"""Directories that are whole or absent."""

import errno
import os
import resource
import signal

import pytest
import torch
from safetensors.torch import save_file

from causal_qwen.cli import main
from causal_qwen.conversion.files import atomic_directory, disk_errors


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_nothing(tmp_path, error):
    def write(overwrite):
        with atomic_directory(tmp_path / "out", overwrite=overwrite) as temporary:
            (temporary / "half").write_text("half")
            raise error

    with pytest.raises(error):
        write(overwrite=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(error):
        write(overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old"]


def test_what_was_there_comes_back_when_the_new_cannot_take_its_place(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    move, moves = os.replace, []

    def fail_on_the_second(source, target):
        moves.append(source)
        if len(moves) == 2:
            raise OSError(errno.EIO, "the disk is gone")
        move(source, target)

    monkeypatch.setattr("causal_qwen.conversion.files.os.replace", fail_on_the_second)
    with (
        pytest.raises(OSError, match="gone"),
        atomic_directory(tmp_path / "out", overwrite=True) as temporary,
    ):
        (temporary / "new").write_text("new")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old"]


@pytest.fixture
def full_disk():
    """No file of this process may grow beyond 64 KB, as if the disk were full there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error instead of an end
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize(
    "save",
    [
        lambda tensor, directory: save_file({"tensor": tensor}, directory / "model.safetensors"),
        lambda tensor, directory: torch.save(tensor, directory / "optimizer.pt"),
        lambda tensor, directory: (directory / "rows").write_bytes(bytes(10**5)),
    ],
    ids=["safetensors", "torch", "python"],
)
def test_a_full_disk_is_one_error_whoever_writes(tmp_path, save):
    with (
        pytest.raises(OSError, match=r"File too large|is the disk full"),
        atomic_directory(tmp_path / "out") as temporary,
    ):
        save(torch.zeros(50_000), temporary)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("full_disk")
def test_a_conversion_on_a_full_disk_says_so_in_a_line(base_directory, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv",
        ["causal-qwen", "convert", str(base_directory), str(tmp_path / "out"), "--calibration", "none"],
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "out: the disk is full (File too large); nothing half-written remains" in line
    assert not list(tmp_path.iterdir())


def test_other_errors_of_the_libraries_pass_through(tmp_path):
    with pytest.raises(RuntimeError, match="ours"), disk_errors(tmp_path):
        raise RuntimeError("a mistake of ours")
