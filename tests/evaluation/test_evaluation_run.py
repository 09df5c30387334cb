"""A run over batches gives what a dense computation over all of the data gives."""

import json
import math

import numpy as np
import pytest
import torch

from causal_qwen.calibration import fit_conformal
from causal_qwen.data import BadRow, BadRows, Collator, Encoder, Reading
from causal_qwen.evaluation import evaluate, run_evaluation
from causal_qwen.heads import exact
from conftest import number_batches, tiny_causal, tiny_processor

CAUSES = [f"dist/U_{law}_{name}" for law in ("loc", "scale") for name in ("mean", "median", "std", "iqr")]
NAMES = [
    *(
        "eval/accuracy",
        "eval/num_precision",
        "eval/num_recall",
        "eval/num_f1",
        "eval/reg_mae",
        "eval/reg_mdae",
    ),
    *("eval/reg_crps", "eval/coverage_50", "eval/coverage_90", "eval/ovr_nll", "eval/softmax_nll"),
    *("eval/brier", "eval/ece", "dist/ovr_prob_sum_median", "dist/mode_agreement"),
    *CAUSES,
]
LAWS = ("loc_S", "scale_S", "logits", "loc_U", "scale_U", "loc_Y", "scale_Y")


class Processor:
    num_token_id = 258


@pytest.fixture(scope="module")
def model():
    model = tiny_causal(value_center=2.0, value_spread=1.5)
    with torch.no_grad():
        model.action.bias[258] += 3.0  # so that some choices are numbers
    return model


def dense(model, batches):
    """Every position of every batch at once, by the model's own output of scores."""
    parts = []
    for batch in batches:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "numeric_values")}
        with torch.no_grad():
            out = model(**inputs, output_scores=True)
        keep = batch["labels"][:, 1:] != -100
        parts.append(
            {
                name: getattr(out, name)[:, :-1][keep]
                for name in ("loc_S", "scale_S", "logits", "loc_U", "scale_U", "loc_Y", "scale_Y")
            }
            | {"labels": batch["labels"][:, 1:][keep], "values": batch["numeric_values"][:, 1:][keep]}
        )
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_metrics_equal_the_dense_ones(model, monkeypatch):
    monkeypatch.setattr("causal_qwen.evaluation.run.CHUNK_ELEMENTS", 300 * 7)  # seven positions at a time
    batches = number_batches(count=5)
    measured = evaluate(model, Processor(), batches)
    assert set(NAMES) <= set(measured)
    d = dense(model, batches)
    threshold = exact(model.action.threshold).detach()
    prob = torch.atan2(d["scale_S"].double(), (threshold - d["loc_S"]).double()) / math.pi
    p = prob / prob.sum(-1, keepdim=True)
    chosen, labels = p.argmax(-1), d["labels"]
    right = chosen == labels
    rows = torch.arange(len(labels))
    one_hot = torch.nn.functional.one_hot(labels, 300)
    number, is_num = chosen == 258, labels == 258
    hits = (number & is_num).sum()
    loc, scale, value = (d[name][is_num].double() for name in ("loc_Y", "scale_Y", "values"))
    g = (torch.sign(value) * torch.log1p(value.abs()) - 2.0) / 1.5
    y = loc * 1.5 + 2.0
    error = (torch.sign(y) * torch.expm1(y.abs()) - value).abs()
    inside = (g - loc).abs() / scale
    expected = {
        "eval/accuracy": right.double().mean(),
        "eval/num_precision": hits / number.sum(),
        "eval/num_recall": hits / is_num.sum(),
        "eval/num_f1": 2 * hits / (number.sum() + is_num.sum()),
        "eval/reg_mae": error.mean(),
        "eval/reg_mdae": np.median(error),
        "eval/coverage_50": (inside <= 1).double().mean(),
        "eval/coverage_90": (inside <= math.tan(0.45 * math.pi)).double().mean(),
        "eval/ovr_nll": -p[rows, labels].log().mean(),
        "eval/softmax_nll": torch.nn.functional.cross_entropy(d["logits"].double(), labels),
        "eval/brier": (p - one_hot).square().sum(-1).mean(),
        "dist/ovr_prob_sum_median": np.median(prob.sum(-1)),
        "dist/mode_agreement": (chosen == d["logits"].argmax(-1)).double().mean(),
    }
    for name in ("loc", "scale"):
        entries = d[f"{name}_U"].double().numpy()
        low, middle, high = np.quantile(entries, [0.25, 0.5, 0.75])
        statistics = {"mean": entries.mean(), "median": middle, "std": entries.std(), "iqr": high - low}
        expected |= {f"dist/U_{name}_{key}": entry for key, entry in statistics.items()}
    for name, entry in expected.items():
        assert measured[name] == pytest.approx(float(entry), rel=1e-4), name
    assert 0 < number.sum() < len(number)  # the numbers above are no trivial ones


def test_the_split_into_batches_does_not_matter(model):
    batches = number_batches(count=4)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    apart, together = evaluate(model, Processor(), batches), evaluate(model, Processor(), [whole])
    assert apart == pytest.approx(together, rel=1e-5, nan_ok=True)


def test_padding_does_not_count(model):
    batch = number_batches(count=1)[0]
    padded = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 4), value=257),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, 4)),
        "numeric_values": torch.nn.functional.pad(batch["numeric_values"], (0, 4)),
        "labels": torch.nn.functional.pad(batch["labels"], (0, 4), value=-100),
    }
    assert evaluate(model, Processor(), [padded]) == pytest.approx(
        evaluate(model, Processor(), [batch]), rel=1e-4, nan_ok=True
    )


def test_files_rows_and_batches_give_the_same_metrics(tmp_path):
    """Rows are measured as their own batches are; of bad rows the first stops, or all are counted."""
    model, processor = tiny_causal(), tiny_processor()
    reading = Reading("A {name} costs {price} coins.", "price")
    rows = [{"name": "abcdefgh"[: 1 + index % 8], "price": 3 * index + 1} for index in range(20)]
    file = tmp_path / "table.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = Encoder(processor)
    batches = [Collator.of(processor)([encoder.encode(one)]) for one in reading.examples(rows, BadRows())]
    expected = evaluate(model, processor, batches)
    assert math.isfinite(expected["eval/reg_mdae"])
    bad_rows = BadRows("skip")
    for source in (file, str(file), [file], rows, iter(rows), [*rows, {"name": "fig"}]):
        measured = evaluate(model, processor, source, reading=reading, batch_size=3, bad_rows=bad_rows)
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
    assert bad_rows.count == 1
    with pytest.raises(BadRow, match="row 0: no field 'price'"):
        evaluate(model, processor, [{"name": "fig"}], reading=reading)


def test_coverage_uses_the_conformal_map_and_shows_the_raw_law():
    model = tiny_causal()
    batches = number_batches(count=10)
    raw = evaluate(model, Processor(), batches)
    assert raw["eval/coverage_90"] == raw["eval/coverage_90_raw"]
    fit_conformal(model, batches)
    fitted = evaluate(model, Processor(), batches)
    assert fitted["eval/coverage_90_raw"] == raw["eval/coverage_90_raw"]
    # ⌈81·level⌉ of 80 scores lie inside, on the numbers that they were fitted to
    assert fitted["eval/coverage_50"] == pytest.approx(41 / 80)
    assert fitted["eval/coverage_90"] == pytest.approx(73 / 80)


def test_metrics_are_deterministic_and_leave_the_model_alone(model):
    batches = number_batches(count=2)
    model.train()
    first = evaluate(model, Processor(), batches)
    torch.manual_seed(99)
    assert evaluate(model, Processor(), batches) == pytest.approx(first, rel=0, abs=0, nan_ok=True)
    assert model.training
    model.eval()


def test_without_positions_or_numbers_everything_undefined_is_nan(model):
    nothing = evaluate(model, Processor(), [])
    assert set(NAMES) <= set(nothing)
    assert all(math.isnan(entry) for entry in nothing.values())
    text = {"input_ids": torch.arange(20).reshape(2, 10), "labels": torch.arange(20).reshape(2, 10)}
    words = evaluate(model, Processor(), [text])
    assert math.isnan(words["eval/reg_mae"])
    assert math.isfinite(words["eval/ovr_nll"])


def test_causes_beyond_the_sample_are_summarised_by_a_random_one(model, monkeypatch):
    monkeypatch.setattr("causal_qwen.evaluation.run.SAMPLE_POSITIONS", 50)
    batches = number_batches(count=12)
    sampled = evaluate(model, Processor(), batches)
    monkeypatch.setattr("causal_qwen.evaluation.run.SAMPLE_POSITIONS", 10_000)
    exact_one = evaluate(model, Processor(), batches)
    assert sampled["dist/U_loc_mean"] == exact_one["dist/U_loc_mean"]
    assert sampled["dist/U_loc_std"] == exact_one["dist/U_loc_std"]
    assert sampled["dist/U_loc_median"] == pytest.approx(exact_one["dist/U_loc_median"], abs=0.1)
    assert sampled["dist/U_loc_iqr"] == pytest.approx(exact_one["dist/U_loc_iqr"], rel=0.1)


def test_another_processor_is_refused(model):
    class Stranger:
        num_token_id = 7

    with pytest.raises(ValueError, match="<NUM> is 7 for the processor and 258 for the model"):
        evaluate(model, Stranger(), [])


def test_intervals_are_those_of_predict_number(model):
    batch = number_batches(count=1)[0]
    evaluation = run_evaluation(model, [batch])
    prompts = {name: batch[name][:, :-1] for name in ("input_ids", "attention_mask", "numeric_values")}
    read = model.predict_number(prompts, 0.9)
    _, lower, upper, _ = evaluation.numbers(0.9)
    torch.testing.assert_close(evaluation.predicted, read.median, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(lower, read.lower, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(upper, read.upper, rtol=1e-3, atol=1e-6)
