"""Damaged checkpoints: bases and converted models are refused by name, before anything is loaded."""

import shutil

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from causal_qwen import CausalQwen2ForCausalLM, convert
from causal_qwen.conversion import ConversionError, check_device, load_model, read_checkpoint, read_config
from causal_qwen.conversion.description import describe
from conftest import tiny_base, tiny_tokenizer
from damage import DAMAGES, remove, set_config, write

OF_CONVERTED = DAMAGES | {
    "broken processor": (write("processor_config.json", "{"), r"processor_config\.json is damaged, not JSON"),
    "processor is a list": (write("processor_config.json", []), r"processor_config\.json holds a JSON list"),
    "no processor": (remove("processor_config.json"), r"no processor_config\.json"),
    "unknown reading": (
        write("processor_config.json", {"numbers": "maybe", "processor_class": "CausalQwen2Processor"}),
        r"cannot be loaded: .*maybe",
    ),
    "another <NUM>": (set_config(num_token_id=7), r"<NUM> is 258 in the tokenizer and 7 in config\.json"),
    "unknown mode": (set_config(inference_mode="magic"), r"cannot be loaded: .*inference_mode is 'magic'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def converted(base_directory, tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted") / "model"
    convert(base_directory, directory, calibration="none")
    return directory


@pytest.fixture
def forbidden(monkeypatch):
    """Weights must not be touched: what is damaged is found before."""

    def refuse(*args, **options):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("causal_qwen.conversion.sources.read_weights", refuse)
    monkeypatch.setattr("causal_qwen.conversion.loading.load_weights", refuse)


@pytest.mark.usefixtures("forbidden")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_base_is_refused_by_everything(base_directory, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    damage, message = DAMAGES[name]
    damaged = tmp_path / "damaged"
    shutil.copytree(base_directory, damaged)
    damage(damaged)
    for use in (lambda source: convert(source, tmp_path / "out"), load_model, describe):
        with pytest.raises(ConversionError, match=message) as error:
            use(damaged)
        assert str(error.value).startswith(f"{damaged}: ")
        assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"], "nothing written, nothing unpickled"


@pytest.mark.usefixtures("forbidden")
@pytest.mark.parametrize("name", OF_CONVERTED)
def test_a_damaged_converted_model_is_refused(converted, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    damage, message = OF_CONVERTED[name]
    damaged = tmp_path / "damaged"
    shutil.copytree(converted, damaged)
    damage(damaged)
    for use in (load_model, describe):
        if use is describe and name == "another <NUM>":  # what it says of <NUM> is what config.json says
            continue
        with pytest.raises(ConversionError, match=message):
            use(damaged)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_heads_are_never_random(converted, tmp_path):
    """transformers would fill what is missing; a converted model without its heads is no model."""
    damaged = tmp_path / "damaged"
    shutil.copytree(converted, damaged)
    tensors = load_file(damaged / "model.safetensors")
    heads = {name: tensors.pop(name) for name in list(tensors) if name.startswith("abduction.")}
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    assert CausalQwen2ForCausalLM.from_pretrained(damaged) is not None
    with pytest.raises(ConversionError, match=f"{len(heads)} of .* missing, such as abduction"):
        load_model(damaged)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "model.txt").write_text("hello")
    with pytest.raises(ConversionError, match=r"neither a directory nor a \.gguf file"):
        load_model(tmp_path / "model.txt")


def test_a_backbone_that_was_saved_alone_still_loads(tmp_path):
    model = tiny_base(tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert read_checkpoint(tmp_path).parameters == model.num_parameters()
    loaded, _ = load_model(tmp_path)
    assert torch.equal(loaded.lm_head.weight[:258], model.lm_head.weight[:258])


def test_sizes_are_those_of_the_files(base_directory):
    checkpoint = read_checkpoint(base_directory)
    size = (base_directory / "model.safetensors").stat().st_size
    assert 0 <= size - checkpoint.bytes() < 10_000  # the header
    assert checkpoint.bytes("bfloat16") == checkpoint.bytes() // 2


def test_a_hub_id_is_checked_as_a_directory_is(base_directory, tmp_path, monkeypatch):
    """As it lies in the cache of the hub's client, which is offline here."""
    snapshot = tmp_path / "models--someone--model" / "snapshots" / ("0" * 40)
    shutil.copytree(base_directory, snapshot)
    (tmp_path / "models--someone--model" / "refs").mkdir()
    (tmp_path / "models--someone--model" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_config("someone/model")["hidden_size"] == 32
    assert describe("someone/model")["architecture"]["layers"] == 2
    (snapshot / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConversionError, match=r"someone/model: model\.safetensors is damaged"):
        load_model("someone/model")


# GGUF


def gguf_file(path, architecture="llama", layers=1, **extra):
    """A tiny GGUF file without a vocabulary; extra metadata are whole numbers."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.name", "tiny")
    sizes = {"embedding_length": 32, "feed_forward_length": 64, "block_count": layers, "context_length": 128}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    for name, value in sizes.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for name, value in extra.items():
        writer.add_uint32(name.replace("_", "."), value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    shapes = {
        "token_embd": (50, 32),
        "output_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
    }
    shapes |= {"blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32)}
    shapes |= {"blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64), "blk.0.attn_norm": (32,)}
    shapes |= {"blk.0.ffn_norm": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_described_by_its_header(tmp_path):
    file = gguf_file(tmp_path / "tiny.gguf")
    facts = describe(file)
    assert facts["architecture"]["hidden_size (H)"] == 32
    assert facts["architecture"]["vocab_size (V)"] == 50
    assert facts["precision"] == {"weights": "float32"}
    assert facts["tokenizer"] == {"tokens": 3, "chat template": False}
    assert read_config(file)["num_key_value_heads"] == 2


def test_damaged_gguf_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    whole = gguf_file(tmp_path / "whole.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for data, message in (
        (whole[:-100], "truncated, .* bytes of at least"),
        (whole[:300], "the header of this GGUF file is damaged or truncated"),
        (whole[:8] + b"\xff" * 16 + whole[24:], "the header of this GGUF file is damaged or truncated"),
        (b"GGUF", "the header of this GGUF file is damaged or truncated"),
        (b"", "not a GGUF file"),
        (b"PK\3\4" + whole, "not a GGUF file"),
    ):
        damaged.write_bytes(data)
        for use in (load_model, describe, read_config):
            with pytest.raises(ConversionError, match=message):
                use(damaged)
    for options, message in (
        ({"architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
        ({"layers": 2}, r"incomplete checkpoint, 9 of 20 tensors are missing, such as blk\.1"),
        ({"layers": 10**9}, "1000000000 layers in 11 tensors"),
        ({"layers": 0}, "gives no num_hidden_layers"),
        ({"split_count": 3}, "one of several parts"),
    ):
        gguf_file(damaged, **options)
        with pytest.raises(ConversionError, match=message):
            load_model(damaged)
    assert not (tmp_path / "cache").exists()


# Devices


@pytest.mark.parametrize("device", ["cuda", "tpu", "meta", "nonsense", "cuda:7", ""])
def test_a_device_that_is_not_there_is_named_before_loading(device):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(ValueError, match=f"device '{device}' is not available; here there is cpu"):
        load_model("./nowhere", device=device)
    check_device("cpu")
    check_device(torch.device("cpu"))


# What is said of a model


def test_calibrated_intervals_and_training_are_described(converted, tmp_path):
    trained = tmp_path / "trained"
    shutil.copytree(converted, trained)
    remove("conversion.json")(trained)
    set_config(conformal_scores=[float(score) for score in range(99)], dtype="bfloat16")(trained)
    write("recipe.yaml", "model: smollm2\ndata: cars.csv\nmethod: heads\n")(trained)
    write("evaluation.json", {"train/steps": 45.0, "train/rows": 294.0})(trained)
    facts = describe(trained)
    assert facts["intervals"]["numbers set aside"] == 99
    assert facts["intervals"]["covers levels up to"] == 0.99
    provenance = facts["provenance"]
    assert (provenance["kind"], provenance["trained on"]) == ("a trained model", "cars.csv")
    assert provenance["train/steps"] == 45.0
    write("recipe.yaml", "a: [")(trained)
    with pytest.raises(ConversionError, match=r"recipe\.yaml is damaged"):
        describe(trained)


def test_precision_is_that_of_the_weights(base_directory, tmp_path):
    convert(base_directory, tmp_path / "half", calibration="none", dtype=torch.bfloat16)
    assert describe(tmp_path / "half")["precision"] == {"backbone": "bfloat16", "causal heads": "float32"}
