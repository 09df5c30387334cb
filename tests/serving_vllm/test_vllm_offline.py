"""Files on the command line: --engine vllm writes what --engine transformers writes, in the same order."""

import csv
import json
import subprocess

import pytest

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was",
    "Water boils when",
    "My favourite season is",
    "The best way to learn",
)


def test_texts_of_a_file_divided_among_processes(base_directory, tmp_path, run):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    common = ("--prompts", prompts, "--mode", "causal", "--seed", 5, "--max-new-tokens", 12)
    common += ("--dtype", "float32")
    ours, theirs = tmp_path / "vllm.jsonl", tmp_path / "transformers.jsonl"
    run("generate", base_directory, *common, "-o", theirs)
    run("generate", base_directory, *common, "-o", ours, "--engine", "vllm", "--processes", 2)
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in (ours, theirs)]
    assert lines[0] == lines[1]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "prompts.txt",
        "transformers.jsonl",
        "vllm.jsonl",
    ]


def test_predictions_of_a_file(base_directory, tmp_path, run):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{prompt} "}) for prompt in PROMPTS))
    ours, theirs = tmp_path / "vllm.csv", tmp_path / "transformers.csv"
    run("predict", base_directory, rows, "-o", theirs, "--dtype", "float32")
    run("predict", base_directory, rows, "-o", ours, "--dtype", "float32", "--engine", "vllm")
    tables = []
    for file in (ours, theirs):
        with file.open(newline="") as stream:
            tables.append(list(csv.DictReader(stream)))
    assert [row["prompt"] for row in tables[0]] == [row["prompt"] for row in tables[1]]
    for mine, other in zip(*tables, strict=True):
        for column in ("median", "lower", "upper", "prob_num"):
            assert float(mine[column]) == pytest.approx(float(other[column]), rel=1e-2, abs=1e-6)


def test_a_single_text_is_refused(base_directory, run):
    with pytest.raises(subprocess.CalledProcessError) as error:
        run("generate", base_directory, "Hello", "--engine", "vllm")
    assert "--engine vllm is for --prompts" in error.value.stderr
