"""Files of prompts."""

import json

import pytest

from causal_qwen.data import BadRow, BadRows
from causal_qwen.prompting import Asking, Settings


def asked(tmp_path, lines, name="prompts.jsonl", action="error", **options):
    file = tmp_path / name
    rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(rows), encoding="utf-8")
    asking, bad_rows = Asking(Settings(**options.pop("settings", {})), **options), BadRows(action)
    return asking.file(file, bad_rows), asking, bad_rows


def test_a_line_of_text_is_a_prompt(tmp_path):
    requests, _, _ = asked(tmp_path, ["\ufeffone", "", '{"two"', "three 3\r"], "prompts.txt")
    assert [request.prompt for request in requests] == ["one", '{"two"', "three 3"]
    assert [request.id for request in requests] == [0, 1, 2]
    assert requests[1].where.endswith("prompts.txt:3")


def test_a_row_has_an_id_a_prompt_and_settings_of_its_own(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    rows = [
        {"id": "a", "prompt": "x", "seed": 4, "stop": "\n", "label": 1},
        {"messages": chat, "max_new_tokens": 3},
        {"text": "y", "system": "be brief", "stop": ["a", "b"], "top_k": None},
    ]
    requests, asking, _ = asked(tmp_path, rows, settings={"max_new_tokens": 9, "top_k": 2})
    assert [request.id for request in requests] == ["a", 1, 2]
    assert requests[0].settings == Settings(seed=4, stop=("\n",), max_new_tokens=9, top_k=2)
    assert requests[1].prompt == tuple(chat)
    assert requests[1].settings.max_new_tokens == 3
    assert requests[2].prompt == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "y"},
    ]
    assert requests[2].settings.stop == ("a", "b")
    assert asking.unused == {"label"}


def test_chat_makes_messages_of_texts(tmp_path):
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "z"}]
    requests, _, _ = asked(tmp_path, [{"prompt": "x"}, {"messages": own}], chat=True, system="be brief")
    assert [turn["content"] for turn in requests[0].prompt] == ["be brief", "x"]
    assert list(requests[1].prompt) == own


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "neither prompt, text nor messages among the fields question"),
        ({"prompt": " "}, "prompt is empty"),
        ({"prompt": "x", "top_p": 2}, "top_p is 2; it must be"),
        ({"prompt": "x", "seed": "7"}, "seed is '7'"),
        ({"prompt": "x", "stop": 5}, "stop is 5"),
        ({"prompt": "x", "stop": [5]}, r"stop is \(5,\)"),
        ({"prompt": "x", "system": 5}, "system is 5, not a text"),
        ("{broken", "broken JSON"),
    ],
)
def test_bad_rows_are_named_by_line_or_skipped(tmp_path, row, message):
    with pytest.raises(BadRow, match=message) as caught:
        asked(tmp_path, [{"prompt": "fine"}, row])
    assert "prompts.jsonl:2" in str(caught.value)
    requests, _, bad_rows = asked(tmp_path, [{"prompt": "fine"}, row], action="skip")
    assert (len(requests), bad_rows.count) == (1, 1)


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("gut\nschön".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt:2: byte 0xf6 .* is not utf-8; save it as UTF-8"):
        Asking(Settings()).file(tmp_path / "latin.txt", BadRows())
    with pytest.raises(ValueError, match=r"absent.txt: no such file"):
        Asking(Settings()).file(tmp_path / "absent.txt", BadRows())
