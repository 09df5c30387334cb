"""The examples run: on a tiny base with random weights, and the short ones on the embedded base."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
RUNS = {
    "quickstart": ([], ["the law:", "individual 8:"]),
    "numbers": (["--steps", "40"], ["('1,234.50', 1234.5)", "y at x = 20:"]),
    "counterfactual": (["--tokens", "8"], ["identical, 0 edits", "an individual was found"]),
    "compare_modes": (["--tokens", "8"], ["standard, sampled", "compatible, P/ΣP"]),
    "fine_tune_table": (["--steps", "2"], ["median absolute error", "in truth"]),
}


@pytest.fixture(autouse=True)
def working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def run(name, arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    torch.manual_seed(0)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", RUNS)
def test_example_runs_on_a_tiny_base(name, base_directory, monkeypatch, capsys):
    arguments, expected = RUNS[name]
    run(name, ["--base", str(base_directory), *arguments], monkeypatch)
    printed = capsys.readouterr().out
    for text in expected:
        assert text in printed


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path):
    if not path.stem.startswith("decoder_"):  # those share a module, and draw
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.slow
def test_the_number_head_learns_on_the_embedded_base(monkeypatch, capsys):
    """y = 3x is seen at 1 to 60; the prediction at 20 must be near 60, and inside its interval."""
    run("numbers", [], monkeypatch)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    median, interval = last.removeprefix("y at x = 20: ").split(", 90% in ")
    lower, upper = (float(part) for part in interval.split(" to "))
    assert 40 < float(median) < 90
    assert lower < 60 < upper
