"""A trained number means the same in every precision: cars, the heads alone trained, on both engines.

The embedded base comes from 4 bits, and int8 and int4 find its grid again: on it they round nothing and
cannot move a number. So the same function is tested with its weights off that grid, as those of a trained
backbone or of another base are.
"""

import copy
import functools
import importlib
import json
from pathlib import Path

import pytest
import torch

from causal_qwen import convert
from causal_qwen.calibration.conformal import LARGEST_SHIFT
from causal_qwen.conversion import load_model
from causal_qwen.data import BadRows, Reading, labelled_batches, read_rows
from causal_qwen.decoder import Engine
from causal_qwen.evaluation import run_evaluation
from causal_qwen.training import TrainingRecipe, train

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CARS = "package:vega_datasets/_data/cars.json"
# Half as many tokens as a sentence that says all: what is rounded is the same.
TEMPLATE = "{Origin}, {Displacement} inches, {Horsepower} hp, {Weight_in_lbs} lb: {Miles_per_Gallon}"
READING = Reading(TEMPLATE, "Miles_per_Gallon")
PRECISIONS = ("bfloat16", "int8", "int4")
TESTED = 100  # cars that training does not see: three points are three of them


@pytest.fixture(scope="module")
def cars():
    """Rows to train on and rows to test on."""
    rows = [dict(row) for _, row in read_rows(CARS, bad_rows=BadRows("skip"))]
    rows = [row for row in rows if row["Miles_per_Gallon"] and row["Horsepower"]]
    return rows[::6], rows[1::3][:TESTED]


@pytest.fixture(scope="module")
def conversion():
    return convert("smollm2", calibration="none")


@pytest.fixture(scope="module")
def moved(conversion):
    """The same function off the grid."""
    model = copy.deepcopy(conversion.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        importlib.import_module("comparison").leave_the_grid(model)
    return model


@pytest.fixture(scope="module")
def evaluated(cars, conversion, moved, tmp_path_factory):
    """precision → the evaluation of a model trained off the grid."""
    training, tested = cars
    directory = tmp_path_factory.mktemp("precisions")
    moved.save_pretrained(directory / "base")
    conversion.processor.save_pretrained(directory / "base")
    table = directory / "cars.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in training), encoding="utf-8")
    fields = {
        "model": str(directory / "base"), "data": str(table), "output": str(directory / "model"),
        "template": TEMPLATE, "target": "Miles_per_Gallon", "max_length": 128,
    }  # fmt: skip
    trained = str(train(TrainingRecipe.from_mapping(fields)).output)

    @functools.lru_cache(maxsize=1)
    def loaded(dtype):
        return load_model(trained, dtype=dtype)

    @functools.cache
    def run(precision):
        integers = precision if precision.startswith("int") else None
        model, processor = loaded("float32" if integers else precision)
        engine = Engine.from_model(model, precision=integers) if integers else None
        batches = labelled_batches(processor, tested, reading=READING, max_length=128, batch_size=16)
        return run_evaluation(model, batches, engine=engine)

    return run


@pytest.mark.parametrize("precision", PRECISIONS)
def test_medians_stay_within_a_tenth_of_an_interval(evaluated, precision):
    reference, found = evaluated("float32"), evaluated(precision)
    _, lower, upper, _ = reference.numbers(0.9)
    shift = float((found.predicted - reference.predicted).abs().median() / (upper - lower).median())
    assert shift <= 0.1 or moves(reference, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_coverage_stays_within_three_points(evaluated, precision):
    reference, found = evaluated("float32"), evaluated(precision)
    assert found.coverage(0.9) == pytest.approx(reference.coverage(0.9), abs=0.03) or moves(
        reference, precision
    )


def moves(reference, precision):
    """Whether training has found that this precision does not keep the numbers, which loading then says."""
    return precision == "int4" and reference.config.precision_shifts["int4"] > LARGEST_SHIFT


def test_scaled_channels_are_the_same_function_off_the_grid(conversion, moved):
    """Without this, int8 and int4 above would compare float32 with itself."""
    own = conversion.model
    ids = torch.arange(100, 160)[None]
    errors = {}
    with torch.no_grad():
        features, same = (model.model(ids).last_hidden_state for model in (own, moved))
    torch.testing.assert_close(same, features, rtol=1e-3, atol=1e-3)
    for name, model in (("embedded", own), ("off its grid", moved)):
        engine = Engine.from_model(model, precision="int4")
        errors[name] = float((engine.hidden(ids) - features).abs().max())
    # On its grid the weights are exact; vectors that multiply integers are taken to 16 bits.
    assert errors["embedded"] < 0.02 < 0.1 < errors["off its grid"]
