"""A packed model: the same answers as the whole one, by content, never from a file that is damaged."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from causal_qwen import Engine
from causal_qwen.conversion import load_model, packing
from causal_qwen.conversion.packing import content_key, load_native
from causal_qwen.data import prompt_batch
from causal_qwen.evaluation import run_evaluation
from causal_qwen.native_model import UnservedError
from causal_qwen.prompting import Settings, Speaker
from conftest import number_batches
from number_speakers import number_processor, number_speaker

SHAPE = {"hidden_size": 64, "intermediate_size": 128}
PROMPTS = ["It cost 12.5 euros", "Hello <NUM>", [{"role": "user", "content": "How much is 7<|end|>?"}]]
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
MODES = [
    {"mode": "standard"},
    {"mode": "standard", "sample": True, "top_k": 5},
    {"mode": "causal"},
    {"mode": "causal", "top_p": 0.9, "repetition_penalty": 1.2, "temperature": 0.5},
    {"mode": "compatible"},
    {"mode": "compatible", "sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3},
    {"mode": "standard", "stop": ("1", "e")},
]


@pytest.fixture(scope="module", autouse=True)
def _quiet(one_thread):
    pass


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The same model with a head of its own, and with the embedding as its head."""
    saved = {}
    for tied in (False, True):
        saved[tied] = tmp_path_factory.mktemp("model") / "tied" if tied else tmp_path_factory.mktemp("model")
        number_speaker(**SHAPE, tie_word_embeddings=tied).save_pretrained(saved[tied])
        number_processor().save_pretrained(saved[tied])
    return saved


@pytest.fixture
def directory(directories, tmp_path):
    """A copy that may be changed."""
    return Path(shutil.copytree(directories[False], tmp_path / "model"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, in which native code is built already."""
    place = tmp_path / "cache"
    place.mkdir()
    (place / "compiled").symlink_to(Path(os.environ["CAUSAL_QWEN_CACHE"]) / "compiled")
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(place))
    return place / "packed"


def whole(directory, precision):
    """The model in transformers, on an engine of that precision."""
    model, processor = load_model(directory, dtype="bfloat16" if precision == "bfloat16" else "float32")
    return Speaker(model, processor, Engine.from_model(model, precision=precision))


def packed(directory, precision="float32", tell=None):
    model, processor = load_native(directory, dtype=precision, tell=tell)
    return Speaker(model, processor)


def answers(speaker, options):
    settings = Settings(max_new_tokens=10, seed=3, **options)
    return speaker.answer(PROMPTS, settings, settings.people(len(PROMPTS)))


def assert_same(ours, theirs):
    """The same tokens; numbers to rounding, which depends on where in memory a vector begins, and which
    integers enlarge.
    """
    for one, two in zip(ours, theirs, strict=True):
        texts = [re.sub(r"[\d.]+", "#", answer.text) for answer in (one, two)]
        assert texts[0] == texts[1]
        assert (one.seed, one.finish_reason, one.tokens) == (two.seed, two.finish_reason, two.tokens)
        for a, b in zip(one.numbers, two.numbers, strict=True):
            assert (a.position, a.extrapolates) == (b.position, b.extrapolates)
            assert (a.value, a.lower, a.upper) == pytest.approx((b.value, b.lower, b.upper), rel=2e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_it_says_what_the_whole_model_says(directories, cache, precision, tied):
    theirs, ours = whole(directories[tied], precision), packed(directories[tied], precision)
    numbers = 0
    for options in MODES:
        said = answers(ours, options)
        assert_same(said, answers(theirs, options))
        numbers += sum(len(answer.numbers) for answer in said)
    assert numbers


def test_it_predicts_and_is_measured_as_the_whole_model(directories, cache):
    theirs, ours = whole(directories[False], "int8"), packed(directories[False], "int8")
    batch = prompt_batch(ours.processor, ["It cost 12.5 euros", "7"])
    one = ours.model.predict_number(batch, 0.8)
    two = theirs.model.predict_number(batch, 0.8, engine=theirs.engine)
    for name in ("median", "lower", "upper", "prob_num"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name), rtol=1e-4, atol=1e-6)
    metrics = [run_evaluation(s.model, number_batches(2), engine=s.engine).metrics() for s in (ours, theirs)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3, nan_ok=True)


def test_generate_returns_ids_with_digits_and_several_texts_of_a_prompt(directories, cache):
    theirs, ours = whole(directories[False], "float32"), packed(directories[False])
    inputs = prompt_batch(ours.processor, ["It cost 12.5 euros"])
    options = {
        "max_new_tokens": 8,
        "inference_mode": "causal",
        "individual": [1, 2],
        "num_return_sequences": 2,
    }
    one = ours.model.generate(**inputs, **options, suppress_unused=True)
    two = theirs.model.generate(**inputs, **options, suppress_unused=True, engine=theirs.engine)
    assert torch.equal(one.as_subclass(torch.Tensor), two.as_subclass(torch.Tensor))
    torch.testing.assert_close(one.numeric_values, two.numeric_values)


def test_what_it_cannot_do_is_named(directories, cache):
    model = packed(directories[False]).model
    ids = torch.tensor([[1, 2]])
    with pytest.raises(UnservedError, match="num_beams"):
        model.generate(ids, num_beams=2)
    with pytest.raises(ValueError, match="nothing to continue"):
        model.generate(max_new_tokens=1)
    with pytest.raises(ValueError, match="another model's"):
        model.generate(ids, engine=packed(directories[True]).engine)
    with pytest.raises(ValueError, match="cannot be trained"):
        model.train()


# By content -------------------------------------------------------------------------------------------------


def test_a_file_is_packed_once_and_found_again_in_a_copy(directory, cache, tmp_path):
    told = []
    packed(directory, tell=told.append)
    assert any("packing" in line for line in told)
    copy = shutil.copytree(directory, tmp_path / "copy")
    (copy / "README.md").write_text("nothing that a model reads")
    again = []
    packed(copy, tell=again.append)
    assert not again
    assert len(list(cache.glob("*.safetensors"))) == 1


@pytest.mark.parametrize("hide", [False, True])
def test_a_change_is_seen_even_where_size_and_time_are_the_old_ones(directory, cache, hide, monkeypatch):
    monkeypatch.setattr(packing, "SECONDS_AT_REST", -1.0)  # as if it had been there for long
    before, old = content_key(directory), answers(packed(directory), MODES[0])
    assert content_key(directory) == before
    weights = directory / "model.safetensors"
    state = weights.stat()
    other = number_speaker(**SHAPE, tie_word_embeddings=False)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(-3.0)
    other.save_pretrained(directory)
    assert weights.stat().st_size == state.st_size
    if hide:
        os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert content_key(directory) != before
    new = answers(packed(directory), MODES[0])
    assert new != old
    assert_same(new, answers(whole(directory, "float32"), MODES[0]))


def test_a_file_that_was_written_just_now_is_read_again(directory, cache):
    content_key(directory)
    assert all(json.loads(file.read_text()) == {} for file in cache.glob("*.json"))


def test_a_memory_that_is_damaged_is_not_believed(directory, cache, monkeypatch):
    monkeypatch.setattr(packing, "SECONDS_AT_REST", -1.0)
    key = content_key(directory)
    (memory,) = cache.glob("*.json")
    for text in ("", "[1]", '{"config.json": 3, "model.safetensors": [1, 2]}'):
        memory.write_text(text)
        assert content_key(directory) == key


def test_the_least_recently_used_go_when_there_are_too_many(directory, cache, monkeypatch):
    for precision in ("float32", "bfloat16"):
        packed(directory, precision)
    files = {file.name.split("-")[1]: file for file in cache.glob("*.safetensors")}
    os.utime(files["float32"], (1, 1))
    packed(directory, "float32")  # it is used again
    os.utime(files["bfloat16"], (2, 2))
    monkeypatch.setattr(packing, "MOST_BYTES", files["float32"].stat().st_size * 2)
    packed(directory, "int8")
    assert {file.name.split("-")[1] for file in cache.glob("*.safetensors")} == {"float32", "int8"}


# Damage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "empty", "body", "header", "longer", "text"])
def test_a_damaged_file_is_packed_anew(directory, cache, damage):
    said = answers(packed(directory), MODES[0])
    (file,) = cache.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "body":
        content[-5000] ^= 16
    if damage == "header":
        place = content.index(b'"data_offsets"')
        content[place + 17] ^= 1
    pieces = {"cut": content[:-64], "empty": b"", "longer": content + bytes(64), "text": b"not a model" * 9}
    file.write_bytes(pieces.get(damage, content))
    told = []
    assert_same(answers(packed(directory, tell=told.append), MODES[0]), said)
    assert any("packing" in line for line in told)
    assert not list(cache.glob(".*.partial"))


def test_a_cache_that_cannot_be_written_costs_only_time(directory, tmp_path, monkeypatch):
    monkeypatch.setenv("CAUSAL_QWEN_COMPILE", "0")
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(directory / "config.json" / "cache"))
    said = answers(whole(directory, "int8"), MODES[0])
    told = []
    assert_same(answers(packed(directory, "int8", told.append), MODES[0]), said)
    assert any("not kept" in line for line in told)


WRITER = """
import sys, causal_qwen_command
from pathlib import Path
import torch
from causal_qwen.decoder.stored import open_stored, write_stored
path = Path(sys.argv[1])
for turn in range(20):
    tensors = [("a", torch.full((1000, 100), float(turn))), ("b", torch.arange(7))]
    write_stored(path, tensors, {"turn": str(turn)})
    stored = open_stored(path)
    assert stored is not None and (stored.tensors["a"] == float(stored.facts["turn"])).all()
"""


@pytest.mark.slow
def test_two_processes_may_write_and_read_at_once(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file.safetensors")]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [writer.communicate()[1] for writer in writers] == ["", ""]
    assert [file.name for file in tmp_path.iterdir()] == ["file.safetensors"]


# What is not served -----------------------------------------------------------------------------------------


def change(directory, name, **fields):
    file = directory / name
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("generation_config.json", {"num_beams": 4}, "generation_config.json has num_beams"),
        ("config.json", {"dtype": "float64"}, "dtype 'float64'"),
        ("config.json", {"use_sliding_window": True}, "use_sliding_window"),
        ("config.json", {"tie_word_embeddings": True}, "disagree"),
    ],
)
def test_what_only_transformers_does_is_left_to_it(directory, cache, name, fields, message):
    change(directory, name, **fields)
    with pytest.raises(UnservedError, match=message):
        load_native(directory)
    assert not list(cache.glob("*.safetensors"))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "processor_config.json"]
)
def test_a_directory_that_is_damaged_is_named(directory, cache, name):
    (directory / name).write_bytes((directory / name).read_bytes()[:100])
    with pytest.raises(ValueError, match=str(directory)):
        load_native(directory)


# Light ------------------------------------------------------------------------------------------------------

LIGHT = """
import sys, causal_qwen_command
sys.argv = ["causal-qwen", *sys.argv[1:]]
try:
    causal_qwen_command.main()
except SystemExit as end:
    assert not end.code, end.code
heavy = ("transformers", "torch._dynamo", "sympy", "scipy", "huggingface_hub")
print([name for name in sys.modules if name.split(".")[0] in heavy or name.startswith(heavy)])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["generate", "MODEL", "It cost 12.5", "--max-new-tokens", "3", "--mode", "causal", "--seed", "1"],
        ["predict", "MODEL", "--row", '{"text": "It cost"}', "--json"],
    ],
)
def test_a_start_imports_neither_transformers_nor_a_compiler(directories, cache, words):
    packed(directories[False])
    command = [sys.executable, "-c", LIGHT, *(str(directories[False]) if w == "MODEL" else w for w in words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
