"""Two thousand inputs of every target, every input that ever failed, and the judge itself."""

import json
import os

import pytest

from fuzzing import planted
from fuzzing.judging import is_ours, judge
from fuzzing.running import CORPUS, batches, keep, run
from fuzzing.targets import TARGETS
from fuzzing.worker import run_batch

BY_NAME = {target.name: target for target in TARGETS}
INPUTS = 2000
KEPT = sorted(CORPUS.glob("*/*.bin"))


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Skipped rows are told thousands of times."""
    caplog.set_level("CRITICAL")


@pytest.mark.parametrize("name", BY_NAME)
def test_inputs_end_in_a_result_or_in_a_clear_error(name, one_thread):
    parts = [part for part in batches(TARGETS, inputs=INPUTS, seed=0) if part.target.name == name]
    assert parts
    for part in parts:
        counts = run_batch(*part)
        assert counts.inputs >= part.count
        assert not counts.failures, counts.failures[0]


@pytest.mark.parametrize("file", KEPT, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_an_input_that_failed_once_does_so_no_more(file):
    verdict, said = judge(BY_NAME[file.parent.name], file.read_bytes())
    assert verdict != "failure", said
    assert json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))["target"] == file.parent.name


def test_the_same_seed_makes_the_same_inputs():
    for target in TARGETS:
        runs = []
        for seed in (3, 3, 4):
            inputs: list[bytes] = []
            target.source.feed(seed, 20, inputs.append)
            runs.append(inputs)
        assert runs[0] == runs[1] != runs[2]
    parts = batches(TARGETS, inputs=100_000, seed=0)
    assert sum(part.count for part in parts) >= 99_900
    assert len({(part.target.name, part.seed) for part in parts}) == len(parts)


def test_an_error_is_ours_if_we_raised_it_with_something_to_read():
    for check, ours in planted.ERRORS:
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            check()
        assert is_ours(caught.value) == ours, check.__name__


def test_failing_inputs_are_kept_a_few_of_a_kind(tmp_path):
    target = TARGETS[0]
    failures = [(f"input {index}".encode(), "KeyError: 1 (a.py:3 f)") for index in range(9)]
    kept = keep(target, 5, [*failures, (b"other", "TypeError: 2 (a.py:3 f)")], tmp_path)
    assert len(kept) == 4
    files = sorted(tmp_path.glob(f"{target.name}/*.bin"))
    assert sorted(file for file, _ in kept) == files
    assert files[0].read_bytes() in {b"other", b"input 0", b"input 1", b"input 2"}
    about = json.loads(files[0].with_suffix(".json").read_text(encoding="utf-8"))
    assert (about["target"], about["seed"]) == (target.name, 5)


@pytest.mark.slow
def test_hangs_and_strayed_reads_are_failures_and_the_rest_goes_on():
    """Native code is built for AddressSanitizer, once; a process that dies leaves its input."""
    said = {}
    for part, counts in run(batches(planted.TARGETS, inputs=4, seed=0), jobs=1, module="fuzzing.planted"):
        assert counts.inputs == part.count
        assert counts.results == part.count - 1
        ((data, said[part.target.name]),) = counts.failures
        assert data.endswith(b"!")
    assert "took more than" in said["hang"]
    assert "the process ended with" in said["hang below"]
    assert "Timeout" in said["hang below"]
    assert "heap-buffer-overflow" in said["strayed read"]
    assert "LD_PRELOAD" not in os.environ
