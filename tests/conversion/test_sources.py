"""Sources: directories, GGUF files and hub ids load as the same function, or say what is wrong."""

import json
import shutil

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2ForCausalLM

from causal_qwen import convert
from causal_qwen.conversion import ConversionError, load_base
from conftest import tiny_base, tiny_tokenizer


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_directories_of_both_architectures_load_as_the_same_function(tmp_path, ids, architecture, tied):
    original = tiny_base(architecture, tie_word_embeddings=tied)
    original.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    base = load_base(tmp_path)
    assert type(base.model) is Qwen2ForCausalLM
    assert base.model.config.rope_parameters["rope_theta"] == 5000.0
    assert base.model.config.tie_word_embeddings == tied
    torch.testing.assert_close(base.model(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)
    assert base.tokenizer("a 1\n")["input_ids"] == tiny_tokenizer()("a 1\n")["input_ids"]


def damage_weights(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop_a_tensor(directory):
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def garble_config(directory):
    (directory / "config.json").write_text('{"model_type": "qwen2", ')


def set_config(**fields):
    def change(directory):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_weights, "damaged or truncated"),
        (drop_a_tensor, "incomplete checkpoint.*model.norm.weight"),
        (garble_config, "config.json is damaged"),
        (set_config(hidden_size=48), "mismatched shapes, model.embed_tokens.weight is \\(300, 32\\)"),
        (set_config(model_type="causal_qwen2"), "already a CausalQwen model"),
        (lambda directory: (directory / "config.json").unlink(), "no config.json"),
        (
            lambda directory: (directory / "model.safetensors").unlink(),
            "no weights; model.safetensors is missing",
        ),
        (lambda directory: (directory / "tokenizer.json").unlink(), "no tokenizer there"),
    ],
)
def test_damaged_checkpoints_are_refused_and_leave_nothing(base_directory, tmp_path, damage, message):
    damaged = tmp_path / "damaged"
    shutil.copytree(base_directory, damaged)
    damage(damaged)
    with pytest.raises(ConversionError, match=message):
        convert(damaged, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_other_architectures_are_named(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=50)).save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match="'gpt2' is not supported; supported are qwen2, qwen3, llama"):
        load_base(tmp_path)


def test_llama_biases_that_qwen2_lacks_are_refused(tmp_path):
    tiny_base("llama", mlp_bias=True).save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match="mlp_bias=True"):
        load_base(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.gguf", "no such file"),
        ("./nowhere", "no such directory, and not a hub id"),
        ("owner/absent", "owner/absent: no such directory, and not on the hub"),
    ],
)
def test_missing_sources_are_named(source, message):
    with pytest.raises(ConversionError, match=message):
        load_base(source)


def test_a_damaged_gguf_file_is_refused_without_a_cache_entry(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConversionError, match="damaged or truncated"):
        load_base(tmp_path / "bad.gguf")
    assert not list((tmp_path / "cache").glob("*"))
