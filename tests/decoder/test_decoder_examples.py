"""The decoder examples run, on a tiny decoder with random weights, with and without matplotlib."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = {
    "decoder_cache_memory": ([], "2048.0 MiB"),  # Llama 7B at 4,096 tokens: 2 GiB
    "decoder_greedy_and_sampling": (["--model", "tiny", "--tokens", "8"], "temperature 1, top-p 0.9: "),
    "decoder_diversity": (["--model", "tiny", "--tokens", "6", "--samples", "2"], "distinct pairs"),
    "decoder_repetition": (["--model", "tiny", "--tokens", "40"], "texts looped"),
}


@pytest.fixture(autouse=True)
def working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *RUNS[name][0]])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", RUNS)
def test_example_prints_its_numbers_without_matplotlib(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(name, monkeypatch)
    printed = capsys.readouterr().out
    assert RUNS[name][1] in printed
    assert "pip install matplotlib" in printed


@pytest.mark.parametrize("name", RUNS)
def test_example_writes_its_plot(name, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    run(name, monkeypatch)
    assert (tmp_path / f"{name}.png").stat().st_size > 1000
