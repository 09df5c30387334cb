"""The processor: as text, the tokenizer's own ids and the same text; as values, the same but for digits; as
prompts of a model that writes values, the text but for white space at its end.
"""

import functools
import json

from hypothesis import strategies as st

from causal_qwen import CausalQwen2Processor
from causal_qwen.numbers import write
from conftest import tiny_processor
from fuzzing.inputs import ODD_TEXT, Drawn
from fuzzing.scanning import parts
from fuzzing.target import Target

__all__ = ["TARGETS", "check_decoding", "check_encoding", "check_windows"]


CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@functools.cache
def processor() -> CausalQwen2Processor:
    """One token per byte, and a chat template."""
    return tiny_processor(chat_template=CHAT_TEMPLATE)


def check_encoding(data: bytes) -> None:
    """Text → ids → text, digits as text, as values and as a prompt."""
    text = json.loads(data)
    own = processor()
    plain = own(text, numbers="text")
    assert own.decode(plain["input_ids"], plain["numeric_values"]) == text
    if "<NUM>" not in text:
        assert plain["input_ids"] == own.tokenizer(text)["input_ids"]
    prompt = own(text, numbers="written")
    assert own.decode(prompt["input_ids"], prompt["numeric_values"]) == text.rstrip()
    gaps, values = parts(text)
    batch = own(text)
    ids, numeric_values = batch["input_ids"], batch["numeric_values"]
    assert [
        value for token, value in zip(ids, numeric_values, strict=True) if token == own.num_token_id
    ] == values
    again = own.decode(ids, numeric_values)
    assert again == write(gaps, values)
    assert own(again)["input_ids"] == ids
    assert own(again)["numeric_values"] == numeric_values


def check_windows(data: bytes) -> None:
    """Rows of a few tokens each are the text in pieces, and padding adds nothing to it."""
    texts, length, side = json.loads(data)
    own = processor()
    whole = [own(text) for text in texts]
    rows = own(
        texts,
        truncation=True,
        max_length=length,
        return_overflowing_tokens=True,
        padding=True,
        padding_side=side,
        return_tensors="np",
    )
    for index, text in enumerate(whole):
        mine = [row for row, sample in enumerate(rows["overflow_to_sample_mapping"]) if sample == index]
        for name in ("input_ids", "numeric_values"):
            joined = [
                entry
                for row in mine
                for entry, shown in zip(rows[name][row], rows["attention_mask"][row], strict=True)
                if shown
            ]
            assert joined == text[name]


def check_decoding(data: bytes) -> None:
    """Any ids and values are text, or refused by position."""
    ids, values, skip = json.loads(data)
    text = processor().decode(ids, values, skip_special_tokens=skip)
    assert isinstance(text, str)


IDS = st.lists(
    st.integers(0, 299) | st.just(258) | st.sampled_from([-1, 300, 2**31, 2**63, 2**70]), max_size=8
)
VALUES = st.lists(st.floats() | st.just(0.0), max_size=8)
TARGETS = (
    Target(name="processing", source=Drawn(ODD_TEXT), check=check_encoding, share=120),
    Target(
        name="windows",
        source=Drawn(
            st.tuples(
                st.lists(ODD_TEXT, min_size=1, max_size=3),
                st.integers(0, 9),
                st.sampled_from(["left", "right"]),
            )
        ),
        check=check_windows,
        share=30,
    ),
    Target(
        name="decoding",
        source=Drawn(
            st.one_of(
                st.tuples(IDS, st.none() | VALUES, st.booleans()),
                st.lists(st.tuples(st.integers(0, 258), st.floats()), max_size=6).flatmap(
                    lambda pairs: st.tuples(
                        st.just([a for a, _ in pairs]), st.just([b for _, b in pairs]), st.booleans()
                    )
                ),
            )
        ),
        check=check_decoding,
        share=50,
    ),
)
