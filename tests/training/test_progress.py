"""Progress is a bar on a terminal, and elsewhere a line every ten seconds."""

import io
import sys

import pytest
from transformers.trainer_callback import TrainerState

from causal_qwen.training import progress
from causal_qwen.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def run(callback, state, steps, clock, seconds):
    callback.on_train_begin(None, state, None)
    for step in range(state.global_step + 1, state.global_step + 1 + steps):
        clock[0] += seconds
        state.global_step = step
        callback.on_step_end(None, state, None)
        callback.on_log(None, state, None, logs={"train/total_loss": 10.0 / step})
    callback.on_train_end(None, state, None)


def test_a_line_every_ten_seconds_off_a_terminal(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines = []
    state = TrainerState(max_steps=100, global_step=20)  # a run that was resumed
    run(Progress(lambda: 4000, lines.append), state, 16, clock, 2.5)
    assert len(lines) == 4
    assert lines[0].startswith("step 24/100 · loss 0.4348 · 400 tokens/s · 0:03:10 left")
    assert sys.stderr.getvalue() == ""


def test_a_bar_on_a_terminal(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    lines = []
    run(Progress(lambda: 4000, lines.append), TrainerState(max_steps=40), 40, clock, 2.5)
    assert lines == []
    assert "40/40" in sys.stderr.getvalue()
