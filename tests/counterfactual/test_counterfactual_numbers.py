"""A number was observed: what would it have been? Against the law, against a known truth, against draws."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from causal_qwen import counterfactual_number, counterfactual_numbers
from causal_qwen.calibration import number_data, set_value_space, solve_numbers
from causal_qwen.cauchy import Cauchy
from causal_qwen.cli import app
from causal_qwen.cli import counterfactual as command_line
from causal_qwen.counterfactual import AbductionError
from causal_qwen.counterfactual.redrawing import RedrawnLaw
from causal_qwen.data import Reading
from conftest import tiny_causal, tiny_processor

pytestmark = pytest.mark.usefixtures("one_thread")
READING = Reading("{who} took {what} and got {score}", "score")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WHO = [f"{first}{last}" for first in LETTERS for last in LETTERS]
DRUGS = ("tea", "rum")  # as long as each other: prompts need no padding
NUM = 258
SPREAD = 5.0  # of the individual's noise


def law(model, processor, prompt):
    with torch.no_grad():
        outputs = model(**processor([prompt], return_tensors="pt"))
    return Cauchy(outputs.loc_Y[0, -1].double(), outputs.scale_Y[0, -1].double())


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


@pytest.fixture(params=["linear", "log"])
def model(request):
    """Random heads, whose scale_Y depends on the context."""
    return tiny_causal(value_space=request.param, value_center=2.0, value_spread=0.5)


@pytest.fixture(scope="module")
def world(processor):
    """A structural model: each row's number is linear in its features, plus a noise of its own; and a head
    that was solved on the factual half.
    """
    model = tiny_causal(value_space="linear")
    with torch.no_grad():
        model.abduction.scale.weight.zero_()
        model.abduction.scale.bias.fill_(-8)
        model.action.b_noise.fill_(1e-4)
    prompts = [f"{who} took {drug} and got " for who in WHO for drug in DRUGS]
    ids = processor(prompts, return_tensors="pt")["input_ids"]  # (2N, T)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        features = model(input_ids=ids, logits_to_keep=1).loc_U[:, 0].double()  # (2N, D)
    features = (features - features.mean(0)) / features.std(0).mean()
    slope = torch.randn(features.shape[1], generator=generator, dtype=torch.float64)
    noise = SPREAD * torch.randn(len(WHO), generator=generator, dtype=torch.float64)
    outcomes = (100 + 10 * features @ slope).view(-1, 2) + noise[:, None]  # (N, 2)
    taken = torch.randint(0, 2, (len(WHO),), generator=generator)
    factual = outcomes.gather(1, taken[:, None]).squeeze(1)
    truth = outcomes.gather(1, 1 - taken[:, None]).squeeze(1)
    table = [
        {"who": who, "what": DRUGS[drug], "score": float(score)}
        for who, drug, score in zip(WHO, taken.tolist(), factual.tolist(), strict=True)
    ]
    read = ids[torch.arange(len(WHO)) * 2 + taken]
    read = torch.cat([read, torch.full((len(WHO), 1), NUM)], dim=1)
    values = torch.where(read == NUM, factual[:, None], 0.0)
    labels = torch.where(read == NUM, read, -100)
    batches = [{"input_ids": read, "numeric_values": values, "labels": labels}]
    set_value_space(model, "linear", factual)
    solve_numbers(model, number_data(model, batches), left_out=True)
    other = [{**row, "what": DRUGS[1 - drug]} for row, drug in zip(table, taken.tolist(), strict=True)]
    return model, table, other, truth


def test_the_same_quantile_of_the_other_law(model, processor):
    prompts = ["A cook with 3 years earns ", "A nurse with 3 years earns "]
    for value in (0.3, 12.5, 140.0):
        (answer,) = counterfactual_number(model, processor, prompts[0], value, prompts[1:]).median.tolist()
        before, after = (law(model, processor, prompt) for prompt in prompts)
        y = model.value_space.encode(torch.tensor(value, dtype=torch.float64))
        same_rank = after.quantile(before.cdf(y))
        assert answer == pytest.approx(model.value_space.decode(same_rank).item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.1, 7.0, -3.3, 123456.789])
def test_the_null_intervention_returns_the_number_itself(model, processor, dtype, value):
    model.model.to(dtype)
    prompts = ["A cook earns ", "A nurse and a cook, together, earn ", "A cook earns "]
    result = counterfactual_number(model, processor, prompts[0], value, prompts[1:])
    assert result.median[1].item() == value
    assert result.median[0].item() != value
    assert result.observed.tolist() == [value, value]


def test_a_larger_number_stays_larger(model, processor):
    values = [0.0, 0.5, 3.0, 20.0, 1e4]
    answers = [
        counterfactual_number(model, processor, "A cook earns ", value, ["A nurse earns "])
        for value in values
    ]
    medians = [answer.median.item() for answer in answers]
    assert medians == sorted(set(medians))
    ranks = [answer.rank.item() for answer in answers]
    assert ranks == sorted(set(ranks))


def test_a_known_truth_is_found_from_factual_rows(processor, world):
    model, table, other, truth = world
    result = counterfactual_numbers(model, processor, table, other, reading=READING)
    with_it, without = ((column - truth).abs().median() for column in (result.median, result.prediction))
    assert with_it < 0.5 * without
    assert without > 0.4 * SPREAD
    held = (result.lower <= truth) & (truth <= result.upper)
    assert held.double().mean() > 0.87  # of 90%, or more: what jackknife and posterior know counts twice
    wide = (result.upper - result.lower).median()
    error = (result.median - truth).abs().median()
    assert wide < 10 * error  # where nothing counted twice, a normal law would have 2·1.64/0.67 = 4.9
    assert result.extrapolates.double().mean() < 0.05


def test_a_table_is_its_rows_and_a_field_can_be_set(processor, world):
    model, table, _, _ = world
    whole = counterfactual_numbers(
        model, processor, table[:9], {"what": "rum"}, reading=READING, batch_size=4
    )
    for index, row in enumerate(table[:9]):
        prompts = [f"{row['who']} took {what} and got " for what in (row["what"], "rum")]
        alone = counterfactual_number(model, processor, prompts[0], row["score"], prompts[1:])
        for name in ("median", "lower", "upper", "rank", "prediction"):
            ours, theirs = getattr(whole, name)[index].item(), getattr(alone, name).item()
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
        if row["what"] == "rum":
            record = whole.records()[index]
            assert record["median"] == record["lower"] == record["upper"] == row["score"]


def test_what_the_ridge_leaves_open_widens_intervals(processor, world, monkeypatch):
    """Two heads that vary alike: one that rows speak for, and one that its prior speaks for."""
    model, table, other, _ = world
    widths = []
    for factor in (0.0, 1.0, 100.0):
        leverage = model.config.number_leverage
        monkeypatch.setattr(model.config, "number_leverage", factor * leverage)
        result = counterfactual_numbers(model, processor, table[:20], other[:20], reading=READING)
        widths.append((result.upper - result.lower).median().item())
        monkeypatch.undo()
    assert widths[0] < widths[1] < widths[2] < 10.1 * widths[1]
    monkeypatch.setattr(model.config, "number_leverage", None)  # of a model that was solved before
    result = counterfactual_numbers(model, processor, table[:3], other[:3], reading=READING)
    assert result.lower is None


def test_without_folds_nothing_is_said_about_the_head(model, processor):
    result = counterfactual_number(model, processor, "A cook earns ", 3.0, ["A nurse earns "])
    assert result.lower is None
    assert result.records()[0]["upper"] is None
    assert result.extrapolates is None


# --- the part that is no individual's is drawn anew


def laws(residual, kept, lost, *, loc=0.7, ratio=1.0, new=None):
    shape = torch.as_tensor(residual, dtype=torch.float64)
    others = [
        torch.full_like(shape, value) for value in (kept, lost, loc, ratio, lost if new is None else new)
    ]
    return RedrawnLaw.of(shape, *others)


@pytest.mark.parametrize(
    ("residual", "kept", "lost", "ratio", "new"),
    [(1.5, 0.3, 1.0, 1.0, 1.0), (-4.0, 1.0, 0.5, 2.0, 0.2), (0.0, 1.0, 1.0, 1.0, 1.0)],
)
def test_the_redrawn_law_is_that_of_draws(residual, kept, lost, ratio, new):
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(2, 400_000, generator=generator, dtype=torch.float64)
    own, fresh = (
        Cauchy(torch.zeros(()), torch.tensor(s)).rsample(uniform=u)
        for s, u in zip((kept, new), uniform, strict=True)
    )
    weights = 1 / (1 + ((residual - own) / lost).square())  # of draws that the observation allows
    drawn, order = (0.7 + ratio * own + fresh).sort()
    shares = weights[order].cumsum(0) / weights.sum()
    for prob in (0.1, 0.25, 0.5, 0.75, 0.9):
        quantile = laws(residual, kept, lost, ratio=ratio, new=new).quantile(prob)
        assert shares[torch.searchsorted(drawn, quantile)].item() == pytest.approx(prob, abs=0.006)


def test_redrawn_under_the_factual_prompt_is_the_factual_law():
    """Distribution-consistency: over everybody's residuals, the law is what it was."""
    kept, lost, count = 0.4, 1.1, 20_001
    total = Cauchy(torch.tensor(0.7).double(), torch.tensor(kept + lost).double())
    ranks = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    redrawn = laws(total.quantile(ranks) - 0.7, kept, lost)
    for y in (-20.0, -1.0, 0.7, 3.0, 40.0):
        at = torch.tensor(y, dtype=torch.float64)
        assert redrawn.cdf(at.expand(count)).mean().item() == pytest.approx(total.cdf(at).item(), abs=2e-4)


def test_the_two_readings_meet_where_all_is_the_individuals(processor):
    model = tiny_causal(value_space="linear")
    with torch.no_grad():
        model.action.number_noise.zero_()
        model.action.b_noise.zero_()
    prompts = ("A cook earns ", ["A nurse earns "])
    kept, redrawn = (
        counterfactual_number(model, processor, prompts[0], 3.0, prompts[1], noise=noise)
        for noise in ("kept", "redrawn")
    )
    assert redrawn.median.item() == pytest.approx(kept.median.item(), rel=1e-4)
    assert redrawn.lower.item() == pytest.approx(redrawn.upper.item(), rel=1e-4)
    with torch.no_grad():
        model.action.number_noise.fill_(1e6)  # nothing of the residual is the individual's
    redrawn = counterfactual_number(model, processor, prompts[0], 3.0, prompts[1], noise="redrawn")
    assert (
        abs(redrawn.median.item() - redrawn.prediction.item()) < 1e-3 * (redrawn.upper - redrawn.lower).item()
    )


# --- what is refused


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (math.nan, {}, "nan was observed"),
        (math.inf, {}, "inf was observed"),
        (1.0, {"noise": "lost"}, "noise is 'lost'; choose 'kept' or 'redrawn'"),
        (1.0, {"level": 1.0}, "level is 1.0"),
    ],
)
def test_bad_values_are_refused(model, processor, value, options, message):
    with pytest.raises(ValueError, match=message):
        counterfactual_number(model, processor, "A ", value, ["B "], **options)


def test_bad_tables_are_refused(model, processor):
    rows = [{"who": "x", "what": "tea", "score": 3}]
    for interventions, options, message in (
        ({"when": "now"}, {}, "sets 'when'; it can set who, what"),
        ({"score": 4}, {}, "sets 'score'; it can set who, what"),
        ({"id": 9}, {"rows": [rows[0] | {"id": 1}]}, "sets 'id'; it can set who, what"),  # nobody reads it
        (rows * 2, {}, "2 interventions for 1 rows"),
        ({"what": "rum"}, {"reading": Reading("{who} took {what}")}, "no target"),
    ):
        asked = {"rows": rows, "reading": READING} | options
        with pytest.raises(ValueError, match=message):
            counterfactual_numbers(model, processor, interventions=interventions, **asked)
    for score, message in ((None, "row 0: score is empty"), ("much", "row 0: score is 'much', not a number")):
        with pytest.raises(ValueError, match=message):
            counterfactual_numbers(model, processor, [rows[0] | {"score": score}], {}, reading=READING)
    with pytest.raises(ValueError, match="nothing is asked"):
        counterfactual_numbers(model, processor, [], {}, reading=READING)
    with pytest.raises(ValueError, match="intervention 1: the prompt is empty"):
        counterfactual_number(model, processor, "A ", 1.0, [""])


def test_a_model_without_numbers_is_refused(conversion):
    with pytest.raises(AbductionError, match="has not learned to write numbers"):
        counterfactual_number(conversion.model, conversion.processor, "A ", 1.0, ["B "])


# --- the command line


def test_an_observed_number_is_answered_by_numbers(tmp_path, model, processor):
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    asked = ["--observed", " 12.5", "--do", "A nurse earns "]
    words = ["counterfactual", str(tmp_path), "A cook earns ", *asked]
    done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    printed = json.loads(done.stdout)
    expected = counterfactual_number(model, processor, "A cook earns ", 12.5, ["A nurse earns "])
    assert (printed["observed"], printed["noise"], printed["level"]) == (12.5, "kept", 0.9)
    (answer,) = printed["interventions"]
    assert answer["prompt"] == "A nurse earns "
    assert answer["median"] == pytest.approx(expected.median.item(), rel=1e-5)
    shown = CliRunner().invoke(app, [*words, "--noise", "redrawn"], catch_exceptions=False).stdout
    assert "A nurse earns" in shown
    assert "not observed" in shown


@pytest.mark.parametrize(
    ("observed", "number"), [("27", 27.0), (" 1,234.5 ", 1234.5), ("-3e2", -300.0), ("27 years", None)]
)
def test_a_number_on_the_command_line_is_any_that_texts_are_read_for(observed, number):
    assert command_line._number(SimpleNamespace(writes_numbers=True), observed) == number
    assert command_line._number(SimpleNamespace(writes_numbers=False), observed) is None
