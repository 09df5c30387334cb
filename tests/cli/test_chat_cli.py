"""chat: whatever is typed, the conversation goes on."""

import json

import pytest
from typer.testing import CliRunner

from causal_qwen.cli import app
from conftest import CHAT_TEMPLATE, tiny_causal, tiny_processor


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("talk") / "model"
    tiny_causal(max_position_embeddings=160).save_pretrained(directory)
    tiny_processor(chat_template=CHAT_TEMPLATE).save_pretrained(directory)
    return directory


def chat(model, said, *options, quiet=False):
    arguments = ["--quiet"] * quiet + ["chat", str(model), "--max-new-tokens", "4", "--seed", "3", *options]
    result = CliRunner().invoke(app, arguments, input=said)
    assert result.exit_code == 0, result.output
    return result


def saved(model, said, tmp_path, *options):
    chat(model, f"{said}/save {tmp_path}/chat.json\n", *options)
    return json.loads((tmp_path / "chat.json").read_text())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/individual 99999999999999999999", "seed is 99999999999999999999; an individual's seed is"),
        (f"/individual {'9' * 5000}", "/individual 9999"),
        ("/individual -1", "/individual -1: give a seed"),
        ("/individual seven", "/individual seven: give a seed"),
        ("/individual ²", "/individual ²: give a seed"),
        ("/individual", "give a seed"),
        ("/mode loud", "choose one of standard, causal, compatible"),
        ("/mode", "choose one of standard, causal, compatible"),
        ("/nonsense", "/nonsense is no command; /help lists them"),
        ("/save", "/save needs a file"),
        ("/save /absent/chat.json", "/absent: no such directory"),
        ("/load", "/load needs a file"),
        ("/load /absent.json", "No such file"),
        ("x" * 300, "do not fit the context of 160"),
    ],
)
def test_a_bad_command_is_a_message_and_the_conversation_goes_on(model, command, message, tmp_path):
    result = chat(model, f"hi\n{command}\nagain\n/save {tmp_path}/chat.json\n", quiet=True)
    (error,) = (line for line in result.stderr.splitlines() if line.startswith("error"))
    assert message in error
    content = json.loads((tmp_path / "chat.json").read_text())
    assert [turn["content"] for turn in content["messages"][::2]] == ["hi", "again"]
    assert content["individual"]["seed"] == 3


def test_empty_lines_are_nothing(model, tmp_path):
    assert saved(model, "\n   \n", tmp_path)["messages"] == []


def test_several_lines_are_one_message(model, tmp_path):
    said = 'one \\\ntwo\n"""\n/quit is\n\n text\n"""\n"""three"""\n'
    content = saved(model, said, tmp_path)
    assert [turn["content"] for turn in content["messages"][::2]] == [
        "one \ntwo",
        "/quit is\n\n text",
        "three",
    ]


def test_an_unfinished_message_is_sent_at_the_end(model):
    assert chat(model, '"""\nhello').stdout.strip()
    assert chat(model, "hello\\").stdout.strip()


def test_a_loaded_conversation_goes_on(model, tmp_path):
    whole = chat(model, "hi\nagain\n", "--top-k", "5").stdout
    first = chat(model, f"hi\n/save {tmp_path}/chat.json\n", "--top-k", "5").stdout
    second = chat(model, f"other\n/load {tmp_path}/chat.json\nagain\n", "--mode", "standard")
    assert "2 messages from" in second.stderr
    assert "mode causal, seed 3" in second.stderr
    assert whole == first + second.stdout.split("\n", 1)[1]


@pytest.mark.parametrize("options", [(), ("--top-p", "0.8"), ("--mode", "compatible", "--top-k", "3")])
def test_both_engines_answer_alike(model, options):
    said = "hi\nthere 12.5\n"
    texts = [chat(model, said, "--engine", name, *options).stdout for name in ("transformers", "native")]
    assert texts[0] == texts[1]


def test_turns_that_no_longer_fit_are_left_out_and_it_is_said(model):
    result = chat(model, "x" * 40 + "\n" + "y" * 40 + "\n" + "z" * 40 + "\n")
    assert "the first 2 messages no longer fit the context" in result.stderr


def test_help_and_options_without_effect_are_told(model):
    result = chat(model, "/help\n", "--mode", "standard")
    assert "/save FILE" in result.stderr
    assert "--seed has no effect: mode standard" in result.stderr
