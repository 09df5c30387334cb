"""Each family against its class in transformers: bit for bit, on both engines, from every kind of source."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from causal_qwen import CausalQwen2ForCausalLM, CausalQwen3ForCausalLM, Engine, convert
from causal_qwen.conversion import Base, load_base, load_model, measure_parity
from causal_qwen.conversion.sources import FAMILIES
from conftest import tiny_base, tiny_tokenizer
from gguf_files import write_gguf

CAUSAL = {"qwen2": CausalQwen2ForCausalLM, "llama": CausalQwen2ForCausalLM, "qwen3": CausalQwen3ForCausalLM}
TEXT = "The sea was calm and the harbour lay still in the light of the morning. " * 12


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def tied(request):
    return request.param


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def pair(request, tied):
    base = Base("tiny", tiny_base(request.param, vocab_size=258, tie_word_embeddings=tied), tiny_tokenizer())
    return base, convert(base, calibration_text=TEXT).model


def test_the_model_is_of_both_classes(pair):
    base, model = pair
    assert isinstance(model, type(base.model))
    assert type(model) is FAMILIES[type(base.model)]


def test_logits_are_the_bases_bit_for_bit_and_so_are_choices(pair):
    base, model = pair
    parity = measure_parity(model, base, TEXT)
    assert parity.max_abs_logit_diff == 0.0
    assert parity.argmax_agreement == 1.0


@pytest.mark.parametrize("mode", ["standard", "compatible"])
def test_greedy_tokens_are_the_bases_on_both_engines(pair, ids, mode):
    base, model = pair
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # padding on the left
    expected = base.model.generate(ids, attention_mask=mask, **options)
    for engine in (None, Engine.from_model(model), Engine.from_model(model, native=False)):
        ours = model.generate(ids, attention_mask=mask, inference_mode=mode, engine=engine, **options)
        assert torch.equal(ours, expected)


def test_a_saved_model_is_the_same_through_the_auto_class(pair, ids, tmp_path):
    _, model = pair
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("architecture", CAUSAL)
def test_a_directory_converts_into_its_family(architecture, ids, tmp_path):
    base = tiny_base(architecture)
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "causal", calibration="none")
    model, processor = load_model(tmp_path / "causal")
    assert type(model) is CAUSAL[architecture]
    others = torch.arange(300) != processor.num_token_id
    assert torch.equal(model(ids).logits[..., others], base(ids).logits[..., others])


@pytest.mark.slow
def test_qwen3_in_a_gguf_file_is_read_as_it_is(tmp_path, monkeypatch, ids):
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    original = tiny_base("qwen3", head_dim=16)
    write_gguf(original, tiny_tokenizer(), tmp_path / "tiny.gguf")
    base = load_base(tmp_path / "tiny.gguf")
    assert type(base.model) is Qwen3ForCausalLM
    assert torch.equal(base.model(ids).logits, original(ids).logits)
