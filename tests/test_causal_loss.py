"""The losses of a model: labels as Hugging Face has them, words and numbers, every divisor."""

import pytest
import torch

from causal_qwen.losses import IGNORE_INDEX
from conftest import TINY, tiny_causal

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
