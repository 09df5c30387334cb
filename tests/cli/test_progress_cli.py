"""Bars of long commands: on a terminal a bar, elsewhere a line every ten seconds, with --quiet nothing."""

import io

import pytest

from causal_qwen.cli import progress
from causal_qwen.cli.progress import bar, counted


def test_off_a_terminal_a_line_now_and_then(capsys, monkeypatch):
    times = iter([0.0, 4.0, 11.0, 12.0, 30.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with bar("reading", 8) as advance:
        for _ in range(4):
            advance(2)
    assert capsys.readouterr().err == "reading: 50%, about 11 seconds left\n"


def test_items_are_counted_where_nobody_knows_how_many_there_will_be(capsys, monkeypatch):
    times = iter([0.0, 4.0, 11.0, 12.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    assert list(counted("abc", "predicting", "rows", done=5)) == ["a", "b", "c"]
    assert capsys.readouterr().err == "predicting: 7 rows\n"


def test_on_a_terminal_a_bar_with_the_time_that_is_left(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with bar("writing", 4) as advance:
        advance(2)
    assert "writing" in screen.getvalue()
    assert "50%" in screen.getvalue()
    assert "-:--:--" in screen.getvalue() or "0:00:" in screen.getvalue()


def test_conversion_tells_its_phases_and_quiet_silences_them(base_directory, tmp_path, monkeypatch, capsys):
    from causal_qwen.cli import main

    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    words = ["causal-qwen", "convert", str(base_directory), "--calibration", "none", "--json"]
    monkeypatch.setattr("sys.argv", [*words, str(tmp_path / "loud")])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    loud = capsys.readouterr()
    assert "reading: " in loud.err
    assert "writing: " in loud.err
    monkeypatch.setattr("sys.argv", [*words, str(tmp_path / "quiet"), "--quiet"])
    with pytest.raises(SystemExit):
        main()
    quiet = capsys.readouterr()
    assert quiet.err == ""
    assert "num_token_id" in quiet.out
