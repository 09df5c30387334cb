"""The benchmark runs, at tiny sizes."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm.py"


def test_the_benchmark_runs(base_directory):
    command = [sys.executable, SCRIPT, "--smoke", "--quick", "--json", "--base", base_directory]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() == {"standard_vs_plain", "causal_vs_plain", "tokens_per_second"}
    assert all(rate > 0 for rate in figures["tokens_per_second"].values())
