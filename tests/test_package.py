"""The package's surface: names that resolve, a cheap import, and Auto classes that know us."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import causal_qwen

ROOT = Path(__file__).parents[1]


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


PUBLIC = {
    "Abduction", "AbductionError", "Cauchy", "CausalGenerateOutput", "CausalLMOutput", "CausalQwen2Config",
    "CausalQwen2ForCausalLM", "CausalQwen2Processor", "CausalQwen3Config", "CausalQwen3ForCausalLM",
    "ComparisonResult", "Counterfactual", "Engine", "Individual", "Inferencer", "Number", "NumberPrediction",
    "NumberStreamer", "Side", "ValueSpace", "__version__", "abduct", "compare", "convert", "counterfactual",
    "format_number", "scan",
}  # fmt: skip


def test_the_public_names_are_these_and_resolve():
    assert set(causal_qwen.__all__) == PUBLIC
    assert all(getattr(causal_qwen, name) is not None for name in PUBLIC)
    assert set(dir(causal_qwen)) >= PUBLIC, "lazy names complete in a shell, too"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        causal_qwen.nonsense  # noqa: B018
    with pytest.warns(DeprecationWarning, match="Inferencer"):
        assert causal_qwen.InferenceEngine is causal_qwen.Inferencer


def test_the_command_line_starts_without_torch_and_transformers():
    code = (
        "import sys; sys.argv = ['causal-qwen', '--help']; import causal_qwen_command\n"
        "try: causal_qwen_command.main()\n"
        "except SystemExit: print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert run(code).splitlines()[-1] == "set()"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["causal_qwen", "transformers"])
def test_auto_classes_know_us_whatever_is_imported_first(first):
    names = "AutoConfig, AutoModelForCausalLM, Qwen2ForCausalLM, Trainer, pipeline"
    imports = ["import causal_qwen", f"from transformers import {names}"]
    code = "\n".join(imports if first == "causal_qwen" else imports[::-1])
    code += (
        "\nfrom transformers import AutoConfig, AutoModelForCausalLM"
        "\nconfig = AutoConfig.for_model('causal_qwen2', vocab_size=9, hidden_size=8, intermediate_size=8,"
        " num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)"
        "\nprint(type(AutoModelForCausalLM.from_config(config)).__name__)"
    )
    assert run(code) == "CausalQwen2ForCausalLM"


@pytest.mark.slow
def test_the_wheel_works_outside_the_repository(tmp_path, base_directory):
    """Built, unpacked elsewhere, and run there: everything that the commands need is inside."""
    wheels, place = tmp_path / "wheels", tmp_path / "installed"
    build = (
        "import sys; from hatchling.build import build_sdist, build_wheel; "
        "build_wheel(sys.argv[1]); build_sdist(sys.argv[1])"
    )
    wheels.mkdir()
    subprocess.run([sys.executable, "-c", build, str(wheels)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    (source,) = wheels.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "README.md", "tests/conftest.py", "docs/index.md"} <= names
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)

    def run(*arguments):
        code = (
            "import sys, causal_qwen_command; "
            "print(causal_qwen_command.__file__, file=sys.stderr); causal_qwen_command.main()"
        )
        environment = os.environ | {"PYTHONPATH": str(place), "COLUMNS": "200"}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(str(place))
        return done.stdout

    assert "counterfactual" in run("--help")
    run("convert", base_directory, "model", "--quiet")
    assert json.loads(run("generate", "model", "ab", "--max-new-tokens", 3, "--json"))["mode"] == "standard"
