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
def run():
    """Runs the command line."""

    def run(*words) -> subprocess.CompletedProcess[str]:
        command = Path(sys.executable).with_name("causal-qwen")
        small = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB, all of which a start clears
        return subprocess.run(
            [command, *map(str, words)], check=True, capture_output=True, text=True, env=small
        )

    return run


@pytest.fixture(scope="session")
def whole_prompts() -> dict:
    """An engine that reads prompts whole; who asks for it after another shares its process."""
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": False,
    }


class Running:
    """An engine in a process of its own."""

    def __init__(self, model: str, engine: str) -> None:
        script = Path(__file__).with_name("engine_process.py")
        self.process = subprocess.Popen(
            [sys.executable, script, model, engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, task: dict) -> list:
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(f"the engine ended with exit code {self.process.wait()}; its errors are above")

    def end(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=120)


@pytest.fixture(scope="session")
def ask():
    """Asks an engine in a process of its own, which stays until another engine is asked."""
    running: dict[tuple[str, str], Running] = {}

    def end() -> None:
        for one in running.values():
            one.end()
        running.clear()

    def answers(model: str, task: dict, **engine) -> list:
        key = (model, json.dumps(engine))
        if key not in running:
            end()
            running[key] = Running(*key)
        return running[key].ask(task)

    yield answers
    end()
