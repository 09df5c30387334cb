"""Out again: the softmax view as a plain checkpoint, in transformers and in GGUF."""

import copy
import json

import pytest
import torch
from test_spare_rows import FORMS, ROWS, TEXTS, small_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from causal_qwen import convert
from causal_qwen.conversion import Base, ConversionError, export, load_base
from conftest import TEXT, tiny_base, tiny_source, tiny_tokenizer
from qwen_vocabulary import qwen_tokenizer

KINDS = {"f32": 0.0, "f16": 0.02, "q8_0": 0.15}


def plain_logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def causal_logits(model, ids, rows):
    with torch.no_grad():
        return model(ids, hide_num_token=True).logits[..., :rows]


def merging_tokenizer():
    """Like the tiny one, with a merge: a GGUF file has at least one."""
    state = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    state["model"]["vocab"]["ab"], state["model"]["merges"] = 256, [["a", "b"]]
    state["added_tokens"] = [token | {"id": token["id"] + 1} for token in state["added_tokens"]]
    backend = type(tiny_tokenizer().backend_tokenizer).from_str(json.dumps(state))
    special = {"bos_token": "<|start|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture
def changeable(base):
    return convert(base, calibration="none")


@pytest.mark.parametrize("rows", [300, 258], ids=["a spare row", "a row more"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_the_directory_is_the_base_again(rows, architecture, tmp_path, ids):
    source = tiny_source(rows, architecture=architecture, tie_word_embeddings=True)
    conversion = convert(source, calibration_text=TEXT)
    report = export(conversion.model, conversion.processor, tmp_path / "plain")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    if architecture == "qwen2":  # the tiny tokenizer is not Qwen's
        assert isinstance(model, LlamaForCausalLM)
        assert model.config.attention_bias
    assert model.config.vocab_size == report.vocab_size == rows
    assert model.lm_head.weight is model.model.embed_tokens.weight
    kept = [row for row in range(rows) if row != conversion.model.config.num_token_id]
    assert torch.equal(plain_logits(model, ids)[..., kept], plain_logits(source.model, ids)[..., kept])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "plain")
    assert tokenizer.get_vocab() == source.tokenizer.get_vocab()
    assert tokenizer(TEXT).input_ids == source.tokenizer(TEXT).input_ids
    assert "no longer has" in (tmp_path / "plain" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["in the vocabulary", "beyond the tokenizer"])
def test_every_layout_of_spare_rows_keeps_its_tokens(form, tmp_path):
    change, rows, _ = FORMS[form]
    state = change(json.loads(qwen_tokenizer().backend_tokenizer.to_str()))
    backend = type(qwen_tokenizer().backend_tokenizer).from_str(json.dumps(state, ensure_ascii=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    conversion = convert(Base("qwen", small_model(rows, tied=True), tokenizer), calibration="none")
    export(conversion.model, conversion.processor, tmp_path / "plain")
    plain = PreTrainedTokenizerFast.from_pretrained(tmp_path / "plain")
    assert "<NUM>" not in plain.get_vocab()
    for text in TEXTS:
        assert plain(text).input_ids == tokenizer(text).input_ids
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert isinstance(model, Qwen2ForCausalLM)
    assert model.config.vocab_size == rows


def test_an_abduction_that_was_trained_becomes_part_of_the_head(changeable, tmp_path, ids):
    model = changeable.model
    with torch.no_grad():
        model.abduction.loc.weight.add_(torch.randn_like(model.abduction.loc.weight) * 0.05)
    expected = causal_logits(model, ids, 300)
    export(model, changeable.processor, tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not plain.config.tie_word_embeddings
    found, num = plain_logits(plain, ids), model.config.num_token_id
    kept = [row for row in range(300) if row != num]
    torch.testing.assert_close(found[..., kept], expected[..., kept], rtol=1e-4, atol=1e-4)


def test_a_cause_of_another_size_is_folded_in(base, tmp_path, ids):
    conversion = convert(base, calibration="none", causal_size=8)
    export(conversion.model, conversion.processor, tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    kept = [row for row in range(300) if row != conversion.model.config.num_token_id]
    expected = causal_logits(conversion.model, ids, 300)
    torch.testing.assert_close(plain_logits(plain, ids)[..., kept], expected[..., kept], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_is_read_back(kind, tmp_path, ids):
    tokenizer = merging_tokenizer()
    source = Base("tiny", tiny_base(tie_word_embeddings=False, vocab_size=len(tokenizer)), tokenizer)
    conversion = convert(source, calibration="none")
    file = tmp_path / "plain.gguf"
    export(conversion.model, conversion.processor, file, to="gguf", kind=kind)
    again = load_base(file)
    assert again.tokenizer.get_vocab() == source.tokenizer.get_vocab()
    assert again.tokenizer.chat_template == source.tokenizer.chat_template
    difference = (plain_logits(again.model, ids) - plain_logits(source.model, ids)).abs().max().item()
    assert difference <= KINDS[kind] * plain_logits(source.model, ids).abs().max().item()
    assert file.with_suffix(".md").is_file()


@pytest.mark.slow
def test_a_gguf_file_of_qwens_vocabulary_splits_as_qwen_does(tmp_path):
    tokenizer = qwen_tokenizer()
    conversion = convert(Base("qwen", small_model(ROWS, tied=True), tokenizer), calibration="none")
    export(conversion.model, conversion.processor, tmp_path / "plain.gguf", to="gguf", kind="f16")
    again = load_base(tmp_path / "plain.gguf")
    for text in TEXTS:
        assert again.tokenizer(text).input_ids == tokenizer(text).input_ids


def test_numbers_are_not_lost_unsaid(changeable, tmp_path):
    model = changeable.model
    with torch.no_grad():
        model.action.bias[model.config.num_token_id] = 1.0
    with pytest.raises(ConversionError, match="--drop-numbers"):
        export(model, changeable.processor, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
    report = export(model, changeable.processor, tmp_path / "plain", drop_numbers=True)
    assert any("<NUM>" in sentence for sentence in report.dropped)


def test_biases_are_not_lost_unsaid(changeable, tmp_path, ids):
    model = changeable.model
    with torch.no_grad():
        model.action.bias[7] = 2.5
    with pytest.raises(ConversionError, match=r"2\.5 nats.*--drop-biases"):
        export(model, changeable.processor, tmp_path / "plain")
    report = export(model, changeable.processor, tmp_path / "plain", drop_biases=True)
    assert any("Biases of 1 tokens" in sentence for sentence in report.dropped)
    kept = export(model, changeable.processor, tmp_path / "plain.gguf", to="gguf")
    assert not any("Biases" in sentence for sentence in kept.dropped)


def test_qwen3_has_no_place_for_a_bias_in_gguf_either(tmp_path):
    conversion = convert(tiny_source(architecture="qwen3"), calibration="none")
    assert isinstance(conversion.model, Qwen3ForCausalLM)
    with torch.no_grad():
        conversion.model.action.bias[7] = 1.0
    with pytest.raises(ConversionError, match="GGUF's qwen3"):
        export(conversion.model, conversion.processor, tmp_path / "plain.gguf", to="gguf")


def test_a_bias_of_all_tokens_is_none(changeable, tmp_path):
    with torch.no_grad():
        num = changeable.model.config.num_token_id
        kept = torch.arange(len(changeable.model.action.bias)) != num
        changeable.model.action.bias[kept] += 3.0
    export(changeable.model, changeable.processor, tmp_path / "plain")


@pytest.mark.parametrize(
    ("output", "options", "message"),
    [
        ("plain", {"to": "onnx"}, "'onnx'"),
        ("plain.bin", {"to": "gguf"}, r"\.gguf"),
        ("plain.gguf", {"to": "gguf", "kind": "q2"}, "'q2'"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_written(output, options, message, conversion, tmp_path):
    with pytest.raises(ConversionError, match=message):
        export(conversion.model, conversion.processor, tmp_path / output, **options)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_replaced(conversion, tmp_path):
    (tmp_path / "plain.gguf").write_text("mine")
    with pytest.raises(FileExistsError):
        export(conversion.model, conversion.processor, tmp_path / "plain.gguf", to="gguf")
    assert (tmp_path / "plain.gguf").read_text() == "mine"


def test_a_splitting_without_a_name_is_refused(conversion, tmp_path):
    state = json.loads(conversion.processor.tokenizer.backend_tokenizer.to_str())
    state["pre_tokenizer"] = {"type": "Whitespace"}
    processor = copy.copy(conversion.processor)
    backend = type(processor.tokenizer.backend_tokenizer).from_str(json.dumps(state))
    processor.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(ConversionError, match="Whitespace"):
        export(conversion.model, processor, tmp_path / "plain.gguf", to="gguf")
    assert not (tmp_path / "plain.gguf").exists()


def test_other_programs_find_the_tokenizer(conversion, tmp_path):
    export(conversion.model, conversion.processor, tmp_path / "plain")
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").get_vocab() == tiny_tokenizer().get_vocab()
