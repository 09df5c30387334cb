"""Evaluation and prediction on the native engine: the model's own heads on the engine's features."""

import copy
import dataclasses

import pytest
import torch

from causal_qwen.calibration.positions import labelled_positions
from causal_qwen.decoder import Engine
from causal_qwen.evaluation import evaluate
from conftest import number_batches, tiny_causal

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
# int4 packs 64 columns at a time.
WIDE = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def model():
    return tiny_causal(**WIDE, value_center=2.0, value_spread=1.5)


@pytest.fixture(scope="module")
def engines(model):
    return {precision: Engine.from_model(model, precision=precision) for precision in PRECISIONS}


class Processor:
    num_token_id = 258


def padded(batch, *, left, right):
    """The same rows with masked tokens on both sides, unlabelled."""
    fills = {"input_ids": 7, "attention_mask": 0, "numeric_values": 0.0, "labels": -100}
    return {
        name: torch.nn.functional.pad(entry, (left, right), value=fills[name])
        for name, entry in batch.items()
    }


def numbers(model, batches, engine):
    return torch.cat([part.Y.loc for part in labelled_positions(model, batches, engine=engine)])


def test_metrics_in_float32_are_those_of_transformers(model, engines):
    reference = evaluate(model, Processor(), number_batches())
    measured = evaluate(model, Processor(), number_batches(), engine=engines["float32"])
    assert measured == pytest.approx(reference, rel=1e-3, abs=1e-4, nan_ok=True)


def test_bfloat16_is_float32_arithmetic_on_rounded_weights(model, engines):
    """Transformers rounds every product, too; the engine the matrices only."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in rounded.model.named_parameters():
            if parameter.dim() == 2:
                assert "norm" not in name
                parameter.copy_(parameter.bfloat16())
    own, native = (numbers(rounded, number_batches(), engine) for engine in (None, engines["bfloat16"]))
    torch.testing.assert_close(native, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_predictions_know_neither_padding_nor_the_order_of_rows(model, engines, precision):
    (batch,) = number_batches(count=1)
    alone = model.predict_number(
        {name: batch[name] for name in ("input_ids", "numeric_values")}, engine=engines[precision]
    )
    order = torch.arange(len(batch["input_ids"])).flip(0)
    moved = padded({name: entry[order] for name, entry in batch.items()}, left=3, right=2)
    moved.pop("labels")
    found = model.predict_number(moved, engine=engines[precision])
    for column in ("median", "lower", "upper", "prob_num"):
        torch.testing.assert_close(
            getattr(found, column)[order], getattr(alone, column), rtol=1e-4, atol=1e-4
        )


def test_fewer_bits_are_other_features_and_nearer_with_more_of_them(model, engines):
    """Not the model's own backbone under another name: the error grows as the bits get fewer."""
    own = numbers(model, number_batches(), None)
    error = {
        precision: float((numbers(model, number_batches(), engine) - own).abs().median())
        for precision, engine in engines.items()
    }
    assert error["float32"] < error["int8"] < error["int4"]
    assert error["float32"] < error["bfloat16"] < error["int4"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_words_are_measured_by_the_engines_own_matrix(model, engines, precision):
    """An engine whose W is another measures other words and the same numbers."""
    other = copy.copy(engines[precision])
    rows = torch.arange(model.config.vocab_size).flip(0)
    other.weights = dataclasses.replace(other.weights, head=other.weights.head.rows(rows))
    before, after = (
        evaluate(model, Processor(), number_batches(), engine=engine)
        for engine in (engines[precision], other)
    )
    assert after["eval/reg_mdae"] == before["eval/reg_mdae"]
    assert after["eval/softmax_nll"] != before["eval/softmax_nll"]


def test_an_engine_reads_no_other_entries_of_a_batch(model, engines):
    (batch,) = number_batches(count=1)
    batch["position_ids"] = torch.arange(10).expand(8, 10)
    with pytest.raises(ValueError, match=r"not position_ids; leave them out"):
        evaluate(model, Processor(), [batch], engine=engines["float32"])


def test_an_engine_of_another_model_is_refused(model):
    other = Engine.from_model(tiny_causal(**WIDE, num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"make it with Engine\.from_model\(model\)"):
        evaluate(model, Processor(), number_batches(), engine=other)
