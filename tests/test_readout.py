"""What is decided between two tokens: causes, standings, the largest of many values; natively as in torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from causal_qwen.cauchy import Cauchy
from causal_qwen.generation import NativeEngine, ReadOut
from causal_qwen.generation.decisions import _processed
from causal_qwen.generation.native import NativeOutput
from causal_qwen.heads import EXPONENT_BOUND, AbductionNetwork
from causal_qwen.kernels.decision import TokenScorer, keep_largest_
from causal_qwen.kernels.native import NativeAbduction, library
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


@pytest.mark.parametrize("compiler", [True, False])
@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=60), st.integers(1, 70))
def test_the_largest_are_those_of_transformers(compiler, row, k):
    scores = torch.tensor([row, row[::-1]])
    expected = TopKLogitsWarper(k)(None, scores)
    given = scores if compiler else scores.double()  # of which native code has none
    assert torch.equal(keep_largest_(given.clone(), k, -float("inf")).float(), expected)


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
def test_the_standing_is_that_of_the_scores(leading, dtype):
    generator = torch.Generator().manual_seed(0)
    weight, *vectors = torch.randn(100, 35, generator=generator).split([32, 1, 1, 1], dim=1)
    bias, balance, threshold = (vector.squeeze(1) for vector in vectors)
    U = Cauchy(torch.randn(*leading, 32, dtype=dtype), torch.rand(*leading, 32, dtype=dtype) + 0.1)
    U0 = Cauchy(torch.randn(leading, dtype=dtype), torch.rand(leading, dtype=dtype))
    scorer = TokenScorer(weight.contiguous(), bias=bias, balance=balance.abs(), threshold=threshold)
    causes = (U.loc, U.scale, U0.loc, U0.scale)
    loc_S, scale_S = scorer.scores(*causes)
    standing, best = scorer.standing(*causes)
    torch.testing.assert_close(standing, (loc_S - threshold) / scale_S)
    assert best.shape == leading
    assert torch.equal(best, standing.argmax(-1))


def test_both_read_outs_are_the_models_own_heads():
    """Of the model's output, and of the engine's features."""
    model = tiny_causal()
    ids = torch.randint(0, 90, (3, 7))
    with torch.no_grad():
        outputs = model(ids, output_scores=True, output_hidden_states=True)
        native = NativeEngine(model)
        features = NativeOutput(native.engine.hidden(ids)[:, -1])
        expected = model.action.standing(Cauchy(outputs.loc_S, outputs.scale_S))[:, -1]
        for heads, given in ((ReadOut(model), outputs), (native.heads, features)):
            U, U0 = heads.causes(given)
            torch.testing.assert_close(U.loc, outputs.loc_U[:, -1], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(U0.scale, outputs.scale_U0[:, -1], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(heads.number(given).loc, outputs.loc_Y[:, -1], rtol=1e-4, atol=1e-5)
            standing, tokens = heads.standing(model.action.exogenous(U), U0)
            torch.testing.assert_close(standing, expected, rtol=1e-3, atol=1e-4)
            assert torch.equal(tokens, expected.argmax(-1))
            logits = heads.logits(U.loc)
            torch.testing.assert_close(logits, model.token_logits(U.loc), rtol=1e-4, atol=1e-4)
