"""--quiet: the result on standard output, and nothing on standard error, not even on a terminal."""

import os

import pytest

from causal_qwen import convert
from causal_qwen.cli import VERBS, main
from command_processes import start
from training_runs import TEMPLATE, write_table

COMMANDS = {
    "convert": ["convert", "BASE", "out", "--calibration", "none"],
    "train": ["train", "--model", "MODEL", "--data", "TABLE", "--template", TEMPLATE, "-o", "out",
              "--max-steps", "2"],
    "generate": ["generate", "MODEL", "hello", "--max-new-tokens", "2", "--sample"],
    "predict": ["predict", "MODEL", "TABLE", "-o", "out.csv", "--template", TEMPLATE, "--target", "price"],
    "counterfactual": ["counterfactual", "MODEL", "hello", "--do", "bye", "--max-new-tokens", "2"],
    "compare": ["compare", "MODEL", "--prompts", "PROMPTS", "--individuals", "2", "--max-new-tokens", "2",
                "--against-persistence", "0.5"],
    "export": ["export", "MODEL", "plain"],
    "parity": ["parity", "BASE", "--calibration", "none"],
    "eval": ["eval", "MODEL", "TABLE", "--template", TEMPLATE, "--target", "price", "--report", "report.md"],
    "info": ["info", "MODEL"],
    "numbers": ["numbers", "99 bottles"],
    "kv-memory": ["kv-memory", "MODEL"],
    "simulate": ["simulate", "--count", "100", "--steps", "20", "--no-plot"],
}  # fmt: skip
# Minutes on the embedded base; a conversation; needs a hub; never ends.
NOT_HERE = {"demo", "chat", "push", "serve"}


@pytest.fixture(scope="module")
def places(base_directory, tmp_path_factory):
    directory = tmp_path_factory.mktemp("quiet")
    convert(base_directory, directory / "model", calibration="none")
    table = write_table(directory / "table.jsonl", rows=24)
    prompts = directory / "prompts.txt"
    prompts.write_text("hello\nbye\n", encoding="utf-8")
    places = {"BASE": base_directory, "MODEL": directory / "model", "TABLE": table, "PROMPTS": prompts}
    return {name: str(place) for name, place in places.items()}


def test_every_verb_is_here():
    assert {verb for verbs in VERBS.values() for verb in verbs} == COMMANDS.keys() | NOT_HERE


@pytest.mark.parametrize("verb", COMMANDS)
def test_only_the_result_is_printed(places, tmp_path, monkeypatch, capfd, verb):
    monkeypatch.chdir(tmp_path)
    arguments = [places.get(word, word) for word in COMMANDS[verb]]
    monkeypatch.setattr("sys.argv", ["causal-qwen", *arguments, "--quiet"])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capfd.readouterr()
    assert end.value.code == 0
    assert printed.err == ""
    assert printed.out.strip()


def test_errors_are_said_all_the_same(tmp_path, monkeypatch, capfd):
    for arguments, message in ((["info", "./nowhere"], "no such directory"), (["info"], "Missing argument")):
        monkeypatch.setattr("sys.argv", ["causal-qwen", "--quiet", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code not in (0, None)
        assert message in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["predict", "train"])
def test_no_bar_is_drawn_on_a_terminal(places, tmp_path, verb):
    """In a process whose standard error is a terminal, where bars are drawn otherwise."""
    ours, theirs = os.openpty()
    arguments = [places.get(word, word) for word in COMMANDS[verb]]
    child = start([*arguments, "--quiet"], directory=tmp_path, stderr=os.ttyname(theirs), OMP_NUM_THREADS="1")
    child.join(timeout=60)
    assert child.exitcode == 0
    os.set_blocking(ours, False)
    with pytest.raises(BlockingIOError):
        os.read(ours, 1)
    os.close(ours)
    os.close(theirs)
