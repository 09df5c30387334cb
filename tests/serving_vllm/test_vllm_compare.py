"""Comparisons: the pairs of --engine vllm are those of the native engine, by every coupling."""

import json
import shutil

import pytest
from comparing import compared
from safetensors.torch import load_file, save_file

from causal_qwen import Engine
from causal_qwen.conversion import load_model
from causal_qwen.prompting import Speaker

COMPARISONS = {
    "individual": {"prompts": 2, "individuals": 4, "coupling": "individual"},
    "gumbel": {"prompts": 2, "individuals": 4, "coupling": "gumbel"},
    "independent": {"prompts": 2, "individuals": 4, "coupling": "independent"},
    "sequential": {"prompts": 1, "individuals": 16, "sequential": True, "looks": 2},
}


@pytest.fixture(scope="module")
def both(base_directory, ask, whole_prompts):
    """Comparisons by vLLM, and by the native engine."""
    model, processor = load_model(base_directory, dtype="float32")
    native = Speaker(model, processor, Engine.from_model(model))
    theirs = ask(base_directory, {"comparisons": list(COMPARISONS.values())}, **whole_prompts)
    ours = [compared(native, **options) for options in COMPARISONS.values()]
    return dict(zip(COMPARISONS, zip(theirs, ours, strict=True), strict=True))


@pytest.mark.parametrize("name", COMPARISONS)
def test_pairs_are_those_of_the_native_engine(both, name):
    theirs, ours = both[name]
    assert theirs["lines"] == ours["lines"]
    assert theirs["figures"] == json.loads(json.dumps(ours["figures"]))
    assert any(pair["a"]["text"] != pair["b"]["text"] for pair in map(json.loads, ours["lines"])), (
        "a comparison without a difference shows nothing"
    )


@pytest.fixture(scope="module")
def relative(base_directory, tmp_path_factory):
    """Another model of the same origin."""
    directory = tmp_path_factory.mktemp("models") / "relative"
    shutil.copytree(base_directory, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 0.7
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return str(directory)


def test_two_models_are_compared_by_processes_and_continued(base_directory, relative, tmp_path, run):
    """One of two parts lies there, as an interrupted run leaves it; the other one runs both models."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Water boils when\nMy favourite season is\n")
    words = ("compare", base_directory, relative, "--prompts", prompts, "-n", 3, "--max-new-tokens", 8)
    words += ("--dtype", "float32", "--score", "length", "--score", "nats", "--json")
    native, vllm = tmp_path / "native.jsonl", tmp_path / "vllm.jsonl"
    expected = json.loads(run(*words, "-o", native).stdout)
    lines = native.read_text().splitlines(keepends=True)
    (tmp_path / "vllm.jsonl.part-0-of-2.jsonl").write_text("".join(lines[0::2]))
    done = run(*words, "-o", vllm, "--engine", "vllm", "--processes", 2, "--report", tmp_path / "page.html")
    pairs = [[json.loads(line) for line in file.read_text().splitlines()] for file in (vllm, native)]
    for mine, other in zip(*pairs, strict=True):
        # A judge reads texts in batches, which round in their own ways.
        nats = [[pair[side].pop("nats") for side in ("scores_a", "scores_b")] for pair in (mine, other)]
        assert nats[0] == pytest.approx(nats[1], rel=1e-4)
        assert mine == other
    figures = json.loads(done.stdout)
    assert figures["scores"]["length"] == expected["scores"]["length"]
    assert figures["differing"] > 0
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["native.jsonl", "page.html", "prompts.txt", "vllm.jsonl"]
