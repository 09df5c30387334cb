"""What is decided between two tokens: causes, z-scores, the largest of many values; natively as in torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from causal_qwen.cauchy import Cauchy
from causal_qwen.decoder import Engine
from causal_qwen.decoder.packed import quantise
from causal_qwen.generation import NativeStepper, ReadOut, TransformersStepper
from causal_qwen.generation.decisions import _processed
from causal_qwen.heads import EXPONENT_BOUND, AbductionNetwork
from causal_qwen.kernels.decision import FEW_OF, TokenScorer
from causal_qwen.kernels.library import library
from causal_qwen.kernels.native import NativeAbduction
from causal_qwen.kernels.products import Linear, Matrix
from conftest import tiny_causal


@pytest.fixture(autouse=True, scope="module")
def _native():
    """Without a compiler these tests would compare torch with itself."""
    assert library() is not None


ODD = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1.5, 1.5]
values = st.lists(st.floats(width=32) | st.sampled_from(ODD), min_size=1, max_size=40)


@pytest.mark.parametrize("activation", ["exp", "softplus", "abs"])
@pytest.mark.parametrize("batch", [1, 3, 49])
def test_native_abduction_is_the_network(activation, batch):
    torch.manual_seed(0)
    network = AbductionNetwork(24, 40, scale_activation=activation)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=3.0)
        network.scale.bias[:3] = torch.tensor([200.0, -200.0, 0.0])  # beyond the bounds of a scale
    features = torch.randn(batch, 2, 24)[:, -1]  # rows apart
    abduce = NativeAbduction(*network.stacked(), activation, EXPONENT_BOUND)
    loc_U, scale_U, loc_U0 = abduce(features)
    with torch.no_grad():
        U, U0 = network(features)
    torch.testing.assert_close(loc_U, U.loc, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scale_U, U.scale, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loc_U0, U0.loc, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match=r"of shape \(2, 24\)"):
        abduce(torch.randn(2, 25))


@settings(max_examples=300, deadline=None)
@given(values)
def test_the_argmax_is_that_of_torch(row):
    """Ties go to the first, and what is not a number counts as the largest."""
    weight = torch.tensor(row).unsqueeze(-1)
    y, best = Linear(Matrix(weight), torch.zeros(len(row))).best(torch.ones(1, 1))
    torch.testing.assert_close(y, weight.T, equal_nan=True)
    assert best.item() == y.argmax(-1).item()


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "bytes", "bytes with a shift"])
@pytest.mark.parametrize("by_z_score", [True, False])
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 200 // FEW_OF), st.booleans())
def test_the_choice_among_the_largest_is_that_of_transformers(by_z_score, form, batch, k, ties):
    generator = torch.Generator().manual_seed(k)
    weight = torch.randn(200, 64, generator=generator)
    weight = weight + 2 if form == "bytes with a shift" else weight
    matrix = quantise(weight) if "bytes" in form else Matrix(weight.to(getattr(torch, form)))
    loc, scale, logits = (torch.rand(batch, size, generator=generator) for size in (64, 64, 200))
    logits = (logits * 9).round() if ties else logits
    U0 = Cauchy(torch.rand(batch), torch.rand(batch))
    threshold = torch.randn(200, generator=generator)
    scorer = TokenScorer(matrix, bias=threshold + 1, balance=threshold.abs(), threshold=threshold)
    assert scorer.reads_few(loc, k)
    if by_z_score:
        everywhere, _ = scorer.z_scores(loc, scale, U0.loc, U0.scale)
        scores, best = scorer.among(logits, k, loc, scale, U0.loc, U0.scale)
    else:
        everywhere = Linear(matrix, threshold + 1)(loc)
        scores, best = scorer.among(logits, k, loc)
    removed = TopKLogitsWarper(k, filter_value=torch.nan)(None, logits).isnan()
    expected = everywhere.masked_fill(removed, -torch.inf)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(best, scores.argmax(-1))


def test_processors_give_what_their_list_gives():
    logits = torch.randn(3, 200)
    before = logits.clone()
    processors = LogitsProcessorList(
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20, filter_value=-1e4), TopPLogitsWarper(0.9)]
    )
    ids = torch.zeros(3, 1, dtype=torch.long)
    assert torch.equal(_processed(processors, ids, logits), processors(ids, logits.clone()))
    assert torch.equal(logits, before)
    assert _processed(LogitsProcessorList(), ids, logits) is logits


@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 5), (50,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_z_scores_are_those_of_the_scores(leading, dtype):
    generator = torch.Generator().manual_seed(0)
    weight, *vectors = torch.randn(100, 35, generator=generator).split([32, 1, 1, 1], dim=1)
    bias, balance, threshold = (vector.squeeze(1) for vector in vectors)
    U = Cauchy(torch.randn(*leading, 32, dtype=dtype), torch.rand(*leading, 32, dtype=dtype) + 0.1)
    U0 = Cauchy(torch.randn(leading, dtype=dtype), torch.rand(leading, dtype=dtype))
    scorer = TokenScorer(weight.contiguous(), bias=bias, balance=balance.abs(), threshold=threshold)
    causes = (U.loc, U.scale, U0.loc, U0.scale)
    loc_S, scale_S = scorer.scores(*causes)
    z_scores, best = scorer.z_scores(*causes)
    torch.testing.assert_close(z_scores, (loc_S - threshold) / scale_S)
    assert best.shape == leading
    assert torch.equal(best, z_scores.argmax(-1))


def test_both_steppers_are_the_models_own_heads():
    """One forward pass without a cache is the oracle of prefill and steps."""
    model = tiny_causal()
    ids = torch.randint(0, 90, (3, 7))
    with torch.no_grad():
        outputs = model(ids, output_scores=True)
    expected = model.action.z_scores(outputs.S[:, -1])
    steppers = (
        TransformersStepper(model),
        NativeStepper(model, Engine.from_model(model), None, max_length=8),
    )
    for stepper in steppers:
        with torch.no_grad():
            stepper.prefill(ids[:, :-1], None)
            U, U0 = stepper.step(ids[:, -1], None)
        torch.testing.assert_close(U.loc, outputs.loc_U[:, -1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(U0.scale, outputs.scale_U0[:, -1], rtol=1e-4, atol=1e-5)
        readout = stepper.readout
        torch.testing.assert_close(readout.number(U).loc, outputs.loc_Y[:, -1], rtol=1e-4, atol=1e-5)
        z_scores, tokens = readout.z_scores(model.action.exogenous(U), U0)
        torch.testing.assert_close(z_scores, expected, rtol=1e-3, atol=1e-4)
        assert torch.equal(tokens, expected.argmax(-1))
        torch.testing.assert_close(readout.logits(U.loc), model.token_logits(U.loc), rtol=1e-4, atol=1e-4)


def test_one_prompt_of_many_rows_is_read_once(monkeypatch):
    """With its numbers and its padding; what follows belongs to each row."""
    model, ids = tiny_causal(), torch.randint(0, 90, (1, 7)).repeat(4, 1)
    ids[:, 3], values, mask = 258, torch.zeros(4, 7, dtype=torch.float64), torch.ones(4, 7, dtype=torch.long)
    values[:, 3], mask[:, 0] = 12.5, 0
    tokens, engine = torch.tensor([[5], [6], [7], [8]]), Engine.from_model(model)
    read, hidden = [], engine.hidden
    monkeypatch.setattr(
        engine, "hidden", lambda *given, **more: read.append(tuple(given[0].shape)) or hidden(*given, **more)
    )
    stepper = NativeStepper(model, engine, mask, max_length=9)
    with torch.no_grad():
        first = stepper.prefill(ids, values)
        second = stepper.step(tokens[:, 0], torch.zeros(4, dtype=torch.float64))
        whole = {"attention_mask": torch.nn.functional.pad(mask, (0, 1), value=1)}
        whole |= {"numeric_values": torch.nn.functional.pad(values, (0, 1))}
        outputs = model(torch.cat([ids, tokens], dim=1), **whole)
    assert read == [(1, 7), (4, 1)]
    for causes, position in ((first, -2), (second, -1)):
        torch.testing.assert_close(causes.U.loc, outputs.loc_U[:, position], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(causes.U0.loc, outputs.loc_U0[:, position], rtol=1e-4, atol=1e-5)


def test_rows_that_have_ended_are_passed_over_and_change_nothing(monkeypatch):
    """Left padding, a number on the way, and one row after another that ends: bit for bit."""
    model, generator = tiny_causal(), torch.Generator().manual_seed(4)
    ids = torch.randint(0, 90, (5, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    engine = Engine.from_model(model)
    if not engine.reads_some(1):
        pytest.skip("there is no compiler for native code here")
    read, step = [], engine.step
    monkeypatch.setattr(
        engine, "step", lambda x, *given: read.append(len(x)) or step(x, *given), raising=True
    )
    whole, some = (NativeStepper(model, engine, mask, max_length=16) for _ in range(2))
    ended = torch.zeros(5, dtype=torch.bool)
    with torch.no_grad():
        for stepper in (whole, some):
            stepper.prefill(ids, None)
        read.clear()
        for ends in (None, 3, None, 0, 1, None, 4):
            if ends is not None:
                ended[ends] = True
            tokens = torch.randint(0, 90, (5,), generator=generator)
            tokens[2], values = 258, torch.tensor([0, 0, 7.5, 0, 0], dtype=torch.float64)
            expected, found = whole.step(tokens, values), some.step(tokens, values, ended)
            for law, own in zip(expected, found, strict=True):
                assert torch.equal(law.loc[~ended], own.loc[~ended])
                assert torch.equal(law.scale[~ended], own.scale[~ended])
                assert law.loc.shape == own.loc.shape
    assert read[1::2] == [5, 4, 4, 3, 2, 2, 1]


@pytest.mark.parametrize(
    "mode", [{"inference_mode": "standard", "do_sample": True}, {"inference_mode": "causal"}]
)
def test_choosing_among_k_tokens_is_processing_all_of_them(mode, monkeypatch):
    model, ids = tiny_causal(), torch.randint(0, 90, (3, 7))
    options = {"individual": [3, 4, 5], "top_k": 9, "max_new_tokens": 12, "output_scores": True} | mode
    options |= {"return_dict_in_generate": True}
    read = []
    among = ReadOut.among
    monkeypatch.setattr(ReadOut, "among", lambda *given: read.append(given[1]) or among(*given))
    fast = model.generate(ids, **options)
    assert set(read) == {9}
    monkeypatch.setattr(TokenScorer, "reads_few", lambda *given: False)
    slow = model.generate(ids, **options)
    assert torch.equal(fast.sequences, slow.sequences)
    for few, all_of_them in zip(fast.scores, slow.scores, strict=True):
        torch.testing.assert_close(few, all_of_them, rtol=1e-4, atol=1e-4)
        assert (few > -torch.inf).sum(-1).tolist() == [9, 9, 9]
