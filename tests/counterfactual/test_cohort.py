"""Sets of individuals: each scheme is fair, repeatable and does what it says."""

import numpy as np
import pytest
import scipy.stats
import torch

from causal_qwen import Inferencer, convert, individuals
from causal_qwen.conversion import Base, bundled_text
from causal_qwen.counterfactual import cohort
from causal_qwen.counterfactual.cohort import POOL, by_first_token, stratified
from causal_qwen.data import prompt_batch
from conftest import tiny_base, tiny_tokenizer


@pytest.fixture(scope="module")
def converted():
    base = Base("tiny", tiny_base(vocab_size=258, tie_word_embeddings=True), tiny_tokenizer())
    return convert(base, calibration_text=bundled_text("heldout"))


@pytest.fixture(scope="module")
def asked(converted):
    return {"model": converted.model, "processor": converted.processor, "prompt": "hello"}


def first_tokens(converted, people, **options):
    """What each of them says first, by the decision itself."""
    batch = prompt_batch(converted.processor, ["hello"] * len(people))
    inferencer = Inferencer(converted.model, "causal", individual=people, **options)
    return inferencer.infer(batch["input_ids"], attention_mask=batch["attention_mask"]).tokens.tolist()


def described(people):
    return [person.to_json() for person in people]


def test_independent_individuals_follow_the_seed():
    people = individuals(4, seed=2**64 - 2, persistence=0.5)
    assert [person.seed for person in people] == [2**64 - 2, 2**64 - 1, 0, 1]
    assert {person.persistence for person in people} == {0.5}


@pytest.mark.parametrize("count", [1, 4, 5])
def test_antithetic_individuals_are_pairs_of_mirror_images(count):
    people = individuals(count, "antithetic", seed=7)
    assert [person.seed for person in people] == [7, 7, 8, 8, 9][:count]
    assert [person.mirrored for person in people] == [False, True, False, True, False][:count]


def test_a_stratified_choice_has_one_of_each_part_and_everybody_is_equally_likely():
    order = list(np.random.default_rng(1).permutation(60))
    chosen = [stratified(order, 12, seed) for seed in range(2000)]
    for group in chosen[:50]:
        assert sorted(order.index(one) // 5 for one in group) == list(range(12))
    counts = np.bincount(np.concatenate(chosen), minlength=60)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    firsts = np.bincount([group[0] for group in chosen], minlength=60)  # whoever comes first is anybody, too
    assert scipy.stats.chisquare(firsts).pvalue > 1e-3


def test_a_pool_is_ordered_by_what_its_members_say_first(converted, monkeypatch):
    monkeypatch.setattr(cohort, "TOKENS", 10**6)  # all of them
    people = individuals(96, seed=5)
    settings = {"density_floor": 0.01, "persistence": converted.model.config.persistence}
    noise = torch.stack([person.noise(0, 32, **settings)[:-1] for person in people])
    outputs = converted.model(**prompt_batch(converted.processor, ["hello"]), logits_to_keep=1)
    order = by_first_token(converted.model, outputs.U[0, -1:], noise, gain=converted.model.config.noise_gain)
    assert sorted(order) == list(range(96))
    said = first_tokens(converted, people)
    tokens = [said[index] for index in order]
    blocks = [token for before, token in zip([None, *tokens], tokens, strict=False) if token != before]
    assert len(blocks) == len(set(tokens)) > 3, "each token is one block"
    logits = outputs.logits[0, -1][blocks]
    assert (logits.diff() <= 1e-4).all(), "likely ones first"


def test_a_stratified_set_says_first_tokens_as_often_as_they_are_likely(converted, asked):
    """The share of the commonest token varies far less from set to set than by chance, around the same."""
    crowd = first_tokens(converted, individuals(600, seed=10**6))
    token = max(set(crowd), key=crowd.count)
    share = crowd.count(token) / len(crowd)
    sets = [individuals(8, "stratified", seed=10_000 * index, **asked) for index in range(25)]
    shares = np.array([np.mean([said == token for said in first_tokens(converted, one)]) for one in sets])
    assert abs(shares.mean() - share) < 0.07
    assert shares.var() < 0.4 * share * (1 - share) / 8


def test_the_same_arguments_give_the_same_set(asked):
    one, same, other = (individuals(6, "stratified", seed=seed, **asked) for seed in (3, 3, 4))
    assert described(one) == described(same) != described(other)
    assert len(set(described(one))) == 6
    assert all(3 <= person.seed < 3 + 6 * POOL for person in one)
    colder = individuals(6, "stratified", seed=3, temperature=0.2, **asked)
    assert described(colder) != described(one)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count is 0"),
        ({"count": 2, "scheme": "lucky"}, "scheme is 'lucky'; choose one of independent"),
        ({"count": 2, "scheme": "stratified"}, "pass model=, processor= and prompt="),
        ({"count": 2, "seed": -1}, "seed is -1"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        individuals(**arguments)
