"""The four scripts pass on a lawful model, and each broken law makes at least one of them fail."""

import copy
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from causal_qwen.cauchy import Cauchy
from causal_qwen.conversion import Base, convert, load_base
from causal_qwen.generation.decisions import Decision
from causal_qwen.heads import ActionNetwork
from conftest import tiny_base, tiny_tokenizer

ROOT = Path(__file__).parents[1]
SCRIPTS = (
    "causal_qwen_v2_validation_test",
    "qwen_compatibility_test",
    "simple_demo_v2",
    "end_to_end_comparison_test_v2",
)
V2, COMPATIBILITY, DEMO, END_TO_END = SCRIPTS
FAST = {V2: ["--draws", "8192"], COMPATIBILITY: ["--tokens", "3"]}


@pytest.fixture(autouse=True)
def from_the_scripts_directory(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny():
    """A base without spare rows, so that <NUM> is added, as to the embedded base; and its conversion."""
    base = Base("tiny", tiny_base(vocab_size=258, tie_word_embeddings=True), tiny_tokenizer())
    return base, convert(base)


@pytest.fixture
def run(monkeypatch, tiny):
    """Run a script on a fresh conversion of the tiny base; ``damage`` gets the converted model first."""

    def run(name, damage=None):
        script = importlib.import_module(name)

        def load(name, seed, calibration="default"):
            base, conversion = tiny
            conversion = replace(conversion, model=copy.deepcopy(conversion.model))
            if damage is not None:
                damage(conversion.model)
            return base, conversion

        monkeypatch.setattr(script.checks, "load", load)
        return script.main(FAST.get(name, []))

    return run


def failures(printed):
    return [line for line in printed.splitlines() if "FAIL" in line]


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_passes_on_a_lawful_model(name, run, capsys):
    code = run(name)
    out = capsys.readouterr()
    assert code == 0, out.err
    assert not failures(out.out)
    assert "checks passed" in out.out


def test_script_is_a_program(base_directory):
    """By its name, on a directory; the exit code is the answer."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{DEMO}.py"), "--base", str(base_directory)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed" in done.stdout


# --- broken laws


lawful_exogenous, lawful_scores, lawful_choose = (
    ActionNetwork.exogenous,
    ActionNetwork.scores,
    Decision.choose,
)


def noise_moves_the_wrong_way(self, U, *, do_sample=False, **options):
    law = lawful_exogenous(self, U, do_sample=do_sample, **options)
    return Cauchy(2 * U.loc - law.loc, law.scale)


def noise_narrows_the_scale(self, U, *, do_sample=False, **options):
    law = lawful_exogenous(self, U, do_sample=do_sample, **options)
    return Cauchy(law.loc, (2 * U.scale - law.scale).abs() + 1e-6)


def temperature_acts_without_sampling(self, U, *, do_sample=False, temperature=1.0, **options):
    law = lawful_exogenous(self, U, do_sample=do_sample, temperature=temperature, **options)
    return law if do_sample else Cauchy(law.loc, U.scale + temperature * (law.scale - U.scale))


def temperature_divides_logits(self, U, *, do_sample=False, temperature=1.0, **options):
    law = lawful_exogenous(self, U, do_sample=do_sample, temperature=temperature, **options)
    return law if do_sample or temperature == 0 else Cauchy(law.loc / temperature, law.scale)


def scale_keeps_the_sign_of_W(self, U, U0, weight, rows=None):
    law = lawful_scores(self, U, U0, weight, rows)
    signed = (U.scale @ (weight if rows is None else weight[rows]).T).abs() + 1e-3
    return Cauchy(law.loc, signed)


def without_balance(model):
    with torch.no_grad():
        model.action.balance.zero_()


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("exogenous", noise_moves_the_wrong_way),
        ("exogenous", noise_narrows_the_scale),
        ("exogenous", temperature_acts_without_sampling),
        ("exogenous", temperature_divides_logits),
        ("scores", scale_keeps_the_sign_of_W),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_principles_fail_when_a_law_is_broken(method, broken, run, monkeypatch, capsys):
    monkeypatch.setattr(ActionNetwork, method, broken)
    assert run(V2) == 1
    assert failures(capsys.readouterr().out)


def test_an_individual_that_is_moved_the_wrong_way_is_noticed(run, monkeypatch, capsys):
    """Cauchy noise is symmetric: no distribution shows this, only the individual's own draw does."""

    def choose(self, model, outputs, *rest):
        lawful_noise = Decision._noise
        monkeypatch.setattr(Decision, "_noise", lambda *args: tuple(-noise for noise in lawful_noise(*args)))
        try:
            return lawful_choose(self, model, outputs, *rest)
        finally:
            monkeypatch.setattr(Decision, "_noise", lawful_noise)

    monkeypatch.setattr(Decision, "choose", choose)
    assert run(V2) == 1
    assert len(failures(capsys.readouterr().out)) == 1


@pytest.mark.parametrize("name", [V2, DEMO, END_TO_END])
def test_without_balance_the_scripts_fail(name, run, capsys):
    assert run(name, without_balance) == 1
    assert failures(capsys.readouterr().out)


def test_a_changed_logit_breaks_compatibility(run, capsys):
    def shift_one_row(model):
        with torch.no_grad():
            model.action.bias[65] += 20.0

    assert run(COMPATIBILITY, shift_one_row) == 1
    assert "FAIL" in capsys.readouterr().out


def test_temperature_in_generate_without_sampling_is_noticed(run, monkeypatch):
    monkeypatch.setattr(ActionNetwork, "exogenous", temperature_divides_logits)
    assert run(DEMO) == 1


# --- the embedded base


@pytest.fixture(scope="module")
def embedded(calibrated_once):
    base = load_base("smollm2", dtype=torch.float32)
    return base, convert(base)


@pytest.mark.slow
@pytest.mark.parametrize("name", [V2, COMPATIBILITY, END_TO_END, DEMO])  # the demo trains the model, so last
def test_script_passes_on_the_embedded_base(name, embedded, monkeypatch, capsys):
    script = importlib.import_module(name)
    monkeypatch.setattr(script.checks, "load", lambda *asked: embedded)
    code = script.main(FAST.get(name, []))
    assert code == 0, capsys.readouterr().err
