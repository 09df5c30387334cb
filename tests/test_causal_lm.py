"""The model: the base's logits bit for bit, and every way of running, saving and loading it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, StaticCache

from causal_qwen import CausalQwen2Config, CausalQwen2ForCausalLM
from conftest import TINY, gradients, tiny_base, tiny_causal

CAUSES = ("loc_U", "scale_U", "loc_U0", "scale_U0", "loc_Y", "scale_Y")


def saved_base(tmp_path, **overrides):
    base = tiny_base(**overrides)
    base.save_pretrained(tmp_path)
    return base


def assert_same(a, b, names=("logits", *CAUSES), **tolerance):
    for name in names:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), **tolerance)


# --- transfer from a plain checkpoint
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_checkpoint_loads_with_the_base_logits_and_initialised_heads(tmp_path, ids, tied, dtype):
    saved_base(tmp_path, tie_word_embeddings=tied)
    base = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    model = CausalQwen2ForCausalLM.from_pretrained(tmp_path, dtype=dtype, gamma_init=2.5).eval()
    assert torch.equal(model(ids).logits, base(ids).logits)
    assert model(ids).logits.dtype == dtype
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    heads = [*model.abduction.named_parameters(), *model.action.named_parameters()]
    assert all(parameter.dtype == torch.float32 for _, parameter in heads)
    assert torch.equal(model.abduction.loc.weight, torch.eye(TINY["hidden_size"]))
    torch.testing.assert_close(model(ids).scale_U, torch.full_like(model(ids).scale_U, 2.5))
    zero = [name for name, parameter in heads if parameter.eq(0).all()]
    assert sorted(zero) == [
        "balance", "bias", "common.bias", "common.weight", "common_scale", "loc.bias", "number.bias",
        "number_noise", "scale.weight", "threshold",
    ]  # fmt: skip


def test_no_second_vocabulary_matrix():
    sizes = [
        parameter.numel() for parameter in CausalQwen2ForCausalLM(CausalQwen2Config(**TINY)).parameters()
    ]
    assert (
        sum(size >= TINY["vocab_size"] * TINY["hidden_size"] for size in sizes) == 2
    )  # embedding and W, untied


def test_added_parameters_stay_below_one_percent_at_qwen_half_billion_dimensions():
    dimensions = {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    with torch.device("meta"):
        model = CausalQwen2ForCausalLM(CausalQwen2Config(**dimensions))
    heads = sum(p.numel() for n, p in model.named_parameters() if not n.startswith(("model.", "lm_head.")))
    total = sum(p.numel() for p in model.parameters())
    assert heads / (total - heads) < 0.01


# --- ways of running
# ------------------------------------------------------------------------------------------------


def test_eager_and_sdpa_agree(ids):
    model = tiny_causal()
    sdpa = model(ids, output_scores=True)
    model.set_attn_implementation("eager")
    assert_same(
        model(ids, output_scores=True), sdpa, ("logits", "loc_S", "scale_S", *CAUSES), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(ids, side):
    model = tiny_causal()
    pad = torch.full((3, 4), 257)
    mask = torch.ones_like(ids)
    parts = (
        ([pad, ids], [torch.zeros_like(pad), mask])
        if side == "left"
        else ([ids, pad], [mask, torch.zeros_like(pad)])
    )
    padded, mask = (torch.cat(part, dim=1) for part in parts)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    outputs = model(padded, attention_mask=mask, position_ids=positions)
    alone = model(ids)
    kept = slice(4, None) if side == "left" else slice(0, ids.shape[1])
    for name in ("logits", *CAUSES):
        torch.testing.assert_close(
            getattr(outputs, name)[:, kept], getattr(alone, name), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_cached_steps_equal_one_pass(ids, cache):
    model = tiny_causal()
    whole = model(ids)
    past = StaticCache(config=model.config, max_cache_len=32) if cache == "static" else None
    pieces = []
    for step in ids.split([5, 1, 1, 5], dim=1):
        outputs = model(step, past_key_values=past, use_cache=True)
        past = outputs.past_key_values
        pieces.append(outputs)
    for name in ("logits", *CAUSES):
        torch.testing.assert_close(
            torch.cat([getattr(piece, name) for piece in pieces], 1),
            getattr(whole, name),
            rtol=1e-4,
            atol=1e-5,
        )


def test_batch_order_does_not_matter(ids):
    model = tiny_causal()
    assert_same(
        model(ids.flip(0)),
        type(model(ids))(**{n: getattr(model(ids), n).flip(0) for n in ("logits", *CAUSES)}),
    )


def test_values_are_read_at_number_positions_only(ids):
    model = tiny_causal()
    ids[:, 4] = 258
    values = torch.zeros(ids.shape, dtype=torch.float64)
    without = model(ids)
    assert torch.equal(model(ids, numeric_values=values).logits, without.logits), "a true 0 adds nothing"
    values[:, 2] = 7.0
    assert torch.equal(model(ids, numeric_values=values).logits, without.logits), "not a <NUM> position"
    values[:, 4] = 7.0
    read = model(ids, numeric_values=values).logits
    assert torch.equal(read[:, :4], without.logits[:, :4])
    assert not torch.isclose(read[:, 4:], without.logits[:, 4:]).all()
    embeds = model.embed(ids, values)
    assert torch.equal(model(inputs_embeds=embeds).logits, read)


def test_values_that_cannot_be_read_are_refused(ids):
    values = torch.zeros(ids.shape)
    with pytest.raises(ValueError, match="num_token_id is None"):
        tiny_causal(num_token_id=None)(ids, numeric_values=values)
    with pytest.raises(ValueError, match=r"shape \(3, 3\), input_ids \(3, 12\)"):
        tiny_causal()(ids, numeric_values=values[:, :3])
    with pytest.raises(ValueError, match="go with input_ids"):
        tiny_causal()(inputs_embeds=torch.zeros(3, 12, 32), numeric_values=values)


def test_kept_positions_and_switches(ids):
    model = tiny_causal()
    whole = model(ids, output_scores=True)
    last = model(ids, output_scores=True, logits_to_keep=2)
    some = model(ids, logits_to_keep=torch.tensor([0, 5]))
    torch.testing.assert_close(last.logits, whole.logits[:, -2:])
    torch.testing.assert_close(last.scale_S, whole.scale_S[:, -2:])
    torch.testing.assert_close(some.loc_U, whole.loc_U[:, [0, 5]])
    quiet = model(ids, output_logits=False)
    assert quiet.logits is None
    assert quiet.loc_S is None
    model.train()
    assert model(ids, labels=ids).logits is None
    assert model(ids, labels=ids, output_logits=True).logits.shape == whole.logits.shape
    assert isinstance(model(ids, return_dict=False), tuple)


def test_scores_are_the_logits_seen_from_the_common_cause(ids):
    model = tiny_causal()
    outputs = model(ids, output_scores=True)
    torch.testing.assert_close(
        outputs.loc_S - outputs.loc_U0[..., None], outputs.logits, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("causal_size", [16, 48])
def test_a_causal_size_of_its_own(ids, tmp_path, causal_size):
    model = tiny_causal(causal_size=causal_size, tie_word_embeddings=True)
    assert model.lm_head.weight.shape == (TINY["vocab_size"], causal_size)
    outputs = model(ids, labels=ids)
    assert outputs.loc_U.shape[-1] == causal_size
    model.save_pretrained(tmp_path)
    assert_same(CausalQwen2ForCausalLM.from_pretrained(tmp_path)(ids), model(ids), rtol=0, atol=0)


# --- saving, resizing, ecosystem
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("learned", [True, False])
def test_loading_leaves_fixed_what_the_configuration_fixes(tmp_path, learned):
    tiny_causal(learn_threshold=learned, learn_numeric_direction=learned).save_pretrained(tmp_path)
    model, info = CausalQwen2ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    for loaded in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert loaded.action.threshold.requires_grad == learned
        assert loaded.numeric_embedding.direction.requires_grad == learned
        assert loaded.action.bias.requires_grad


@pytest.mark.parametrize("shard", ["1GB", "40KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_is_bit_exact(ids, tmp_path, shard, dtype):
    tiny_causal().save_pretrained(tmp_path / "float32")
    model = CausalQwen2ForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype).eval()
    model.save_pretrained(tmp_path / "saved", max_shard_size=shard)
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (shard == "40KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert loaded.dtype == dtype
    assert type(loaded) is CausalQwen2ForCausalLM
    names = ("logits", "loc_S", "scale_S", *CAUSES)
    assert_same(loaded(ids, output_scores=True), model(ids, output_scores=True), names, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [307, 280])
def test_resizing_takes_the_vocabulary_parameters_along(ids, rows):
    model = tiny_causal()
    before = model(ids, output_scores=True)
    model.resize_token_embeddings(rows, mean_resizing=False)
    after = model(ids, output_scores=True)
    assert after.loc_S.shape[-1] == after.scale_S.shape[-1] == after.logits.shape[-1] == rows
    kept = min(rows, 300)
    torch.testing.assert_close(after.scale_S[..., :kept], before.scale_S[..., :kept])
    assert torch.isfinite(model(ids, labels=ids).loss)
    with pytest.raises(ValueError, match="cut off <NUM>, id 258"):
        model.resize_token_embeddings(200)


def test_generate_equals_the_base(tmp_path, ids):
    base = saved_base(tmp_path, tie_word_embeddings=True)
    model = CausalQwen2ForCausalLM.from_pretrained(tmp_path).eval()
    for options in (
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "top_k": 20},
    ):
        torch.manual_seed(0)
        expected = base.generate(ids, max_new_tokens=20, **options)
        torch.manual_seed(0)
        actual = model.generate(ids, max_new_tokens=20, inference_mode="compatible", **options)
        assert torch.equal(actual, expected)


def test_gradient_checkpointing_gives_the_same_gradients(ids):
    model = tiny_causal().train()
    plain = gradients(model, labels=ids)
    model.gradient_checkpointing_enable()
    for name, gradient in gradients(model, labels=ids).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6)


def test_bfloat16_trains_without_nan(ids, tmp_path):
    ids[:, 5] = 258
    values = torch.where(ids == 258, 12.5, 0.0)
    tiny_causal().save_pretrained(tmp_path)
    model = CausalQwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    outputs = model(ids, labels=ids, numeric_values=values)
    assert outputs.loc_U.dtype == outputs.loss.dtype == torch.float32
    outputs.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert outputs.reg_loss != 0


@pytest.mark.slow
def test_torch_compile_gives_the_same_outputs(ids):
    model = tiny_causal()
    compiled = torch.compile(model)
    with torch.no_grad():
        assert_same(compiled(ids), model(ids), rtol=1e-4, atol=1e-5)
