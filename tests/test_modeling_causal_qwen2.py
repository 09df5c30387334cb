"""The model: the base's logits bit for bit, labels as Hugging Face has them, and every way of running it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, StaticCache

from causal_qwen import CausalQwen2Config, CausalQwen2ForCausalLM
from causal_qwen.losses import IGNORE_INDEX
from conftest import TINY, tiny_base, tiny_causal

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


def gradients(model, **inputs):
    model.zero_grad()
    labels = inputs["labels"]
    model(labels.clamp(min=0), **inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


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


# --- labels
# ---------------------------------------------------------------------------------------------------------


def reference_loss(model, ids, labels):
    """The One-vs-Rest loss written out: shift by hand, sum over all tokens, mean over valid positions, in
    float64.
    """
    outputs = model(ids, output_scores=True)
    total, count = 0.0, 0
    for row in range(ids.shape[0]):
        for position in range(ids.shape[1] - 1):
            label = labels[row, position + 1].item()
            if label == IGNORE_INDEX:
                continue
            loc, scale = outputs.loc_S[row, position].double(), outputs.scale_S[row, position].double()
            prob = torch.atan2(scale, model.action.threshold.double() - loc) / torch.pi
            log_rest = torch.log1p(-prob)
            total -= (log_rest.sum() - log_rest[label] + prob[label].log()).item()
            count += 1
    return total / max(count, 1)


def test_labels_are_shifted_and_ignored_as_cross_entropy_does(ids):
    model = tiny_causal()
    labels = ids.clone()
    labels[0, :6] = IGNORE_INDEX
    labels[2] = IGNORE_INDEX
    expected = reference_loss(model, ids, labels)
    assert model(ids, labels=labels).cls_loss.item() == pytest.approx(expected, rel=1e-5)
    shifted = torch.cat([labels[:, 1:], torch.full((3, 1), IGNORE_INDEX)], dim=1)
    assert model(ids, shift_labels=shifted).cls_loss.item() == pytest.approx(expected, rel=1e-5)


def test_padding_does_not_move_the_loss(ids):
    model = tiny_causal()
    padded = torch.cat([ids, torch.full((3, 5), 257)], dim=1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(3, 5, dtype=torch.long)], dim=1)
    labels = padded.masked_fill(mask == 0, IGNORE_INDEX)
    torch.testing.assert_close(
        model(padded, attention_mask=mask, labels=labels).loss, model(ids, labels=ids).loss
    )


def test_an_all_ignored_batch_costs_nothing(ids):
    model = tiny_causal().train()
    loss = model(ids, labels=torch.full_like(ids, IGNORE_INDEX)).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or p.grad.eq(0).all() for p in model.parameters())


def test_eight_accumulated_batches_equal_one_of_eight():
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 256, (8, 10), generator=generator)
    ids[:5, 6] = 258
    values = torch.where(ids == 258, torch.linspace(-3, 900, 8)[:, None].double(), 0.0)
    labels = ids.clone()
    for row in range(8):
        labels[row, : row + 1] = IGNORE_INDEX
    model = tiny_causal(gate_alpha=0.5).train()
    model(ids, labels=labels, numeric_values=values).loss.backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    items, numbers = (labels[:, 1:] != IGNORE_INDEX).sum(), (labels[:, 1:] == 258).sum()
    for row in range(8):
        one = slice(row, row + 1)
        model(
            ids[one],
            labels=labels[one],
            numeric_values=values[one],
            num_items_in_batch=items,
            num_numbers_in_batch=numbers,
        ).loss.backward()
    for name, gradient in whole.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-5)


# --- numbers
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("space", ["log", "linear"])
def test_number_loss_is_the_gated_negative_log_density(ids, alpha, gradient, space):
    config = {"value_space": space, "value_center": 0.5, "value_spread": 2.0}
    model = tiny_causal(gate_alpha=alpha, gate_gradient=gradient, reg_loss_weight=0.7, **config)
    ids[0, 3] = ids[0, 9] = ids[2, 5] = 258
    values = torch.where(ids == 258, 3.0 + torch.arange(12.0), 0.0)
    outputs = model(ids, labels=ids, numeric_values=values, output_scores=True)
    parts = []
    for row, position in ((0, 2), (0, 8), (2, 4)):
        loc, scale = outputs.loc_Y[row, position].double(), outputs.scale_Y[row, position].double()
        value = values[row, position + 1].double()
        y = ((torch.log1p(value) if space == "log" else value) - 0.5) / 2.0
        nll = torch.log(torch.pi * scale) + torch.log1p(((y - loc) / scale) ** 2)
        S = outputs.loc_S[row, position, 258].double(), outputs.scale_S[row, position, 258].double()
        prob = torch.atan2(S[1], model.action.threshold[258].double() - S[0]) / torch.pi
        parts.append((alpha + (1 - alpha) * prob) * nll)
    expected = sum(parts) / 3
    assert outputs.reg_loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert outputs.loss.item() == pytest.approx((outputs.cls_loss + 0.7 * outputs.reg_loss).item())
    outputs.reg_loss.backward()
    moved = model.action.bias.grad is not None and bool(model.action.bias.grad[258] != 0)
    assert moved == (gradient and alpha < 1), "the gate carries gradient to b_<NUM> only when it may"


@pytest.mark.parametrize("space", ["log", "linear"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-300, -1e-300, 1e300, -1e300])
def test_extreme_values_give_finite_loss_and_gradients(ids, space, value):
    model = tiny_causal(value_space=space, gate_alpha=1.0).train()
    ids[:, 5] = 258
    values = torch.where(ids == 258, torch.tensor(value, dtype=torch.float64), 0.0)
    outputs = model(ids, labels=ids, numeric_values=values)
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_a_batch_without_numbers_has_no_number_loss(ids):
    model = tiny_causal().train()
    outputs = model(ids, labels=ids, numeric_values=torch.zeros(ids.shape))
    assert outputs.reg_loss == 0
    outputs.loss.backward()
    assert model.action.number.weight.grad.eq(0).all(), (
        "zero, not absent: distributed training waits for every gradient"
    )


def test_a_batch_of_only_numbers(ids):
    model = tiny_causal().train()
    only = torch.full_like(ids, 258)
    outputs = model(only, labels=only, numeric_values=torch.rand(ids.shape).double() * 100)
    outputs.loss.backward()
    assert torch.isfinite(outputs.reg_loss)
    assert outputs.reg_loss != 0


def test_number_labels_without_values_are_refused(ids):
    ids[0, 3] = 258
    with pytest.raises(ValueError, match="labels contain <NUM>"):
        tiny_causal()(ids, labels=ids)


def test_labels_values_replace_numeric_values_in_the_loss(ids):
    model = tiny_causal(gate_alpha=1.0)
    ids[0, 3] = 258
    values = torch.where(ids == 258, 5.0, 0.0)
    other = torch.where(ids == 258, 500.0, 0.0)
    same = model(ids, labels=ids, numeric_values=values, labels_values=values).reg_loss
    torch.testing.assert_close(same, model(ids, labels=ids, numeric_values=values).reg_loss)
    assert not torch.isclose(
        model(ids, labels=ids, numeric_values=values, labels_values=other).reg_loss, same
    )


def test_softmax_term_is_cross_entropy_on_logits(ids):
    model = tiny_causal(softmax_loss_weight=0.5)
    outputs = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, outputs.cls_loss + 0.5 * expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_predict_number_reads_the_last_position_under_any_padding(ids, side):
    model = tiny_causal(value_center=1.0, value_spread=0.5)
    alone = model.predict_number({"input_ids": ids[:1]}, level=0.5)
    pad, ones = torch.full((1, 4), 257), torch.ones(1, 12, dtype=torch.long)
    order = [pad, ids[:1]] if side == "left" else [ids[:1], pad]
    mask = torch.cat([ones if part is not pad else torch.zeros_like(pad) for part in order], 1)
    padded = model.predict_number({"input_ids": torch.cat(order, 1), "attention_mask": mask}, level=0.5)
    for name in ("median", "lower", "upper", "prob_num"):
        torch.testing.assert_close(getattr(padded, name), getattr(alone, name), rtol=1e-4, atol=1e-5)
    assert alone.lower < alone.median < alone.upper
    assert alone.median.dtype == torch.float64
    outputs = model(ids[:1], output_scores=True)
    y = outputs.loc_Y[0, -1].double() * 0.5 + 1.0
    torch.testing.assert_close(alone.median[0], y.sign() * torch.expm1(y.abs()))
    prob = (
        torch.atan2(outputs.scale_S[0, -1, 258], model.action.threshold[258] - outputs.loc_S[0, -1, 258])
        / torch.pi
    )
    torch.testing.assert_close(alone.prob_num[0], prob)


@pytest.mark.parametrize("impl", ["reference", "fused"])
def test_a_row_of_zeros_does_not_poison_the_gradients(ids, impl):
    """Padding rows are often zero; without balance their score has scale 0."""
    model = tiny_causal(loss_impl=impl).train()
    with torch.no_grad():
        model.lm_head.weight[250:] = 0
        for parameter in (model.action.balance, model.abduction.common_scale, model.action.threshold):
            parameter.zero_()
    model(ids.clamp(max=249), labels=ids).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# --- the sampled loss
# -------------------------------------------------------------------------------------------------


def test_the_configuration_reaches_the_sampled_loss(ids):
    """With as many draws as tokens nothing is left to chance."""
    model = tiny_causal(loss_impl="sampled", num_negatives=TINY["vocab_size"], num_token_id=5)
    sampled = model(input_ids=ids, labels=ids, numeric_values=torch.zeros(ids.shape)).cls_loss
    model.config.loss_impl = "fused"
    exact = model(input_ids=ids, labels=ids, numeric_values=torch.zeros(ids.shape)).cls_loss
    torch.testing.assert_close(sampled, exact)

    model.config.loss_impl, model.config.num_negatives = "sampled", 4
    few = model(input_ids=ids, labels=ids, numeric_values=torch.zeros(ids.shape)).cls_loss
    assert few != exact
