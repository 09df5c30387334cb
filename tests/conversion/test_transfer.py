"""convert(): exact transfer, the same bytes each time, and nothing half-written."""

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from causal_qwen import CausalQwen2ForCausalLM, convert
from causal_qwen.conversion import ConversionError, bundled_text, measure_parity
from causal_qwen.conversion.vocabulary import choose_num_token, with_num_row
from conftest import TEXT, tiny_source, tiny_tokenizer


def test_parity_after_default_calibration(base, conversion):
    parity = measure_parity(conversion.model, base, TEXT)
    assert parity.positions > 1000
    assert parity.max_abs_logit_diff == 0.0
    assert parity.argmax_agreement == 1.0
    assert 0.2 < parity.ovr_prob_sum_median < 5


def test_published_constants(base, ids):
    model = convert(base, calibration="published").model
    outputs = model(ids)
    torch.testing.assert_close(outputs.scale_U, torch.full_like(outputs.scale_U, 10.0))
    assert model.action.threshold.eq(100.0).all()
    assert model.action.balance.eq(0).all()
    assert measure_parity(model, base, TEXT).max_abs_logit_diff == 0.0


def test_a_model_that_is_in_no_file_says_so(base, tmp_path, recwarn):
    """An adapter would look for the files of its base, and warn that "None" has none."""
    peft = pytest.importorskip("peft")
    model = convert(base, calibration="none").model
    assert model.name_or_path == model.config.name_or_path == ""
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path)
    assert not [warning for warning in recwarn if "config file" in str(warning.message)]


def test_short_texts_and_unknown_modes_are_refused(base):
    with pytest.raises(ValueError, match="only 5 tokens; give at least 64"):
        convert(base, calibration_text="short")
    with pytest.raises(ConversionError, match="calibration is 'best'"):
        convert(base, calibration="best")


@pytest.mark.parametrize("tied", [True, False])
def test_greedy_tokens_are_the_base_s(ids, tied):
    base = tiny_source(tie_word_embeddings=tied)
    model = convert(base, calibration_text=TEXT).model
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 257}
    expected = base.model.generate(ids, **options)
    assert expected[:, ids.shape[1] :].unique().numel() > 3
    assert torch.equal(model.generate(ids, **options), expected)


# A causal size of its own


def test_a_smaller_cause_is_the_best_low_rank_approximation(base, ids):
    model = convert(base, causal_size=8, calibration="none").model
    with torch.no_grad():
        product = (model.lm_head.weight @ model.abduction.loc.weight).double()
        W = with_num_row(base.model.lm_head.weight.detach().clone(), choose_num_token(base.tokenizer, 300))
    W = W.double()
    singular = torch.linalg.svdvals(W)
    torch.testing.assert_close((product - W).norm(), singular[8:].square().sum().sqrt(), rtol=1e-4, atol=1e-5)
    assert model.model.embed_tokens.weight.shape == (300, 32)


def test_a_larger_cause_changes_nothing_and_can_learn(base, ids):
    model = convert(base, causal_size=48, calibration="none").model
    others = torch.arange(300) != 258
    torch.testing.assert_close(
        model(ids).logits[..., others], base.model(ids).logits[..., others], rtol=1e-4, atol=1e-4
    )
    model(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad[:, 32:].abs().sum() > 0


# Files


def test_saved_directory_is_complete_reproducible_and_readable_by_plain_transformers(
    base_directory, tmp_path, ids
):
    first = convert(base_directory, tmp_path / "first", calibration_text=TEXT)
    convert(base_directory, tmp_path / "second", calibration_text=TEXT)
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "conversion.json",
        "generation_config.json",
    } <= set(names)
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name
    loaded = CausalQwen2ForCausalLM.from_pretrained(tmp_path / "first").eval()
    assert torch.equal(loaded(ids, output_scores=True).scale_S, first.model(ids, output_scores=True).scale_S)
    plain = Qwen2ForCausalLM.from_pretrained(tmp_path / "first").eval()
    others = torch.arange(300) != 258
    assert torch.equal(plain(ids).logits[..., others], first.model(ids).logits[..., others])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    assert tokenizer.convert_tokens_to_ids("<NUM>") == 258
    assert tokenizer("a1 b")["input_ids"] == tiny_tokenizer()("a1 b")["input_ids"]


def test_an_existing_directory_is_kept_unless_overwriting_is_allowed(base, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="exists"):
        convert(base, out, calibration="none")
    assert (out / "precious.txt").read_text() == "keep me"
    convert(base, out, calibration="none", overwrite=True)
    assert not (out / "precious.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_dtype_is_kept_or_changed_on_request(base_directory, ids):
    converted = convert(base_directory, calibration="none", dtype=torch.bfloat16).model
    assert converted.dtype == torch.bfloat16
    assert converted.action.bias.dtype == torch.float32
    assert convert(base_directory, calibration="none").model.dtype == torch.float32


def test_bundled_texts_share_no_sentence():
    calibration, heldout = bundled_text("calibration"), bundled_text("heldout")
    sentences = {part.strip() for part in calibration.split(".") if len(part.strip()) > 20}
    assert not any(part.strip() in sentences for part in heldout.split("."))
