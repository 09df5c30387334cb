"""Weights one tensor at a time: the same bytes, no copy that stays, and the dtype that the base has."""

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2ForCausalLM

from causal_qwen import convert
from causal_qwen.conversion import ConversionError, load_base, load_model, open_base, remember
from causal_qwen.conversion.weights import parts_of, read_weights, weights_dtype, write_weights
from causal_qwen.progress import unwatched
from conftest import TEXT, tiny_base, tiny_tokenizer
from gguf_files import write_gguf


def saved_base(directory, dtype=torch.float32, **overrides):
    tiny_base(**overrides).to(dtype).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Files


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (2, 3, 4), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_is_written_is_read_by_safetensors_and_by_us(tmp_path, shape, dtype, monkeypatch):
    tensors = {"b": torch.randn(shape).to(dtype), "a": torch.randn(4, 3)}
    parts = {name: parts_of(tensor) for name, tensor in tensors.items()}
    write_weights(tmp_path / "w.safetensors", parts, watch=unwatched, phase="writing")
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert len((tmp_path / "w.safetensors").read_bytes()) == len(
        (tmp_path / "theirs.safetensors").read_bytes()
    )
    for name, tensor in load_file(tmp_path / "w.safetensors").items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.shape == tensors[name].shape
    monkeypatch.setattr("causal_qwen.conversion.weights.PART_ELEMENTS", 6)
    ours = read_weights([tmp_path / "w.safetensors"], dtype=torch.float64, watch=unwatched)
    assert all(torch.equal(ours[name], tensor.double()) for name, tensor in tensors.items())


def test_a_tensor_is_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("causal_qwen.conversion.weights.PART_ELEMENTS", 10)
    tensor = torch.randn(7, 4)
    assert [len(part) for part in parts_of(tensor).parts()] == [2, 2, 2, 1]
    write_weights(tmp_path / "w", {"w": parts_of(tensor)}, watch=unwatched, phase="writing")
    assert torch.equal(load_file(tmp_path / "w")["w"], tensor)


def test_a_tensor_that_ends_early_is_refused(tmp_path):
    short = parts_of(torch.randn(4, 4))._replace(shape=(5, 4))
    with pytest.raises(ValueError, match="w: 64 bytes came, 80 were announced"):
        write_weights(tmp_path / "w", {"w": short}, watch=unwatched, phase="writing")


def test_a_checkpoint_in_several_files(tmp_path, ids):
    base = tiny_base()
    base.save_pretrained(tmp_path, max_shard_size="40KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(load_base(tmp_path).model(ids).logits, base(ids).logits)


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_beside_a_tied_embedding_is_tied_only_if_it_is_equal(tmp_path, equal, ids):
    saved_base(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if equal else -embedding
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = convert(tmp_path, calibration="none").model
    assert model.config.tie_word_embeddings == equal
    expected = Qwen2ForCausalLM.from_pretrained(tmp_path)(ids).logits
    assert torch.equal(model(ids).logits[..., :258], expected[..., :258])


# Precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("said", [True, False])
def test_the_output_has_the_dtype_of_its_base(tmp_path, dtype, said):
    saved_base(tmp_path / "base", dtype)
    config = tmp_path / "base" / "config.json"
    fields = json.loads(config.read_text())
    assert fields["dtype"] == str(dtype).removeprefix("torch.")
    if not said:
        config.write_text(json.dumps({name: value for name, value in fields.items() if name != "dtype"}))
        assert weights_dtype([tmp_path / "base" / "model.safetensors"]) == dtype
    convert(tmp_path / "base", tmp_path / "out", calibration="none")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == dtype
    assert tensors["action.bias"].dtype == torch.float32
    assert load_model(tmp_path / "out")[0].dtype == dtype


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_another_dtype_on_request(tmp_path, asked):
    model = convert(saved_base(tmp_path, torch.bfloat16), calibration="none", dtype=asked).model
    assert str(model.dtype) == f"torch.{asked}"
    assert model.abduction.loc.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("Q8_0", torch.float32),
    ],
)
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_a_gguf_file_is_what_transformers_reads(tmp_path, cache, kind, dtype, architecture, ids):
    """In its half type if it has one, in float32 if it is quantised."""
    wide = {"head_dim": 16} if architecture == "qwen3" else {}
    write_gguf(tiny_base(architecture, **wide), tiny_tokenizer(), tmp_path / "tiny.gguf", kind=kind)
    base = load_base(tmp_path / "tiny.gguf")
    assert base.model.dtype == dtype
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32, ignore_mismatched_sizes=True
    )
    expected = theirs.to(dtype).state_dict()
    ours = base.model.state_dict()
    for name, tensor in expected.items():
        if architecture != "qwen3" or ours[name].shape == tensor.shape:
            assert torch.equal(ours[name], tensor), name
    again = load_base(tmp_path / "tiny.gguf")  # from the cache
    assert torch.equal(again.model(ids).logits, base.model(ids).logits)


def test_the_configuration_of_a_gguf_file_is_what_transformers_reads(tmp_path, cache):
    for architecture in ("qwen2", "llama"):
        write_gguf(tiny_base(architecture), tiny_tokenizer(), tmp_path / "tiny.gguf")
        ours = open_base(tmp_path / "tiny.gguf").config.to_dict()
        theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf").to_dict()
        ignored = {"_name_or_path", "architectures", "dtype"}
        assert {key: ours[key] for key in theirs if key not in ignored} == {
            key: value for key, value in theirs.items() if key not in ignored
        }


def test_a_gguf_tensor_without_a_place_is_named(tmp_path, cache):
    base = tiny_base()
    write_gguf(
        base, tiny_tokenizer(), tmp_path / "odd.gguf", extra={"blk.0.attn_sinks.weight": base.lm_head.weight}
    )
    with pytest.raises(ConversionError, match=r"no place for 1 tensors .* blk\.0\.attn_sinks\.weight"):
        load_base(tmp_path / "odd.gguf")
    assert not list(cache.glob("gguf*"))


def test_a_gguf_file_has_no_token_without_a_row(tmp_path, cache):
    """transformers adds <|endoftext|> to a vocabulary that has none, as Llama 3's."""
    write_gguf(tiny_base(), tiny_tokenizer(), tmp_path / "tiny.gguf")
    for _ in range(2):  # from the file, from the cache
        tokenizer = load_base(tmp_path / "tiny.gguf").tokenizer
        assert max(tokenizer.get_vocab().values()) == 299
        assert len(tokenizer("<|endoftext|>")["input_ids"]) > 1
        assert tokenizer.eos_token_id == 257


def test_a_damaged_cache_is_made_again(tmp_path, cache, ids):
    write_gguf(tiny_base(), tiny_tokenizer(), tmp_path / "tiny.gguf")
    expected = load_base(tmp_path / "tiny.gguf").model(ids).logits
    (weights,) = cache.glob("gguf*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    assert torch.equal(load_base(tmp_path / "tiny.gguf").model(ids).logits, expected)


# Memory


def test_conversion_shares_every_tensor_that_it_reads(tmp_path, monkeypatch):
    read = {}

    def reading(*arguments, **options):
        read.update(read_weights(*arguments, **options))
        return dict(read)

    monkeypatch.setattr("causal_qwen.conversion.sources.read_weights", reading)
    model = convert(saved_base(tmp_path, tie_word_embeddings=False), calibration="none").model
    for name, tensor in model.state_dict().items():
        if name in read:
            assert tensor.data_ptr() == read[name].data_ptr(), name


def test_a_base_is_let_go_once_it_is_remembered(tmp_path):
    import weakref

    base = load_base(saved_base(tmp_path, tie_word_embeddings=False))
    layer = weakref.ref(base.model.model.layers[0].mlp.up_proj.weight)
    reference = remember(base, TEXT)
    del base
    assert layer() is None
    assert reference.head.shape == (300, 32)


MEASURED = """
import json, pathlib, sys
import torch
from causal_qwen import convert
import causal_qwen.calibration, causal_qwen.conversion.parity
def resident(field):
    return int(pathlib.Path("/proc/self/status").read_text().partition(field)[2].split()[0]) * 1024
small, large, out = sys.argv[1:]
convert(small, calibration="none")  # everything that is imported or compiled on the way
before = resident("VmRSS:")
pathlib.Path("/proc/self/clear_refs").write_text("5")
convert(large, out, calibration="none")
print(json.dumps(resident("VmHWM:") - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_conversion_holds_its_weights_once(tmp_path):
    """46 million parameters; one more copy of the vocabulary alone would be two thirds more."""
    small = saved_base(tmp_path / "small")
    large = saved_base(
        tmp_path / "large",
        vocab_size=60_000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        tie_word_embeddings=True,
    )
    weights = (large / "model.safetensors").stat().st_size
    assert weights > 150e6
    words = [sys.executable, "-c", MEASURED, str(small), str(large), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) < 1.4 * weights


# Progress


@contextmanager
def noted(phases, phase, total):
    phases.append([phase, total, 0])

    def advance(amount):
        phases[-1][2] += amount

    yield advance


def test_every_phase_says_how_far_it_is(tmp_path, cache):
    write_gguf(tiny_base(), tiny_tokenizer(), tmp_path / "tiny.gguf")
    phases = []
    convert(
        tmp_path / "tiny.gguf",
        tmp_path / "out",
        calibration_text=TEXT,
        watch=lambda phase, total: noted(phases, phase, total),
    )
    names = [phase for phase, _, _ in phases]
    assert names == [
        "dequantising",
        "reading",
        "calibrating: text",
        "calibrating: common cause",
        "calibrating: scale",
        "calibrating: gain",
        "writing",
    ]
    for phase, total, done in phases:
        assert total > 0
        if phase != "calibrating: scale":  # a search, whose length is only usual
            assert done == total, phase


def test_the_library_prints_nothing(tmp_path, capfd):
    convert(saved_base(tmp_path / "base"), tmp_path / "out", calibration="none")
    capfd.readouterr()
    convert(tmp_path / "base", tmp_path / "again", calibration="none")
    assert capfd.readouterr() == ("", "")
