"""train() says what it learns from, what is finished and what has changed, before it loads anything."""

import json
import logging

import pytest

from causal_qwen.training import train
from causal_qwen.training.preparation import load_model
from causal_qwen.training.resumption import check_same_recipe
from training_runs import converted, recipe


@pytest.fixture(scope="module")
def model(base_directory, tmp_path_factory):
    return converted(base_directory, tmp_path_factory.mktemp("converted") / "model")


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A run over prices as pandas writes them, some of which are missing; and what it said."""
    directory = tmp_path_factory.mktemp("finished")
    lines = [{"name": "a", "size": n, "price": n * 2721.6018972544634 / 7} for n in range(1, 41)]
    lines[3]["price"], lines[9]["price"] = "NA", "about ten"
    table = directory / "table.jsonl"
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = []
    made = recipe(directory, model, max_steps=2, on_bad_row="skip")
    result = train(made, progress=said.append)
    return made, result, said


def test_training_says_how_many_numbers_it_learns_from(finished):
    _, result, said = finished
    names = ("train/numbers", "train/validation_numbers", "train/calibration_numbers", "train/skipped_rows")
    assert [result.metrics[name] for name in names] == [30, 4, 4, 2]
    assert said[0].startswith(
        "learning from 30 rows with 30 numbers, evaluating on 4 rows with 4 numbers, calibrating on 4 rows "
        "with 4 numbers; 2 rows skipped: price is NA"
    )
    assert "price is 'about ten', not a number" in said[0]


def test_a_finished_run_says_that_it_is_finished(finished, model, monkeypatch):
    made, result, _ = finished
    monkeypatch.setattr("causal_qwen.training.run.load_model", None)
    again = train(made, resume=True)
    assert again.was_finished
    assert not result.was_finished
    assert again.metrics["train/numbers"] == 30
    made.max_steps, made.learning_rate = 9, 0.5
    with pytest.raises(
        ValueError, match=r"out is finished, with .*max_steps 2, not 9.*begin a new run"
    ) as error:
        train(made, resume=True)
    assert "learning_rate 0.001, not 0.5" in str(error.value)
    made.max_steps, made.learning_rate, made.run_name = 2, 1e-3, "renamed"
    assert train(made, resume=True).was_finished


def test_a_changed_recipe_is_named_before_anything_is_loaded(model, tmp_path, monkeypatch):
    made = recipe(tmp_path, model, max_steps=3, save_steps=1)
    workspace = tmp_path / "out.run"
    workspace.mkdir()
    fields = vars(made) | {"max_steps": 5, "seed": 4}
    del fields["delimiter"]  # written by an earlier version
    (workspace / "run.json").write_text(json.dumps({"recipe": fields, "data": ""}))
    monkeypatch.setattr("causal_qwen.training.run.load_model", None)
    with pytest.raises(ValueError, match=r"begun with max_steps 5, not 3, seed 4, not 0; .*--overwrite"):
        train(made, resume=True)
    (workspace / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        train(made, resume=True)


def test_rows_of_a_step_may_be_shared_out_otherwise(model, tmp_path):
    made = recipe(tmp_path, model, batch_size=2, accumulation=3)
    workspace = tmp_path / "out.run"
    workspace.mkdir()
    begun = {"recipe": vars(made) | {"batch_size": 1, "accumulation": 2}, "data": "", "processes": 4}
    (workspace / "run.json").write_text(json.dumps(begun))
    with pytest.raises(
        ValueError, match=r"begun with 8 \(4 × 1 × 2\) rows per step, .* not 6 \(1 × 2 × 3\); "
    ):
        check_same_recipe(made, workspace, processes=1)
    check_same_recipe(recipe(tmp_path, model, batch_size=4, accumulation=2), workspace, processes=1)
    with pytest.raises(ValueError, match=r"begun with seed 0, not 1; "):
        check_same_recipe(recipe(tmp_path, model, batch_size=8, seed=1), workspace, processes=1)


def test_a_launch_that_shards_by_itself_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"ACCELERATE_USE_FSDP is set: .* write fsdp: true into the recipe"):
        train(recipe(tmp_path, model))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data": "none.csv"}, "none.csv: no such file"),
        ({"template": "{nme} {price}"}, "did you mean 'name'"),
        ({"target": "name"}, r"table.jsonl:1: name is 'a', not a number"),
        ({"encoding": "klingon"}, "klingon"),
    ],
)
def test_data_are_looked_at_before_anything_is_loaded(model, tmp_path, monkeypatch, overrides, message):
    monkeypatch.setattr("causal_qwen.training.run.load_model", None)
    with pytest.raises(ValueError, match=message):
        train(recipe(tmp_path, model, **overrides))
    assert not list(tmp_path.glob("*.run"))


def test_rows_fit_into_the_context(model, tmp_path):
    with pytest.raises(ValueError, match=r"max_length is 513; .* reads 512 tokens"):
        train(recipe(tmp_path, model, max_length=513))


def test_heads_are_trained_without_rows_to_evaluate_on(model, tmp_path):
    made = recipe(
        tmp_path, model, method="heads", max_steps=1, validation_fraction=0.0, calibration_fraction=0.0
    )
    assert train(made).metrics["train/validation_rows"] == 0


def test_skipped_rows_are_named_once(model, tmp_path, caplog):
    from causal_qwen.training.preparation import check_files, prepare_rows

    made = recipe(tmp_path, model, on_bad_row="skip")
    table = tmp_path / "table.jsonl"
    table.write_text("nonsense\n" + table.read_text())
    with caplog.at_level(logging.WARNING):
        check_files(made)
        parts = prepare_rows(made, load_model(made)[1], None)
    assert parts.bad_rows.count == 1
    assert len([record for record in caplog.records if "skipped" in record.message]) == 1
