"""Tests in an environment with vLLM: `make test-vllm` makes it. Elsewhere nothing here is collected."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
# A run that asks for this directory alone then ends with "no tests ran", which is a failure.
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]


def pytest_report_header():
    return (
        None
        if HAS_VLLM
        else "tests/serving_vllm: not collected here, vLLM is not installed; run `make test-vllm`"
    )


@pytest.fixture(scope="session")
def base_directory(tmp_path_factory) -> str:
    """The embedded base, converted."""
    if "CAUSAL_QWEN_BASE" in os.environ:
        return os.environ["CAUSAL_QWEN_BASE"]
    directory = tmp_path_factory.mktemp("models") / "base"
    command = Path(sys.executable).with_name("causal-qwen")
    subprocess.run([command, "convert", "smollm2", directory], check=True)
    return str(directory)


@pytest.fixture(scope="session")
def ask(tmp_path_factory):
    """Asks an engine in a process of its own."""

    def answers(model: str, calls: list, **engine) -> list:
        place = tmp_path_factory.mktemp("engine")
        (place / "task.json").write_text(json.dumps({"engine": engine, "calls": calls}))
        script = Path(__file__).with_name("engine_process.py")
        subprocess.run(
            [sys.executable, script, model, place / "task.json", place / "result.json"], check=True
        )
        return json.loads((place / "result.json").read_text())

    return answers
