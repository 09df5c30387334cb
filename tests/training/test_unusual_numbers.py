"""Tables whose numbers are rare, equal, few, told by a chat, or new to a model that has learned others."""

import math

import pytest
import torch

from causal_qwen import convert
from causal_qwen.calibration import number_data
from causal_qwen.calibration.cauchy_regression import cauchy_regression
from causal_qwen.conversion import load_model
from causal_qwen.data import Reading
from causal_qwen.evaluation import predict
from causal_qwen.intervals import give_up_where_moved, interval_kind
from causal_qwen.training import TrainingRecipe, run, train
from conftest import CHAT_TEMPLATE, tiny_base, tiny_tokenizer

TABLE = {"template": "size {size} makes {y}", "target": "y"}


@pytest.fixture(scope="module")
def base(tmp_path_factory, one_thread):
    place = tmp_path_factory.mktemp("unusual")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tiny_base(tie_word_embeddings=True).save_pretrained(place / "base")
    tokenizer.save_pretrained(place / "base")
    convert(place / "base", place / "converted", calibration="none")
    return place / "converted"


@pytest.fixture
def learned(base, tmp_path):
    """rows, options → (model, processor, directory)."""

    def learned(rows, name="model", model=base, **options):
        fields = {"model": str(model), "output": str(tmp_path / name), "batch_size": 4, "max_length": 500}
        recipe = TrainingRecipe.from_mapping(fields | {"save_steps": 0, "max_steps": 2} | options)
        output = train(recipe, rows=rows, progress=None).output
        return *load_model(str(output)), output

    return learned


def sizes(count, seed=0):
    return torch.randint(1, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_two_numbers_that_features_tell_are_learned():
    """More than half of the labels are 0: a line that began at their median would never see the others."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(200, 8, generator=generator, dtype=torch.float64)
    target = (features[:, 0] > features[:, 0].quantile(0.55)).double()
    features[:, 0] += 4 * target
    fit = cauchy_regression(features, target)
    assert fit.believed.all()
    said = features @ fit.slope + fit.intercept
    assert ((said > 0.5) == (target > 0.5)).double().mean() > 0.97


@pytest.mark.parametrize("rare", [lambda size: float(size > 63), lambda size: max(size - 60, 0)])
def test_a_table_that_is_mostly_zero_is_learned_without_falling_over(learned, rare):
    rows = [{"size": size, "y": rare(size)} for size in sizes(60)]
    model, processor, output = learned(rows, **TABLE)
    found = list(predict(model, processor, rows[:20], reading=Reading.of(output)))
    assert all(math.isfinite(shift) for shift in model.config.precision_shifts.values())
    held = [one.lower <= row["y"] <= one.upper for one, row in zip(found, rows, strict=False)]
    assert sum(held) >= 15
    assert model.config.wrong_labels is None


def test_what_a_chat_reads_of_its_end_is_what_the_head_was_solved_on(learned, monkeypatch):
    """The row of the end moves, and stands behind the user's turn too."""
    moved = []
    original = run.calibrate

    def spy(model, processor, recipe, parts, batches, data):
        result = original(model, processor, recipe, parts, batches, data)
        before = [model.action.number.weight.clone(), model.action.number.bias.clone()]
        solved = number_data(model, batches(parts.sample))
        target = model.value_space.encode(solved.values)
        moved.append(float((model.action.numbers(solved.U).loc - target).abs().median()))
        assert all(torch.isfinite(tensor).all() for tensor in before)
        moved.append(float((model.action.support(solved.U.loc) > 1).double().mean()))
        return result

    monkeypatch.setattr(run, "calibrate", spy)
    turns = [(f"size {size}", f"{2.5 * size + 1}") for size in sizes(80)]
    rows = [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": other}]}
        for one, other in turns
    ]
    learned(rows, method="heads", validation_fraction=0.0)
    error, beyond = moved
    assert error < 0.3
    assert beyond == 0


def test_other_numbers_are_learned_in_a_space_of_their_own(learned):
    first = [{"size": size, "y": 2 * size + 1} for size in sizes(60)]
    _, _, before = learned(first, "first", **TABLE)
    later = [{"size": size, "y": 1e6 + 50 * size} for size in sizes(60)]
    model, processor, output = learned(later, "later", model=before, value_space="linear", **TABLE)
    assert model.config.value_space == "linear"
    for one, row in zip(
        predict(model, processor, later[:10], reading=Reading.of(output)), later, strict=False
    ):
        assert one.median == pytest.approx(row["y"], abs=4000)
        assert not one.extrapolates
    few, _, _ = learned(later[:8], "few", model=before, **TABLE)
    kept, _ = load_model(str(before))
    assert (few.config.value_center, few.config.value_spread) == (
        kept.config.value_center,
        kept.config.value_spread,
    )


def test_words_alone_do_not_wake_the_numbers(learned):
    rows = [{"prompt": f"about {'abcdefgh'[i % 8]}", "completion": "a word or two"} for i in range(40)]
    model, _, _ = learned(rows, method="heads")
    assert not model.writes_numbers


def test_one_text_leaves_nobody_out(learned):
    def text(seed):
        return " ".join(f"size {size} is {2 * size + 1}." for size in sizes(20, seed))

    model, _, _ = learned([{"text": text(1)}, {"text": text(2)}], method="heads", validation_fraction=0.0)
    assert interval_kind(model.config) == "quantiles of the Cauchy law"


def test_too_few_rows_set_aside_leave_the_intervals_of_training(learned, caplog):
    rows = [{"size": size, "y": 2 * size} for size in sizes(100)]
    model, _, _ = learned(rows, calibration_fraction=0.1, **TABLE)
    assert interval_kind(model.config).startswith("CV+")
    assert "stay those of the training rows" in caplog.text


def test_a_precision_that_was_not_measured_is_named(learned):
    rows = [{"size": size, "y": 2 * size} for size in sizes(60)]
    model, _, _ = learned(rows, **TABLE)
    assert give_up_where_moved(model.config, "float32") is None
    model.config.precision_shifts.pop("int4", None)
    assert "was not measured" in give_up_where_moved(model.config, "int4")
    assert model.config.conformal_scores is not None
