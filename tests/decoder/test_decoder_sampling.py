"""Every sampler against transformers' logits processor of the same name, exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from causal_qwen.decoder import Sampling
from causal_qwen.decoder.sampling import keep_top_k, keep_top_p, penalise_repetition, tokens_so_far

V = 50
seeds = st.integers(0, 2**32 - 1)


def random_logits(seed, rows=3):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 4


def random_ids(seed, rows=3):
    return torch.randint(V, (rows, 20), generator=torch.Generator().manual_seed(seed))


@given(seeds, st.floats(0.01, 50.0))
@settings(max_examples=30, deadline=None)
def test_temperature(seed, temperature):
    logits = random_logits(seed)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    assert torch.equal(Sampling(temperature=temperature).process(logits), expected)


@given(seeds, st.integers(1, V + 5))
@settings(max_examples=30, deadline=None)
def test_top_k(seed, k):
    logits = random_logits(seed).round()  # rounded: ties at the k-th place
    assert torch.equal(keep_top_k(logits, k), TopKLogitsWarper(k)(None, logits))


@given(seeds, st.floats(1e-6, 1.0))
@settings(max_examples=30, deadline=None)
def test_top_p(seed, p):
    logits = random_logits(seed)
    nucleus = keep_top_p(logits, p)
    assert torch.equal(nucleus, TopPLogitsWarper(p)(None, logits))
    assert nucleus.isfinite().any(dim=-1).all()


@pytest.mark.parametrize(("p", "count"), [(0.5, 2), (0.6, 3), (0.75, 3), (1e-9, 1)])
def test_top_p_where_the_sum_meets_it_exactly(p, count):
    # Four tokens of probability ¼: sums from the small end are exact, and so is the comparison with 1 − p.
    logits = torch.zeros(1, 4)
    assert keep_top_p(logits, p).isfinite().sum() == count
    assert torch.equal(keep_top_p(logits, p), TopPLogitsWarper(p)(None, logits))


@given(seeds, st.floats(0.1, 10.0))
@settings(max_examples=30, deadline=None)
def test_repetition_penalty(seed, penalty):
    logits, ids = random_logits(seed), random_ids(seed)
    past_tokens = tokens_so_far(ids, torch.ones_like(ids), V)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    assert torch.equal(penalise_repetition(logits, past_tokens, penalty), expected)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_past_tokens_only():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0]])
    past_tokens = torch.tensor([[True, True, False, False, True]])
    assert penalise_repetition(logits, past_tokens, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0, 0.0]]


def test_padding_is_no_past_token():
    ids = torch.tensor([[0, 0, 3, 4], [0, 1, 2, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    past_tokens = tokens_so_far(ids, mask, 6)
    assert [row.nonzero().flatten().tolist() for row in past_tokens] == [[3, 4], [0, 1, 2]]


@given(seeds, st.floats(0.05, 3.0), st.integers(1, V), st.floats(0.05, 0.99), st.floats(0.5, 2.0))
@settings(max_examples=30, deadline=None)
def test_the_whole_chain_and_its_draw(seed, temperature, top_k, top_p, penalty):
    logits, ids = random_logits(seed), random_ids(seed)
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(penalty),
            TemperatureLogitsWarper(temperature),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
        ]
    )
    expected = chain(ids, logits)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty)
    past_tokens = tokens_so_far(ids, torch.ones_like(ids), V)
    assert torch.equal(sampling.process(logits, past_tokens), expected)
    theirs = torch.multinomial(
        expected.softmax(-1), 1, generator=torch.Generator().manual_seed(seed)
    ).squeeze(1)
    ours = sampling.choose(logits, past_tokens=past_tokens, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(ours, theirs)


def test_draws_follow_the_softmax():
    # 40,000 draws: each frequency within 5 standard errors (≤ 0.0025) of its probability.
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    rows = logits.expand(40_000, 4)
    drawn = Sampling(temperature=1.0).choose(rows, generator=torch.Generator().manual_seed(0))
    frequencies = drawn.bincount(minlength=4) / len(drawn)
    torch.testing.assert_close(frequencies, logits.softmax(-1)[0], rtol=0, atol=5 * 0.0025)


def test_temperature_0_is_greedy_whatever_top_k_and_top_p_say():
    logits = random_logits(0)
    for sampling in (Sampling(), Sampling(top_k=1), Sampling(top_p=0.1)):
        assert torch.equal(sampling.choose(logits), logits.argmax(-1))
    assert torch.equal(Sampling(temperature=1e-4).choose(logits), logits.argmax(-1))
    assert torch.equal(Sampling(temperature=5.0, top_k=1).choose(logits), logits.argmax(-1))


def test_what_keeps_everything_changes_nothing():
    logits = random_logits(0)
    assert torch.equal(Sampling(temperature=1.0, top_k=0, top_p=1.0).process(logits), logits)
    assert torch.equal(Sampling(temperature=1.0, top_k=V).process(logits), logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
