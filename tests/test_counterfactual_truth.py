"""What the benchmark of counterfactuals rests on: its truth, noise that explains, features as read."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from causal_qwen.conversion import load_model
from conftest import tiny_base, tiny_tokenizer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def as_the_scripts_run(monkeypatch, one_thread):
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_the_two_incomes_of_a_person_share_their_noise():
    structural = importlib.import_module("structural")
    persons = structural.people(200, seed=1)
    medians = np.array([person.medians() for person in persons])
    worlds = {
        noise: structural.incomes(persons, noise, np.random.default_rng(2)) for noise in structural.NOISES
    }
    effects = medians[:, 1] - medians[:, 0]
    assert np.allclose(np.diff(worlds["additive"])[:, 0], effects, atol=1)  # whole units
    ratios = worlds["multiplicative"] / medians
    assert np.allclose(ratios[:, 0], ratios[:, 1], atol=1e-3)
    for values in worlds.values():
        ranks = np.argsort(np.argsort(values - medians, axis=0), axis=0)
        if values is not worlds["multiplicative"]:
            assert np.abs(ranks[:, 0] - ranks[:, 1]).max() <= 2  # ties by rounding
    assert len({str(person) for person in persons}) > 190


def test_choices_are_a_coins_or_depend_on_what_sentences_say():
    structural = importlib.import_module("structural")
    persons = structural.people(3000, seed=1)
    ages = np.array([person.age for person in persons])
    for confounded, apart in ((False, 0.0), (True, -6.5)):
        draw = np.random.default_rng(0)
        chosen = structural.choices(persons, draw, confounded=confounded).astype(bool)
        assert ages[chosen].mean() - ages[~chosen].mean() == pytest.approx(apart, abs=2)
        assert 0.4 < chosen.mean() < 0.6


def test_abducted_gumbel_noise_makes_the_observed_win_and_is_gumbel():
    replay = importlib.import_module("replay")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 7, generator=generator, dtype=torch.float64).expand(20_000, 7)
    winners = torch.multinomial(logits[0].softmax(-1), 20_000, replacement=True, generator=generator)
    noise = replay.gumbel_given(logits, winners, generator)
    assert ((logits + noise).argmax(-1) == winners).all()
    for prob in (0.1, 0.5, 0.9):  # over whoever wins, the noise is what it was before
        expected = -np.log(-np.log(prob))
        assert np.abs(np.quantile(noise.numpy(), prob, axis=0) - expected).max() < 0.06


def test_sentences_are_read_once_for_both_worlds_and_as_one_text(tmp_path):
    tiny_base(hidden_size=64, intermediate_size=128, tie_word_embeddings=True).save_pretrained(
        tmp_path / "base"
    )
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    worlds = importlib.import_module("worlds")
    sentences, clauses = ["A short one.", "And a longer one, of 12 words."], (" Not so. It is", " So it is")
    file = tmp_path / "features" / "kept.npz"
    found, errors = worlds.both_worlds(str(tmp_path / "base"), sentences, clauses, file)
    model, processor = load_model(str(tmp_path / "base"))
    for index, sentence in enumerate(sentences):
        for world, clause in enumerate(clauses):
            ids = processor.tokenizer(sentence + clause, return_tensors="pt", add_special_tokens=False)
            with torch.no_grad():
                whole = model(input_ids=ids["input_ids"], logits_to_keep=1).loc_U[0, 0]
            torch.testing.assert_close(found[index, world], whole, rtol=1e-4, atol=1e-4)
    kept = worlds.both_worlds("nothing", sentences, clauses, file)
    assert torch.equal(kept.loc_U, found)
    assert torch.equal(kept.errors, errors)
    assert (torch.linalg.eigvalsh(kept.rounding.moment) > -1e-9).all()
    assert kept.rounding.moment.diagonal().min() > 0
    assert 0 < kept.rounding.variance <= kept.rounding.moment.diagonal().mean()


def test_heads_and_spaces_are_chosen_by_factual_rows(monkeypatch):
    worlds = importlib.import_module("worlds")
    monkeypatch.setattr(worlds, "STRENGTHS", (1e-4,))
    monkeypatch.setattr(worlds, "CHOOSING_FOLDS", 3)
    monkeypatch.setattr(worlds, "FOLDS", 3)
    generator = torch.Generator().manual_seed(0)
    loc_U = torch.randn(300, 2, 4, generator=generator)
    world = torch.randint(0, 2, (300,), generator=generator).numpy()
    slopes = torch.tensor([[3.0, 0, 0, 0], [0, 0, 3.0, 0]])  # another in each world
    noise = torch.randn(300, 1, generator=generator)
    outcomes = ((loc_U * slopes).sum(-1) + 50 + noise).double().numpy()  # (N, 2)
    rows = np.arange(300)
    fit = worlds.solve(loc_U, world, outcomes[rows, world])
    assert fit.name == "linear, two heads"
    answer = fit.otherwise(loc_U, world, outcomes[rows, world])
    errors = np.abs(answer.median.numpy() - outcomes[rows, 1 - world])
    assert np.median(errors) < 0.4 * np.median(np.abs(answer.prediction.numpy() - outcomes[rows, 1 - world]))
    one = worlds.solve(loc_U[:, :1].expand(-1, 2, -1), world, outcomes[:, 0])
    assert one.name == "linear, one head"
