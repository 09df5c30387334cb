"""The package's surface: names that resolve, a cheap import, and Auto classes that know us."""

import importlib
import subprocess
import sys

import pytest

import causal_qwen


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_every_public_name_resolves_and_is_listed():
    for name in causal_qwen.__all__:
        assert getattr(causal_qwen, name) is not None
    assert set(causal_qwen.__all__) <= set(dir(causal_qwen))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        causal_qwen.nonsense  # noqa: B018


@pytest.mark.parametrize(
    "module",
    [
        "cauchy",
        "heads",
        "losses",
        "value_space",
        "modeling_causal_qwen2",
        "configuration_causal_qwen2",
        "conversion",
    ],
)
def test_every_module_lists_what_it_offers(module):
    module = importlib.import_module(f"causal_qwen.{module}")
    assert all(hasattr(module, name) for name in module.__all__)


def test_importing_the_package_imports_neither_torch_nor_transformers():
    assert run("import sys, causal_qwen; print({'torch', 'transformers'} & set(sys.modules))") == "set()"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["AutoConfig", "AutoModelForCausalLM", "pipeline", "Qwen2ForCausalLM", "Trainer"]
)
@pytest.mark.parametrize("first", ["causal_qwen", "transformers"])
def test_auto_classes_know_us_whatever_is_imported_first(name, first):
    imports = ["import causal_qwen", f"from transformers import {name}"]
    code = "\n".join(imports if first == "causal_qwen" else imports[::-1])
    code += (
        "\nfrom transformers import AutoConfig, AutoModelForCausalLM"
        "\nconfig = AutoConfig.for_model('causal_qwen2', vocab_size=9, hidden_size=8, intermediate_size=8,"
        " num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)"
        "\nprint(type(AutoModelForCausalLM.from_config(config)).__name__)"
    )
    assert run(code) == "CausalQwen2ForCausalLM"
