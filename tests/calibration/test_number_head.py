"""The number channel as it is set from rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.calibration import (
    number_data,
    place_num_token,
    rounding_errors,
    set_value_space,
    solve_numbers,
    wake_numbers,
)
from causal_qwen.calibration.placing import _cuts
from causal_qwen.cauchy import Cauchy
from conftest import tiny_causal

NUM = 258
ROWS = 200


@pytest.fixture
def model():
    model = tiny_causal(num_token_id=NUM)
    with torch.no_grad():  # causes so narrow that scale_Y is the read-out noise's
        model.abduction.scale.weight.zero_()
        model.abduction.scale.bias.fill_(-12)
        model.action.b_noise.fill_(1e-6)
    set_value_space(model, "linear", torch.arange(1.0, 100.0, dtype=torch.float64))
    return model


def rows(model, *, noise=0.0):
    """A random token, then a number that is linear in what the model infers from it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(256, generator=generator)[:ROWS], torch.full((ROWS,), NUM)], dim=1)
    with torch.no_grad():
        loc_U = model(input_ids=ids[:, :1]).loc_U[:, 0].double()  # (N, D)
    slope = torch.randn(loc_U.shape[1], dtype=torch.float64, generator=generator)
    target = loc_U @ slope / 10 + noise * torch.randn(ROWS, dtype=torch.float64, generator=generator)
    values = torch.zeros(ids.shape, dtype=torch.float64)
    values[:, 1] = model.value_space.decode(target)
    labels = torch.where(ids == NUM, ids, -100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "numeric_values": values}
    return batch | {"labels": labels}, target, slope / 10


def read(model, batch):
    with torch.no_grad():
        outputs = model(input_ids=batch["input_ids"][:, :1])
    return Cauchy(outputs.loc_Y[:, 0], outputs.scale_Y[:, 0])


def solved(model, **options):
    batch, target, slope = rows(model, **options)
    wake_numbers(model)
    solve_numbers(model, number_data(model, [batch]), left_out=True)
    return batch, target, slope


def test_a_plain_start_says_nothing_yet(model):
    batch, _, _ = rows(model)
    wake_numbers(model)
    Y = read(model, batch)
    assert model.writes_numbers
    assert Y.loc.eq(0).all()
    torch.testing.assert_close(Y.scale, torch.ones(ROWS))


def test_the_solved_head_reads_what_is_linear_in_the_cause(model):
    batch, target, _ = solved(model, noise=0.05)
    Y = read(model, batch)
    assert (Y.loc.double() - target).abs().median() < 0.3 * target.abs().median()
    inside = ((target - Y.loc).abs() <= Y.scale).double().mean()
    assert 0.3 < inside < 0.95  # quartiles hold half, by left-out errors


def test_wrong_labels_do_not_reach_the_numbers(model):
    batch, target, _ = rows(model, noise=0.05)
    wake_numbers(model)
    wrong = torch.arange(ROWS) % 3 == 0
    batch["numeric_values"][wrong, 1] += 1e4
    solve_numbers(model, number_data(model, [batch]), left_out=True)
    error = (read(model, batch).loc.double() - target)[~wrong].abs().median()
    assert error < 0.5 * target.abs().median()


def test_intervals_of_left_out_rows_cover_new_ones(model):
    batch, _, _ = rows(model, noise=0.3)
    half = {name: tensor[:100] for name, tensor in batch.items()}
    wake_numbers(model)
    solve_numbers(model, number_data(model, [half]), left_out=True)
    assert len(model.config.conformal_scores) == len(model.config.conformal_folds) == 100
    new = {name: batch[name][100:, :1] for name in ("input_ids", "attention_mask")}
    numbers = model.predict_number(new, 0.8)
    values = batch["numeric_values"][100:, 1]
    covered = ((numbers.lower <= values) & (values <= numbers.upper)).double().mean()
    assert 0.65 < covered < 0.95


def test_what_was_not_seen_is_flagged_and_bounded(model):
    batch, _, _ = solved(model, noise=0.05)
    inputs = {name: batch[name][:, :1] for name in ("input_ids", "attention_mask")}
    assert model.predict_number(inputs).extrapolates.double().mean() < 0.1
    low, high = model.config.value_range
    with torch.no_grad():
        model.abduction.loc.weight.mul_(50)
    numbers = model.predict_number(inputs)
    assert numbers.extrapolates.all()
    middle, reach = (low + high) / 2, 5.01 * (high - low)
    for column in (numbers.median, numbers.lower, numbers.upper):
        assert ((column - middle).abs() <= reach).all()


def test_what_was_seen_survives_saving(model, tmp_path):
    batch, _, _ = solved(model, noise=0.05)
    inputs = {name: batch[name][:20, :1] for name in ("input_ids", "attention_mask")}
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for name, column in vars(model.predict_number(inputs)).items():
        other = getattr(again.predict_number(inputs), name)
        assert column == other if name == "level" else torch.equal(column, other), name


def test_wrong_labels_are_told_apart_and_kept_in_the_configuration(model, caplog):
    batch, target, _ = rows(model, noise=0.05)
    bad = torch.arange(ROWS) % 4 == 0
    batch["numeric_values"][bad, 1] = model.value_space.decode(target.max() + 3 + target[bad].abs())
    wake_numbers(model)
    fit = solve_numbers(model, number_data(model, [batch]), left_out=True)
    assert (fit.believed == ~bad).double().mean() > 0.95
    assert model.config.wrong_labels == list(fit.wrong)
    assert "look wrong" in caplog.text
    # The intervals still speak of every label.
    assert len(model.config.conformal_scores) == ROWS
    solve_numbers(model, number_data(model, [rows(model, noise=0.05)[0]]), left_out=True)
    assert model.config.wrong_labels is None


def test_few_numbers_change_nothing(model):
    batch, _, _ = rows(model)
    few = {name: tensor[:5] for name, tensor in batch.items()}
    wake_numbers(model)
    assert solve_numbers(model, number_data(model, [few]), left_out=True) is None
    assert solve_numbers(model, number_data(model, []), left_out=True) is None
    assert model.config.value_range is None
    assert model.predict_number({"input_ids": few["input_ids"]}).extrapolates is None


def test_a_head_leaves_alone_what_rounding_changes(model):
    batch, _, _ = rows(model, noise=0.05)
    errors = rounding_errors(model, [batch])
    assert all(error.shape == (ROWS, model.config.causal_size) for error in errors.values())
    assert "bfloat16" in errors
    assert rounding_errors(model, []) == {}
    wake_numbers(model)
    data = number_data(model, [batch])
    larger = {name: 10 * error for name, error in errors.items()}
    shifts = []
    for used in ({}, larger):
        fit = solve_numbers(model, data, errors=used, left_out=True)
        shifts.append((larger["bfloat16"] @ fit.slope).abs().median())
    assert shifts[1] < shifts[0]
    assert set(model.config.precision_shifts) == set(errors)


def test_shifts_are_those_of_rows_that_the_head_was_not_told_of(model):
    """More directions than rows: what a head was told of it avoids, and nothing follows for other rows."""
    batch, _, _ = rows(model, noise=0.05)
    wake_numbers(model)
    data = number_data(model, [batch])
    error = torch.randn(20, model.config.causal_size, generator=torch.Generator().manual_seed(1)).double()
    fit = solve_numbers(model, data, errors={"bfloat16": error}, left_out=True)
    moves = (error @ fit.slope).abs() / (2 * fit.left_out[fit.believed].abs().quantile(0.9))
    assert model.config.precision_shifts["bfloat16"] == pytest.approx(float(moves[10:].median()))
    assert moves[:10].median() < 0.1 * moves[10:].median()


def test_what_rounding_makes_of_a_training_row_has_been_seen(model):
    """Even where it moves all rows further than they lie apart, as int8 does over a trained backbone."""
    batch, _, _ = rows(model, noise=0.05)
    wake_numbers(model)
    data = number_data(model, [batch])
    generator = torch.Generator().manual_seed(1)
    common, elsewhere = 5 * torch.randn(2, model.config.causal_size, generator=generator)
    own = 0.02 * torch.randn(ROWS, model.config.causal_size, generator=generator)
    solve_numbers(model, data, errors={"int8": (common + own)[:64].double()}, left_out=True)
    seen, loc_U = model.action.support, data.U.loc
    assert (seen(loc_U) <= 1).all()
    assert (seen(loc_U + common + own) <= 1).all()
    assert (seen(loc_U + elsewhere) > 1).all()


@pytest.mark.parametrize("move_row", [True, False])
def test_the_token_of_numbers_is_chosen_before_them_alone(model, move_row):
    """With its row, always; with its bias alone, as well as one threshold can tell."""
    batch, _, _ = rows(model)
    words = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:20].reshape(-1, 10)
    other = {"input_ids": words, "labels": words, "numeric_values": torch.zeros(words.shape)}
    wake_numbers(model)
    data = number_data(model, [{name: tensor[:20] for name, tensor in batch.items()}, other])
    row = model.lm_head.weight[NUM].clone()
    assert place_num_token(model, data, move_row=move_row) == move_row
    assert torch.equal(model.lm_head.weight[NUM], row) != move_row
    before = model.prob_num(data.U, data.U0)
    elsewhere = model.prob_num(data.U_elsewhere, data.U0_elsewhere)
    right = torch.cat([before > 0.5, elsewhere < 0.5]).double().mean()
    assert right > (0.8 if move_row else 0.5)


def test_in_running_text_a_number_is_written_where_it_is_likelier_than_a_word(model):
    """Behind 7 always; behind 9 in one of five cases, which are two thirds of all numbers."""
    behind_9 = [[9, NUM]] * 20 + [[9, 3]] * 80
    words = torch.tensor([[7, NUM]] * 10 + behind_9 + [[word, 4] for word in range(50, 250)])
    values = torch.where(words == NUM, 1.0 + torch.arange(len(words))[:, None], 0.0).double()
    wake_numbers(model)
    data = number_data(model, [{"input_ids": words, "labels": words, "numeric_values": values}])
    assert data.words_per_number == 280 / 30
    place_num_token(model, data, among_words=True)
    with torch.no_grad():
        S = model(input_ids=words[:, :1], output_scores=True).S
    chosen = model.action.z_scores(S)[:, 0].argmax(-1) == NUM
    assert chosen[:10].all()
    assert not chosen[10:110].any()
    assert chosen[110:].double().mean() < 0.05


@given(st.lists(st.floats(-9, 9), min_size=20, max_size=60), st.floats(1, 30))
def test_a_cut_is_midway_between_nine_tenths_of_either_side_where_they_are_apart(entries, odds):
    unwanted = torch.tensor(entries, dtype=torch.float64)
    wanted = unwanted.max() + 1 + unwanted.abs()
    low = unwanted.quantile(1 - 0.1 / odds, interpolation="higher")
    high = wanted.quantile(0.1, interpolation="lower")
    cut = sum(_cuts(wanted, unwanted, odds)) / 2
    assert unwanted.max() < cut or odds * (unwanted > cut).double().mean() <= 0.1
    gaps = [torch.cat([wanted, unwanted]).sort().values.diff().max().item()]
    assert cut == pytest.approx(float(low + high) / 2, abs=max(gaps))


def test_sides_that_cannot_be_told_apart_are_cut_by_their_odds():
    both = torch.linspace(-1, 1, 101)
    assert sum(_cuts(both, both, 20.0)) / 2 > 0.7  # nearly every position is one where it is not wanted


def test_no_prompt_gives_a_wild_number_unflagged(model):
    """A thousand random prompts: inside ten times the training range, flagged beyond what was seen."""
    solved(model, noise=0.05)
    low, high = model.config.value_range
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 256, (1000, 6), generator=generator)
    numbers = model.predict_number({"input_ids": ids})
    beyond = (numbers.median < low) | (numbers.median > high)
    assert numbers.extrapolates[beyond].all()
    middle, reach = (low + high) / 2, 5.01 * (high - low)
    assert all(
        ((end - middle).abs() <= reach).all() for end in (numbers.median, numbers.lower, numbers.upper)
    )
