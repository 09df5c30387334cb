"""Chats: messages and templates of every kind give a text with each content in it, or an error."""

import json

from hypothesis import strategies as st

from causal_qwen.data import Encoder, Reading
from causal_qwen.data.rows import BadRows
from conftest import tiny_processor
from fuzzing.inputs import ODD_TEXT, ODD_VALUES, Drawn, Mutated, mostly
from fuzzing.processing import CHAT_TEMPLATE, processor
from fuzzing.target import Target

__all__ = ["TARGETS", "check_messages", "check_template"]

FILES = [
    CHAT_TEMPLATE.encode(),
    b"{%- for m in messages %}{{- '<|start|>' + m.role + '\\n' + (m.content | trim) + '<|end|>\\n' }}"
    b"{%- endfor %}{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{%- endif %}",
]
MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def check_messages(data: bytes) -> None:
    """What a chat says stands in its text, which is encoded; as a row it is learned or refused."""
    messages = json.loads(data)
    rows = list(
        Encoder(processor(), Reading(), max_length=512).rows([{"messages": messages}], BadRows("error"))
    )
    assert rows
    text = processor().apply_chat_template(messages)
    assert all(message["content"] in text for message in messages)
    ids = processor().apply_chat_template(messages, tokenize=True, return_dict=True, numbers="text")[
        "input_ids"
    ]
    assert processor().decode(ids, [0.0] * len(ids)) == text


def check_template(data: bytes) -> None:
    """A template writes a text, or the error says that it is the template's."""
    own = tiny_processor(chat_template=data.decode("utf-8", "replace"))
    text = own.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert isinstance(text, str)


ROLES = st.sampled_from(["user", "assistant", "system", "", "tool"])
MESSAGE = st.fixed_dictionaries({"role": ROLES, "content": ODD_TEXT})
ANSWER = st.fixed_dictionaries({"role": st.just("assistant"), "content": ODD_TEXT})
CHAT = st.builds(lambda chat, answer: [*chat, answer], st.lists(MESSAGE, min_size=1, max_size=3), ANSWER)
TARGETS = (
    Target(
        name="chats",
        source=Drawn(
            mostly(
                CHAT, st.lists(MESSAGE, max_size=4) | st.lists(MESSAGE | ODD_VALUES, max_size=3) | ODD_VALUES
            )
        ),
        check=check_messages,
        share=30,
    ),
    Target(name="chat-templates", source=Mutated(lambda: FILES), check=check_template, share=15),
)
