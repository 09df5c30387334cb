"""Spare rows in every form that checkpoints have them, with Qwen's real vocabulary: <NUM> is 151,665."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from causal_qwen import convert
from causal_qwen.conversion import ConversionError, bundled_text, sources
from causal_qwen.conversion.vocabulary import choose_num_token
from conftest import tiny_base, tiny_tokenizer
from gguf_files import write_gguf
from qwen_vocabulary import qwen_tokenizer

TOKENS, ROWS = 151_665, 151_936
PLACEHOLDERS = [f"[PAD{row}]" for row in range(TOKENS, ROWS)]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    bundled_text("heldout"),
    bundled_text("calibration")[:4000],
    "价格是99.9元，下午3點。 Größe: 1,80 m — naïve café\r\n\t  ١٢٣ हिन्दी 한국어 🧭👩‍🚀",
    "[PAD] <|im_start|>user\n1 + 1?<|im_end|> <|endoftext|> <NUMBER> <unused1>",
    "",
]


@pytest.fixture(scope="module")
def state():
    """tokenizer.json of Qwen2.5."""
    return json.loads(qwen_tokenizer().backend_tokenizer.to_str())


def in_the_vocabulary(state):
    """As a tokenizer of a GGUF file is: special tokens and placeholders in the model's own vocabulary."""
    vocab = state["model"]["vocab"] | {token["content"]: token["id"] for token in state["added_tokens"]}
    vocab |= {name: TOKENS + index for index, name in enumerate(PLACEHOLDERS)}
    return state | {"model": state["model"] | {"vocab": vocab}}


def among_added_tokens(state):
    entry = state["added_tokens"][0] | {"special": False}
    placeholders = [
        entry | {"id": TOKENS + index, "content": name} for index, name in enumerate(PLACEHOLDERS)
    ]
    return state | {"added_tokens": [*state["added_tokens"], *placeholders]}


FORMS = {
    "in the vocabulary": (in_the_vocabulary, ROWS, "[PAD151665]"),
    "among added tokens": (among_added_tokens, ROWS, "[PAD151665]"),
    "beyond the tokenizer": (lambda state: state, ROWS, None),
    "none": (lambda state: state, TOKENS, None),
}


def small_model(rows, *, tied, width=8):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=rows,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=151_645,
    )
    return Qwen2ForCausalLM(config)


def check_texts(tokenizer, base_tokenizer):
    """Texts and chats are cut as the base cuts them."""
    for text in TEXTS:
        ids = base_tokenizer(text)["input_ids"]
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == base_tokenizer.decode(ids)
    messages = [{"role": "user", "content": TEXTS[2]}]
    chats = [each.apply_chat_template(messages, chat_template=CHAT) for each in (tokenizer, base_tokenizer)]
    assert chats[0] == chats[1]
    assert tokenizer("a <NUM>b")["input_ids"][2] == TOKENS
    assert tokenizer.decode([64, TOKENS], skip_special_tokens=True) == "a"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_directory_in_each_form(form, state, tmp_path):
    change, rows, replaced = FORMS[form]
    directory = tmp_path / "base"
    small_model(rows, tied=True).save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps(change(state)), encoding="utf-8")
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    conversion = convert(directory, tmp_path / "out", calibration="none")
    assert conversion.report["num_token_id"] == TOKENS
    assert conversion.report["rows_added"] == (1 if form == "none" else 0)
    assert conversion.report["replaced_token"] == replaced
    assert len(conversion.model.lm_head.weight) == max(rows, TOKENS + 1)
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    added = PLACEHOLDERS[1:] if replaced else []
    ids = qwen_tokenizer().get_vocab() | {"<NUM>": TOKENS}
    assert saved.get_vocab() == ids | {name: TOKENS + 1 + index for index, name in enumerate(added)}
    assert len(saved) == (ROWS if replaced else TOKENS + 1)
    assert saved.special_tokens_map == {key: special[key] for key in ("eos_token", "pad_token")}
    assert saved.chat_template == CHAT
    check_texts(saved, qwen_tokenizer())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "tied", "options"),
    [
        pytest.param(ROWS, True, {}, id="in the vocabulary, tied"),
        pytest.param(ROWS, False, {"spare_type": 4}, id="among added tokens, untied"),
        pytest.param(ROWS, False, {"placeholders": False}, id="beyond the tokenizer, untied"),
        pytest.param(TOKENS, True, {}, id="none, tied"),
    ],
)
def test_a_gguf_file_in_each_form(rows, tied, options, tmp_path, monkeypatch):
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    base = small_model(rows, tied=tied)
    write_gguf(base, qwen_tokenizer(), tmp_path / "qwen.gguf", **options)
    conversion = convert(tmp_path / "qwen.gguf", calibration="none")
    assert conversion.report["num_token_id"] == TOKENS
    assert conversion.report["rows_added"] == (1 if rows == TOKENS else 0)
    assert conversion.tokenizer.convert_tokens_to_ids("<NUM>") == TOKENS
    check_texts(conversion.tokenizer, qwen_tokenizer())
    ids = torch.tensor([[9707, 11, 1879]])
    others = torch.arange(rows) != TOKENS
    logits = conversion.model(ids).logits[..., :rows]
    torch.testing.assert_close(logits[..., others], base(ids).logits[..., others])


def test_a_directory_that_transformers_saved_from_a_gguf_file(tmp_path, monkeypatch, ids):
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    base = tiny_base(tie_word_embeddings=True)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|endoftext|>"], special_tokens=True)  # which transformers gives every Qwen2
    write_gguf(base, tokenizer, tmp_path / "tiny.gguf")
    saved = tmp_path / "saved"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    loaded.hf_quantizer = None  # some versions of transformers save it without, others need to be told
    loaded.save_pretrained(saved)
    assert "quantization_config" in json.loads((saved / "config.json").read_text())
    AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf").save_pretrained(saved)
    first = len(tokenizer) + 1  # after the token that the file needs for its merge
    for source in (tmp_path / "tiny.gguf", saved):
        conversion = convert(source, calibration="none")
        assert conversion.report["num_token_id"] == first
        assert conversion.report["replaced_token"] == f"[PAD{first}]"
        others = torch.arange(300) != first
        assert torch.equal(conversion.model(ids).logits[..., others], base(ids).logits[..., others])


# The order in which rows count as spare.


@pytest.mark.parametrize(
    ("tokens", "rows", "expected", "replaced"),
    [
        (["<|reserved_special_token_0|>", "<|reserved_special_token_1|>"], 300, 260, None),
        (["<|reserved_special_token_0|>", "<|reserved_special_token_1|>"], 260, 259, "last"),
        (["<|extra_0|>", "<|extra_1|>", "plain"], 261, 259, "<|extra_1|>"),
        (["<unused7>", "<unused8>"], 260, 259, "<unused8>"),
        (["[unused7]"], 259, 258, "[unused7]"),
        (["<|placeholder1|>"], 259, 258, "<|placeholder1|>"),
        (["<|reserved_special_token_0|>", "[PAD259]", "[PAD260]"], 300, 259, "[PAD259]"),
        (["<extra_id_0>", "<reserved word>", "extra_1"], 261, 261, None),
    ],
)
def test_the_safest_row_is_taken(tokens, rows, expected, replaced):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(tokens)
    chosen = choose_num_token(tokenizer, rows)
    assert chosen.id == expected
    assert chosen.replaced == (tokens[-1] if replaced == "last" else replaced)
    assert chosen.tokenizer.convert_ids_to_tokens(expected) == "<NUM>"


def test_a_reserved_token_that_something_uses_is_not_spare():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|extra_0|>", "<|extra_1|>", "<|extra_2|>"])
    tokenizer.pad_token = "<|extra_2|>"
    tokenizer.chat_template = "<|extra_1|>{{ messages[0]['content'] }}"
    chosen = choose_num_token(tokenizer, 261)
    assert chosen.replaced == "<|extra_0|>"
    assert chosen.tokenizer.pad_token_id == 260
    assert tokenizer.convert_tokens_to_ids("<|extra_0|>") == 258, "the base's is left alone"


def test_a_vocabulary_with_gaps_is_refused_instead_of_moved():
    state = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    state["model"]["vocab"]["far"] = 270
    backend = type(tiny_tokenizer().backend_tokenizer).from_str(json.dumps(state))
    with pytest.raises(ConversionError, match="gaps in its vocabulary"):
        choose_num_token(PreTrainedTokenizerFast(tokenizer_object=backend), 300)


# Before any weight is read.


@pytest.mark.parametrize("rows", [200, 300])
def test_a_tokenizer_that_does_not_fit_is_refused_before_weights_are_read(rows, tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(sources, "read_weights", unreachable)
    tokenizer = tiny_tokenizer()
    message = "258 tokens, but the embedding only 200 rows"
    if rows == 300:
        tokenizer.add_tokens(["<NUM>"])
        message = "<NUM> of its own"
    tiny_base(vocab_size=rows, bos_token_id=1, eos_token_id=2, pad_token_id=2).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path)


def test_a_tokenizer_that_does_not_fit_is_refused_before_a_gguf_file_is_dequantised(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<NUM>"])
    write_gguf(tiny_base(), tokenizer, tmp_path / "tiny.gguf", control=False)
    with pytest.raises(ConversionError, match="<NUM> of its own"):
        convert(tmp_path / "tiny.gguf")
    assert not list((tmp_path / "cache").glob("gguf*"))


def test_embeddings_can_still_be_resized(tmp_path):
    tiny_base(vocab_size=258).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    conversion = convert(tmp_path, calibration="none")
    conversion.tokenizer.add_tokens(["<new>"])
    model = conversion.model
    model.resize_token_embeddings(len(conversion.tokenizer))
    assert conversion.tokenizer.convert_tokens_to_ids("<new>") == 259
    assert len(model.lm_head.weight) == len(model.action.bias) == model.config.vocab_size == 260
