"""Conversations: one individual, its file, and a context that they outgrow."""

import json

import pytest

from causal_qwen import Individual
from causal_qwen.context import ContextError
from causal_qwen.prompting import Conversation, Settings, Speaker
from conftest import CHAT_TEMPLATE, tiny_causal, tiny_processor


@pytest.fixture(scope="module")
def speaker(one_thread):
    return Speaker(tiny_causal(max_position_embeddings=128), tiny_processor(chat_template=CHAT_TEMPLATE))


def conversation(**options):
    return Conversation(Settings(mode="causal", max_new_tokens=4), Individual(3), **options)


def test_the_individual_goes_on_and_begins_again(speaker):
    talk = conversation()
    answer, left_out = talk.ask(speaker, "hi")
    assert (left_out, talk.individual.start) == (0, answer.tokens)
    assert [turn["role"] for turn in talk.messages] == ["user", "assistant"]
    talk.restart()
    assert talk.ask(speaker, "hi")[0] == answer


def test_the_oldest_turns_leave_the_context_and_the_system_message_stays(speaker, monkeypatch):
    talk, prompts = conversation(system="be brief"), []
    check = speaker.check
    monkeypatch.setattr(
        speaker, "check", lambda prompt, settings: prompts.append(prompt) or check(prompt, settings)
    )
    dropped = [talk.ask(speaker, f"question {index} " + "x" * 10)[1] for index in range(4)]
    assert dropped[0] == 0
    assert dropped[-1] > 0
    assert [turn["role"] for turn in prompts[-1][:2]] == ["system", "user"]
    assert len(talk.messages) == 8


def test_a_question_that_cannot_fit_is_refused_and_not_kept(speaker):
    talk = conversation()
    with pytest.raises(ContextError, match="context of 128"):
        talk.ask(speaker, "x" * 200)
    assert talk.messages == []


def test_a_saved_conversation_goes_on_as_if_nothing_had_happened(speaker, tmp_path):
    talk = conversation(system="be brief")
    talk.ask(speaker, "one")
    talk.save(tmp_path / "chat.json")
    loaded = Conversation.load(tmp_path / "chat.json")
    assert loaded.ask(speaker, "two")[0] == talk.ask(speaker, "two")[0]
    assert loaded.messages == talk.messages
    talk.save(tmp_path / "chat.json")
    assert Conversation.load(tmp_path / "chat.json").messages == talk.messages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "other"}, "is not a saved conversation"),
        ({"messages": [{"role": 1}]}, "each needs role and content"),
        ({"messages": None, "settings": {"mode": "causal", "top_p": 3}}, "top_p is 3"),
        ({"settings": {"volume": 3}}, "unknown settings volume"),
        ({"settings": {}}, "no mode"),
        ({"settings": []}, "damaged"),
        ({"system": 4}, "system is 4"),
        ({"individual": {"seed": -1, "persistence": None, "start": 0}}, "seed is -1"),
        ({"individual": None}, "damaged"),
    ],
)
def test_a_file_that_is_no_conversation_is_said_to_be_none(tmp_path, change, message):
    file = tmp_path / "chat.json"
    conversation().save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        Conversation.load(file)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[1, 2]", b"[" * 100_000, b""])
def test_other_files_are_left_alone(tmp_path, content):
    (tmp_path / "notes").write_bytes(content)
    with pytest.raises(ValueError, match=r"not a saved conversation.*choose another name"):
        conversation().save(tmp_path / "notes")
    assert (tmp_path / "notes").read_bytes() == content
    with pytest.raises(ValueError, match="No such file"):
        Conversation.load(tmp_path / "absent")
