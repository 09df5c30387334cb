"""Every benchmark runs to its end at tiny sizes, full and quick, and says what its readers rely on."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from causal_qwen.cli import app
from conftest import tiny_base, tiny_tokenizer

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
# vllm runs where vLLM is: tests/serving_vllm.
NO_SCRIPT = {
    "effect_data", "effect_learners", "frozen", "measure", "peers", "render", "replay", "structural",
    "table_data", "vllm", "worlds", "writers",
}  # fmt: skip
SCRIPTS = sorted({file.stem for file in BENCHMARKS.glob("*.py")} - NO_SCRIPT)
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
SETTINGS = {"causal rho=0.2", "softmax T=1.0", "causal floor=0.0"}
DECODE = {
    "float32_vs_transformers", "bfloat16_vs_transformers", "int8_vs_llamacpp", "int4_vs_llamacpp",
    "int8_top1_agreement", "int4_top1_agreement", "batch8_vs_batch1", "causal_vs_plain", "standard, cost",
    "int8, tokens per second", "int8, share of bandwidth",
}  # fmt: skip
GENERATE = {"compatible_ratio", "standard_ratio", "causal_ratio", "base_tokens_per_second"}
TRAINING = {
    f"{who}_{what}"
    for who in ("plain", "exact", "sampled")
    for what in ("ratio", "memory_ratio", "tokens_per_second")
}
# Keys that a script's figures must have: of a full run, and of a quick one where they differ.
KEYS = {
    "abduction": ({"sampled_replay_rate", "written_replay_rate", "seconds_per_token", "refused"},),
    "cars": ({"medians", "runs", "splits"},),
    "comparison": ({"compared", "independent"},),
    "comparison_coverage": ({"normal, 0.0", "log-normal, 0.1"},),
    "conversion_cost": ({"bfloat16", "float32", "gguf"},),
    "counterfactual_truth": (
        {"additive_ratio", "multiplicative_ratio", "monotone_ratio", "noises", "end_to_end"},
    ),
    "decision_head": ({"times", "memory"}, {"float32_ratio", "bfloat16_ratio", "batch8_ratio"}),
    "decode": (DECODE | {"tables", "quality"}, DECODE),
    "decoder_cache": ({"64", "128"},),
    "descriptions": ({"states", "left_out", "seconds"},),
    "fuzz": ({"targets", "all"},),
    "generate": ({"embedded", "tiny dimensions", "growth"}, GENERATE),
    "identity": ({"attribution", "half_text", "half_text_standard_errors", "chance", "settings"},),
    "individual_sets": ({"first", "texts"},),
    "memory": ({"full, float32, 2 × 96", "lora, float32, 4 × 256", "heads, a table"},),
    "outliers": ({"causal_growth_30", "boosting_growth_30", "boosting_l1_growth_30", "tables"},),
    "ovr_loss": (
        {"sizes", "step_seconds", "step_memory", "exactness"},
        {
            "fused_time_ratio",
            "fused_memory_ratio",
            "sampled_time_ratio",
            "step_fused_ratio",
            "step_sampled_ratio",
        },
    ),
    "processor": ({"number_free_ratio", "number_heavy_ratio", "token_ratio", "cases"},),
    "sampled_finetune": ({"final_loss_ratio", "fused", "sampled"},),
    "sampling_frontier": (SETTINGS,),
    "scan_numbers": ({"sizes_mb", "cases"},),
    "serve": ({"throughput_ratio_16", "ttft_p95_s", "failed", "mismatched", "rss_growth_mb", "siege"},),
    "simulation": ({"runs"},),
    "startup": ({"int8_mb", "half_billion_int8_mb", "int8_vs_llamacpp_and_torch", "seconds", "bytes"},),
    "tables": ({"tables", "free_text_wins"},),
    "training": (TRAINING,),
    "transfer": ({"default", "published", "none"},),
    "treatment_effects": ({"effects", "published"},),
    "tuning": ({"frozen_mdae", "tuned_mdae", "change", "curve"},),
    "tuning_tables": ({"occupations"},),
    "words": ({"agreement", "start", "rivals", "bounded", "unbounded", "cross_entropy"},),
}
RUNS = [(name, False) for name in SCRIPTS] + [(name, True) for name in KEYS if len(KEYS[name]) == 2]
CHILDREN = {
    "conversion_cost": "child", "decision_head": "child", "memory": "child", "ovr_loss": "child",
    "training": "measure",
}  # fmt: skip
PICTURES = {"decoder_cache", "identity", "outliers", "sampling_frontier", "tables", "tuning"}


@pytest.fixture(autouse=True)
def as_the_scripts_run(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def load(monkeypatch):
    """A script as a module; what it measures in processes of their own is measured in this one, and peers
    are cross-validated in as few folds as can be.
    """
    peers = importlib.import_module("peers")
    for folds in ("FOLDS", "CHOOSING_FOLDS"):
        monkeypatch.setattr(peers, folds, 2)

    def load(name):
        script = importlib.import_module(name)
        if name in CHILDREN:
            child = getattr(script, CHILDREN[name])
            monkeypatch.setattr(
                script,
                "in_child",
                lambda path, task: json.loads(json.dumps(child(**json.loads(json.dumps(task))))),
            )
        if name == "outliers":
            monkeypatch.setattr(script, "_command", command_in_this_process)
        return script

    return load


def command_in_this_process(*words):
    CliRunner().invoke(app, list(words), catch_exceptions=False)


@pytest.fixture(scope="module")
def base_directory(tmp_path_factory):
    """A saved checkpoint of random weights, as narrow as four bits allow."""
    directory = tmp_path_factory.mktemp("base")
    tiny_base(hidden_size=64, intermediate_size=128, tie_word_embeddings=True).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def arguments(base_directory):
    """Tiny sizes, and random weights where the script takes a base."""

    def arguments(script, *words):
        base = ["--base", str(base_directory)] if "base" in script.OPTIONS else []
        return ["--smoke", *base, *words]

    return arguments


def numbers(value):
    """Every number in nested figures."""
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from numbers(entry)
    elif isinstance(value, int | float):
        yield value


def test_every_benchmark_is_run_here():
    assert set(KEYS) == set(SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quick"), RUNS)
def test_benchmark_runs(name, quick, load, arguments, capsys, tmp_path, monkeypatch):
    script = load(name)
    measure = importlib.import_module("measure")
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "PICTURES", tmp_path)
    script.main(arguments(script, "--json", "--save", *(["--quick"] if quick else [])))
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])  # after what a trainer prints
    assert KEYS[name][-1 if quick else 0] <= set(figures)
    values = list(numbers(figures))
    assert values
    assert all(map(math.isfinite, values))

    record = measure.Record.load(f"{name}.quick" if quick else name)
    assert set(record.figures) == set(figures)
    for table in script.tables(record):
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert (tmp_path / f"{name}.png").is_file() == (name in PICTURES and not quick)


@pytest.mark.slow
def test_a_benchmark_is_a_program_that_prints_tables():
    words = [sys.executable, str(BENCHMARKS / "scan_numbers.py"), "--smoke"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "numbers in a table" in done.stdout


@pytest.mark.slow
def test_a_child_measures_in_a_process_of_its_own():
    measure = importlib.import_module("measure")
    task = {"variant": "linear", "dtype": "float32", "vocab": 1024}
    measured = measure.in_child(str(BENCHMARKS / "decision_head.py"), task)
    assert measured["seconds"] > 0
    failed = measure.in_child(str(BENCHMARKS / "decision_head.py"), task | {"dtype": "float7"})
    assert failed["error"] == "KeyError: 'float7'"


# --- what is saved


def record(measure, **changes):
    fields = {
        "name": "speed", "command": "python benchmarks/speed.py", "machine": {"cores": 2},
        "options": {"repeats": 3}, "figures": {"ratio": 1.25, "by": {"8": 2.0}},
    }  # fmt: skip
    return measure.Record(**(fields | changes))


def test_a_record_survives_its_file_and_nothing_else_is_left(tmp_path, monkeypatch):
    measure = importlib.import_module("measure")
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    record(measure).save()
    assert measure.Record.load("speed") == record(measure)
    assert [file.name for file in (tmp_path / "results").iterdir()] == ["speed.json"]


def test_figures_that_are_no_numbers_are_not_published(tmp_path, monkeypatch):
    measure = importlib.import_module("measure")
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    record(measure).save()
    with pytest.raises(ValueError, match="not JSON compliant"):
        record(measure, figures={"ratio": math.nan}).save()
    assert measure.Record.load("speed").figures["ratio"] == 1.25


def test_published_figures_have_five_digits():
    measure = importlib.import_module("measure")
    values = {8: (1.23456789, 123456.789), "count": 123_456_789, "whole": 1.0, "none": None, "yes": True}
    assert measure.rounded(values) == {
        "8": [1.2346, 123460.0], "count": 123_456_789, "whole": 1.0, "none": None, "yes": True,
    }  # fmt: skip


def test_nothing_is_written_unless_asked_and_a_quick_run_leaves_the_full_one(tmp_path, monkeypatch, capsys):
    measure, script = importlib.import_module("measure"), importlib.import_module("scan_numbers")
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    script.main(["--smoke", "--json"])
    assert not list(tmp_path.iterdir())
    script.main(["--smoke", "--save", "--json"])
    full = (tmp_path / "scan_numbers.json").read_bytes()
    script.main(["--smoke", "--save", "--quick", "--repeat", "2"])
    assert (tmp_path / "scan_numbers.json").read_bytes() == full
    quick = measure.Record.load("scan_numbers.quick")
    assert quick.command == "python benchmarks/scan_numbers.py --smoke --quick --repeat 2"
    assert quick.options["repeat"] == 2


def test_a_missing_file_names_the_command_that_measures_it(tmp_path, monkeypatch):
    measure = importlib.import_module("measure")
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"python benchmarks/decode\.py --quick --save"):
        measure.Record.load("decode.quick")


def test_who_cannot_see_a_bar_reads_lines(monkeypatch, capsys):
    measure = importlib.import_module("measure")
    monkeypatch.setattr(measure, "SECONDS_BETWEEN_LINES", 0.0)
    assert list(measure.watched(("a", "b"), "letters")) == ["a", "b"]
    assert capsys.readouterr().err.splitlines() == ["letters: 0 of 2", "letters: 1 of 2"]
