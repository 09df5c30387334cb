"""Conversion: exact transfer, a home for <NUM>, calibration that does what it says, and nothing
half-written.
"""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen2ForCausalLM

from causal_qwen import CausalQwen2ForCausalLM, convert
from causal_qwen.cauchy import Cauchy
from causal_qwen.conversion import (
    Base,
    ConversionError,
    bundled_text,
    calibrate,
    features,
    load_base,
    measure_parity,
)
from causal_qwen.conversion.files import atomic_directory
from causal_qwen.conversion.vocabulary import choose_num_token, with_num_row
from conftest import TINY, tiny_base, tiny_tokenizer

TEXT = bundled_text("heldout")


def make_base(rows=300, **overrides):
    return Base("tiny", tiny_base(vocab_size=rows, **overrides), tiny_tokenizer())


@pytest.fixture(scope="module")
def base():
    return make_base(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def conversion(base):
    return convert(base, calibration_text=TEXT)


# --- sources
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_directories_of_both_architectures_load_as_the_same_function(tmp_path, ids, architecture, tied):
    original = tiny_base(architecture, tie_word_embeddings=tied)
    original.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    base = load_base(tmp_path)
    assert type(base.model) is Qwen2ForCausalLM
    assert base.model.config.rope_parameters["rope_theta"] == 5000.0
    assert base.model.config.tie_word_embeddings == tied
    torch.testing.assert_close(base.model(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)
    assert base.tokenizer("a 1\n")["input_ids"] == tiny_tokenizer()("a 1\n")["input_ids"]


def damage_weights(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop_a_tensor(directory):
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def garble_config(directory):
    (directory / "config.json").write_text('{"model_type": "qwen2", ')


def set_config(**fields):
    def change(directory):
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_weights, "damaged or truncated"),
        (drop_a_tensor, "incomplete checkpoint.*model.norm.weight"),
        (garble_config, "cannot be loaded|damaged"),
        (set_config(hidden_size=48), "mismatched|cannot be loaded|incomplete"),
        (set_config(model_type="causal_qwen2"), "already a CausalQwen model"),
        (lambda directory: (directory / "config.json").unlink(), "no config.json"),
        (lambda directory: (directory / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda directory: (directory / "tokenizer.json").unlink(), "is its tokenizer.json complete"),
    ],
)
def test_damaged_checkpoints_are_refused_and_leave_nothing(base_directory, tmp_path, damage, message):
    damaged = tmp_path / "damaged"
    shutil.copytree(base_directory, damaged)
    damage(damaged)
    with pytest.raises(ConversionError, match=message):
        convert(damaged, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_other_architectures_are_named(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=50)).save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match="'gpt2' is not supported; supported are qwen2, llama"):
        load_base(tmp_path)


def test_llama_biases_that_qwen2_lacks_are_refused(tmp_path):
    tiny_base("llama", mlp_bias=True).save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match="mlp_bias=True"):
        load_base(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.gguf", "no such file"),
        ("./nowhere", "no such directory, and not a hub id"),
        ("owner/absent", "owner/absent: cannot be loaded"),
    ],
)
def test_missing_sources_are_named(source, message):
    with pytest.raises(ConversionError, match=message):
        load_base(source)


def test_a_damaged_gguf_file_is_refused_without_a_cache_entry(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConversionError, match="cannot be loaded"):
        load_base(tmp_path / "bad.gguf")
    assert not list((tmp_path / "cache").glob("*"))


# --- <NUM>
# ----------------------------------------------------------------------------------------------------------


def test_num_takes_the_first_spare_row(base, conversion, ids):
    model = conversion.model
    assert model.config.num_token_id == 258
    assert model.config.vocab_size == 300
    assert conversion.report["rows_added"] == 0
    W = model.lm_head.weight
    digits = base.tokenizer.convert_tokens_to_ids(list("0123456789"))
    torch.testing.assert_close(W[258], W[digits].mean(0))
    others = torch.arange(300) != 258
    assert torch.equal(W[others], base.model.lm_head.weight[others])
    assert torch.equal(model(ids).logits[..., others], base.model(ids).logits[..., others])


def test_num_is_added_where_no_row_is_spare(ids):
    base = make_base(rows=258)
    conversion = convert(base, calibration="none")
    model = conversion.model
    assert model.config.num_token_id == 258
    for rows in (
        model.lm_head.weight,
        model.model.embed_tokens.weight,
        model.action.bias,
        model.action.balance,
        model.action.threshold,
    ):
        assert len(rows) == 259
    assert base.model.config.vocab_size == 258, "the base is left alone"
    assert torch.equal(model(ids).logits[..., :258], base.model(ids).logits)


def test_gguf_placeholders_count_as_spare_rows():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"[PAD{index}]" for index in range(258, 300)])
    chosen = choose_num_token(tokenizer, 300)
    assert chosen.id == 258
    assert chosen.tokenizer.convert_ids_to_tokens(258) == "<NUM>"
    assert chosen.tokenizer.convert_ids_to_tokens(259) == "[PAD259]"


def test_num_is_never_chosen_before_training(conversion):
    """Its score is a mean of digit scores plus a negative bias, so some digit always beats it, in any
    cause.
    """
    W, bias = conversion.model.lm_head.weight, conversion.model.action.bias
    causes = Cauchy(torch.zeros(2000, 32), torch.ones(2000, 32)).rsample(
        generator=torch.Generator().manual_seed(0)
    )
    assert not (causes @ W.T + bias).argmax(-1).eq(258).any()


def test_vocabularies_that_do_not_fit_are_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<NUM>"])
    with pytest.raises(ConversionError, match="<NUM> of its own"):
        choose_num_token(tokenizer, 300)
    with pytest.raises(ConversionError, match="258 tokens, but the embedding only 200 rows"):
        choose_num_token(tiny_tokenizer(), 200)


def test_mean_of_digits_survives_bfloat16():
    chosen = choose_num_token(tiny_tokenizer(), 300)
    weight = torch.randn(300, 8, dtype=torch.bfloat16)
    row = with_num_row(weight, chosen)[258]
    assert torch.equal(row, weight[chosen.digits].double().mean(0).bfloat16())


# --- calibration
# ----------------------------------------------------------------------------------------------------


def test_parity_after_default_calibration(base, conversion):
    parity = measure_parity(conversion.model, base, TEXT)
    assert parity.positions > 1000
    assert parity.max_abs_logit_diff == 0.0
    assert parity.argmax_agreement == 1.0
    assert 0.2 < parity.ovr_prob_sum_median < 5


def test_balance_gives_every_token_the_same_scale_in_every_mode(conversion, ids):
    model = conversion.model
    outputs = model(ids, output_scores=True)
    torch.testing.assert_close(
        outputs.scale_S, outputs.scale_S[..., :1].expand_as(outputs.scale_S), rtol=1e-5, atol=0
    )
    U, U0 = Cauchy(outputs.loc_U, outputs.scale_U), Cauchy(outputs.loc_U0, outputs.scale_U0)
    moved = model.action.exogenous(U, do_sample=True, epsilon=torch.randn_like(U.loc))
    scale = model.action.scores(moved, U0, model.lm_head.weight).scale
    torch.testing.assert_close(scale, scale[..., :1].expand_as(scale), rtol=1e-5, atol=0)


def test_common_cause_is_the_best_ridge_fit_by_leave_one_out(conversion, base):
    """Against scikit-style brute force: refit without each of a few positions, and compare the prediction."""
    from causal_qwen.conversion.calibration import ridge

    data = features(conversion.model, base.tokenizer, TEXT)
    x, y = data.hidden_states[:200], conversion.model.token_logits(data.hidden_states[:200]).logsumexp(-1)
    fit = ridge(x, y.detach())
    for left in (0, 77, 199):
        rest = torch.arange(200) != left
        xs, ys = x[rest].double(), y[rest].double()
        centred = xs - xs.mean(0)
        gram = centred.T @ centred + fit.strength * torch.eye(32, dtype=torch.float64)
        slope = torch.linalg.solve(gram, centred.T @ (ys - ys.mean()))
        predicted = ys.mean() + (x[left].double() - xs.mean(0)) @ slope
        assert fit.left_out[left].item() == pytest.approx(predicted.item(), abs=1e-4)
    assert fit.r2 <= 1


def test_scale_and_threshold_are_at_a_minimum_of_the_loss(base, conversion):
    best = measure_parity(conversion.model, base, TEXT).ovr_loss
    model = convert(base, calibration_text=TEXT).model
    for change in ("wider", "narrower", "higher", "lower"):
        with torch.no_grad():
            if change in ("wider", "narrower"):
                factor = 4.0 if change == "wider" else 0.25
                model.abduction.scale.bias.add_(torch.tensor(factor).log())
                model.action.b_noise.mul_(factor)
                undo = 1 / factor
            else:
                model.action.threshold.add_(4.0 if change == "higher" else -4.0)
        assert measure_parity(model, base, TEXT).ovr_loss > best
        with torch.no_grad():
            if change in ("wider", "narrower"):
                model.abduction.scale.bias.add_(torch.tensor(undo).log())
                model.action.b_noise.mul_(undo)
            else:
                model.action.threshold.add_(-4.0 if change == "higher" else 4.0)


def test_gain_matches_the_top1_rate(conversion):
    calibration = conversion.report["calibration"]
    assert calibration["top1_rate_causal"] == pytest.approx(calibration["top1_rate_softmax"], abs=0.01)
    assert conversion.model.config.noise_gain == calibration["noise_gain"]


def test_gamma_and_noise_share_the_scale_evenly(conversion, ids):
    gamma = conversion.report["calibration"]["gamma"]
    scale = conversion.model(ids).scale_U
    torch.testing.assert_close(scale, torch.full_like(scale, gamma / 2), rtol=1e-5, atol=0)
    torch.testing.assert_close(conversion.model.action.b_noise.detach(), torch.full((32,), gamma / 2))


def test_published_constants(base, ids):
    model = convert(base, calibration="published").model
    outputs = model(ids)
    torch.testing.assert_close(outputs.scale_U, torch.full_like(outputs.scale_U, 10.0))
    assert model.action.threshold.eq(100.0).all()
    assert model.action.balance.eq(0).all()
    assert measure_parity(model, base, TEXT).max_abs_logit_diff == 0.0


def test_short_texts_and_unknown_modes_are_refused(base):
    with pytest.raises(ValueError, match="only 5 tokens; give at least 64"):
        convert(base, calibration_text="short")
    with pytest.raises(ConversionError, match="calibration is 'best'"):
        convert(base, calibration="best")


def test_recalibration_is_idempotent(base, conversion):
    """Calibrating a calibrated model chooses the same: nothing is read from what calibration itself
    writes.
    """
    model = convert(base, calibration_text=TEXT).model
    again = calibrate(model, features(model, base.tokenizer, TEXT))
    assert again.gamma == pytest.approx(conversion.report["calibration"]["gamma"])
    assert again.noise_gain == pytest.approx(conversion.report["calibration"]["noise_gain"])


# --- a causal size of its own
# ---------------------------------------------------------------------------------------


def test_a_smaller_cause_is_the_best_low_rank_approximation(base, ids):
    model = convert(base, causal_size=8, calibration="none").model
    with torch.no_grad():
        product = (model.lm_head.weight @ model.abduction.loc.weight).double()
        W = with_num_row(base.model.lm_head.weight.detach(), choose_num_token(base.tokenizer, 300)).double()
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


# --- files
# ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_nothing(tmp_path, error):
    def write(overwrite):
        with atomic_directory(tmp_path / "out", overwrite=overwrite) as temporary:
            (temporary / "half").write_text("half")
            raise error

    with pytest.raises(error):
        write(overwrite=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(error):
        write(overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old"]


def test_dtype_is_kept_or_changed_on_request(base_directory, ids):
    converted = convert(base_directory, calibration="none", dtype=torch.bfloat16).model
    assert converted.dtype == torch.bfloat16
    assert converted.action.bias.dtype == torch.float32
    assert convert(base_directory, calibration="none").model.dtype == torch.float32


def test_bundled_texts_share_no_sentence():
    calibration, heldout = bundled_text("calibration"), bundled_text("heldout")
    sentences = {part.strip() for part in calibration.split(".") if len(part.strip()) > 20}
    assert not any(part.strip() in sentences for part in heldout.split("."))


def test_base_tokens_are_what_tiny_says():
    assert len(tiny_tokenizer()) == 258
    assert TINY["vocab_size"] == 300
