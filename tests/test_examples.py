"""The examples run, on a tiny base with random weights."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
RUNS = {
    "quickstart": ([], ["the law:", "individual 8:"]),
    "number_values": (["--steps", "40"], ["('1,234.50', 1234.5)", "y at x = 20:"]),
    "counterfactual": (["--tokens", "8"], ["identical, 0 edits", "an individual was found"]),
    "compare_modes": (["--tokens", "8"], ["standard, sampled", "compatible, P/ΣP"]),
    "fine_tune_table": ([], ["median absolute error", "in truth"]),
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
def test_examples_are_short_and_hide_no_module_of_python(path):
    """`python examples/x.py` puts examples/ first on the path: one called numbers would break torch."""
    assert path.stem not in sys.stdlib_module_names
    if not path.stem.startswith("decoder_"):  # those share a module, and draw
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60


def test_an_example_is_a_program(base_directory):
    command = [sys.executable, str(EXAMPLES / "quickstart.py"), "--base", str(base_directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "individual 8:" in done.stdout
