"""Abduction: the noise that it finds is minimal, has the right law, stays in bounds and replays the text."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import ks_2samp

from causal_qwen import convert
from causal_qwen.cauchy import Cauchy, truncation_bound
from causal_qwen.conversion import Base, bundled_text
from causal_qwen.counterfactual.abduction import AbductionError, abduct
from causal_qwen.counterfactual.evidence import Evidence, NumberEvidence
from causal_qwen.counterfactual.interventions import counterfactual, unprocessed
from causal_qwen.counterfactual.projection import Projection, conditional_draw, interval
from causal_qwen.data import prompt_batch
from causal_qwen.generation import Causes, Decision, ReadOut
from causal_qwen.individual import Individual
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from conftest import tiny_base, tiny_causal, tiny_tokenizer

BOUND = truncation_bound(0.01)


@pytest.fixture(scope="module")
def converted():
    base = Base("tiny", tiny_base(vocab_size=258, tie_word_embeddings=True), tiny_tokenizer())
    return convert(base, calibration_text=bundled_text("heldout"))


def say(conversion, prompt, individual, count, **options):
    """Generated ids of one individual, without processors."""
    model = conversion.model
    inputs = prompt_batch(conversion.processor, [prompt], model.device)
    options = unprocessed(model) | options
    ids = model.generate(
        **inputs, inference_mode="causal", individual=individual, max_new_tokens=count, **options
    )
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_what_the_model_sampled_is_replayed(converted, seed):
    prompt = f"prompt {seed}"
    observed = say(converted, prompt, seed, 16)
    found = abduct(converted.model, converted.processor, prompt, observed, seed=seed, sweeps=2)
    (person,) = found.individuals
    assert say(converted, prompt, person, len(observed)) == observed
    assert person.path.shape == (len(observed), 33)
    assert person.path.dtype == torch.float32
    assert person.path.abs().max() <= BOUND
    assert found.acceptance == 1.0
    assert [diagnosis.token for diagnosis in found.diagnostics] == observed


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_are_replayed_by_each_of_several_draws(converted, seed):
    generator = torch.Generator().manual_seed(seed)
    observed = torch.randint(0, 256, (8,), generator=generator)
    found = abduct(converted.model, converted.processor, "hello", observed, draws=3, seed=seed)
    assert len({person.seed for person in found.individuals}) == 3
    for person in found.individuals:
        assert say(converted, "hello", person, 8) == observed.tolist()
        assert person.path.abs().max() <= BOUND
    assert 1.0 <= found.effective_draws <= 3.0
    assert not torch.equal(found.individuals[0].path, found.individuals[1].path)


def test_an_individual_and_its_world_explain_a_text_together(converted):
    """Replayed as a whole; in another world the individual is kept and the text is not."""
    model, processor = converted.model, converted.processor
    observed = [10, 20, 30, 40]
    found = abduct(model, processor, "hello", observed, draws=2, seed=5, noise="redrawn")
    for person in found.individuals:
        assert say(converted, "hello", Individual.from_json(person.to_json()), 4) == observed
        for path in (person.path, person.world_path):
            assert path.shape == (4, 33)
            assert path.abs().max() <= BOUND
        assert not torch.equal(person.path[:, :-1], person.world_path[:, :-1])
    result = counterfactual(
        model, processor, "hello", ["hello"] * 2, found, max_new_tokens=4, noise="redrawn"
    )
    assert result.factual.token_ids == tuple(observed)
    assert all(torch.equal(b.individual.path, result.individual.path) for b in result.interventions)
    assert not any(branch.identical_to_factual for branch in result.interventions)
    kept = counterfactual(model, processor, "hello", ["hello"], found, max_new_tokens=4)
    assert kept.interventions[0].identical_to_factual


def test_both_noises_have_the_law_of_the_prior_given_the_text(converted):
    """Against rejection: individuals in worlds who say the token first, by their projections on its row."""
    model, processor = converted.model, converted.processor
    inputs = prompt_batch(processor, ["hello"], model.device)
    settings = {"density_floor": 0.01, "persistence": 0.0}
    people = [Individual(seed, world=0) for seed in range(1200)]
    with torch.no_grad():
        outputs = model(**inputs, logits_to_keep=1)
        causes = Causes(*(law[0, -1:].to(torch.float32) for law in (outputs.U, outputs.U0)))
        causes = Causes(*(Cauchy(*(p.expand(1200, *p.shape[1:]) for p in (c.loc, c.scale))) for c in causes))
        decision = Decision(
            "causal", do_sample=True, individuals=people, noise_gain=model.config.noise_gain, **settings
        )
        said = decision.choose(ReadOut(model), causes, inputs["input_ids"].expand(1200, -1), 0, []).tokens
    token = int(said.mode().values)
    direction = model.lm_head.weight[token].detach()
    found = abduct(model, processor, "hello", [token], draws=60, sweeps=4, noise="redrawn")
    for draw, name in ((Individual.noise, "path"), (Individual.world_noise, "world_path")):
        prior = [
            draw(one, 0, 32, **settings)[:-1] @ direction
            for one, y in zip(people, said, strict=True)
            if y == token
        ]
        walk = [getattr(one, name)[0, :-1] @ direction for one in found.individuals]
        assert ks_2samp(np.array(walk), np.array(prior)).pvalue > 1e-3


def test_numbers_and_worlds_are_replayed_together(numeric):
    model, processor = numeric
    found = abduct(model, processor, "It cost 12 or", " 99.9 or", noise="redrawn", seed=2)
    result = counterfactual(
        model, processor, "It cost 12 or", ["It cost 12 or"], found, max_new_tokens=len(found.tokens),
        noise="redrawn",
    )  # fmt: skip
    assert result.factual.token_ids == tuple(found.tokens)
    assert [number.value for number in result.factual.numbers] == pytest.approx([99.9], rel=1e-4)


def test_settings_are_part_of_what_was_abducted(converted):
    settings = {"temperature": 0.5, "noise_gain": 80.0, "density_floor": 0.1}
    found = abduct(converted.model, converted.processor, "hello", [5, 6, 7], **settings)
    assert found.settings == settings
    assert found.individuals[0].path.abs().max() <= truncation_bound(0.1)
    assert say(converted, "hello", found.individuals[0], 3, **settings) == [5, 6, 7]


def test_the_untruncated_law_has_no_bound(converted):
    found = abduct(converted.model, converted.processor, "hello", list(range(40, 60)), density_floor=0.0)
    assert found.individuals[0].path.abs().max() > BOUND
    replayed = say(converted, "hello", found.individuals[0], 20, density_floor=0.0)
    assert replayed == list(range(40, 60))


def test_the_same_seed_finds_the_same_individual(converted):
    paths = [
        abduct(converted.model, converted.processor, "hello", [1, 2], seed=seed).individuals[0].path
        for seed in (3, 3, 4)
    ]
    assert torch.equal(paths[0], paths[1])
    assert not torch.equal(paths[0], paths[2])


def test_the_smallest_noise_of_a_greedy_text_is_none(converted):
    observed = say(converted, "hello", 0, 6, temperature=0.0)
    found = abduct(converted.model, converted.processor, "hello", observed, sweeps=0)
    assert found.individuals[0].path[:, :-1].abs().max() == 0
    assert all(diagnosis.nearest == 0 for diagnosis in found.diagnostics)


def test_a_saved_individual_replays_the_same(converted, tmp_path):
    found = abduct(converted.model, converted.processor, "hello", [10, 20, 30, 40])
    found.individuals[0].save(tmp_path / "individual.json")
    loaded = Individual.load(tmp_path / "individual.json")
    assert torch.equal(loaded.path, found.individuals[0].path)
    assert say(converted, "hello", loaded, 12) == say(converted, "hello", found.individuals[0], 12)
    assert say(converted, "hello", loaded, 12)[:4] == [10, 20, 30, 40]


def test_a_counterfactual_replays_what_was_abducted(converted):
    """Beyond the path noise is drawn, and the null intervention stays the identity."""
    model, processor = converted.model, converted.processor
    found = abduct(model, processor, "hello", [10, 20, 30, 40])
    result = counterfactual(model, processor, "hello", ["hello", "hullo"], found, max_new_tokens=12)
    assert result.factual.token_ids[:4] == (10, 20, 30, 40)
    assert len(result.factual.token_ids) == 12
    assert [branch.identical_to_factual for branch in result.interventions] == [True, False]
    assert not result.control.identical_to_factual


def test_replay_ignores_the_processors_of_the_generation_config(converted):
    model, processor = converted.model, converted.processor
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.top_p = 0.1
    try:
        found = abduct(model, processor, "hello", [10, 10, 10, 10])
        result = counterfactual(model, processor, "hello", [], found, max_new_tokens=4)
    finally:
        model.generation_config.repetition_penalty = model.generation_config.top_p = None
    assert result.factual.token_ids == (10, 10, 10, 10)


@pytest.fixture(scope="module")
def numeric():
    """A model that can say <NUM>, and its processor."""
    tokenizer = convert(
        Base("tiny", tiny_base(tie_word_embeddings=True), tiny_tokenizer()), calibration="none"
    ).tokenizer
    model = tiny_causal(gamma_init=0.5)
    with torch.no_grad():
        model.action.number_noise.fill_(-0.2)
    return model, CausalQwen2Processor(tokenizer, numbers="value")


def test_numbers_are_replayed_with_their_values(numeric):
    model, processor = numeric
    found = abduct(model, processor, "It cost 12 or", " 99.9, -3.5 or 1000000", draws=2)
    number = processor.num_token_id
    assert found.tokens.count(number) == 3
    assert 0 < found.acceptance < 1
    for person in found.individuals:
        assert person.path.abs().max() <= BOUND
        inputs = prompt_batch(processor, ["It cost 12 or"], model.device)
        output = model.generate(
            **inputs,
            **unprocessed(model),
            **found.settings,
            inference_mode="causal",
            individual=person,
            max_new_tokens=len(found.tokens),
            return_dict_in_generate=True,
        )
        start = inputs["input_ids"].shape[1]
        assert output.sequences[0, start:].tolist() == found.tokens
        values = output.numeric_values[0, start:][output.sequences[0, start:] == number]
        assert values.tolist() == pytest.approx([99.9, -3.5, 1e6], rel=1e-4)


def test_what_was_said_has_values_where_prompts_have_digits(numeric):
    model, processor = numeric
    reader = CausalQwen2Processor(processor.tokenizer, numbers="written")
    found = abduct(model, reader, "It cost 12 or ", " 99.9", draws=1)
    assert found.tokens == processor(" 99.9")["input_ids"]
    prompt = prompt_batch(reader, ["It cost 12 or "])
    assert prompt["input_ids"][0].tolist() == processor.tokenizer("It cost 12 or")["input_ids"]
    result = counterfactual(
        model, reader, "It cost 12 or", ["It cost 12 or ", "It cost 13 or"], found, max_new_tokens=2
    )
    assert [branch.identical_to_factual for branch in result.interventions] == [True, False]
    assert [number.value for number in result.factual.numbers] == pytest.approx([99.9], rel=1e-4)


def test_an_observed_number_is_written_as_it_was(numeric):
    """An interval would round it: the factual text is what was observed, and so is the null intervention."""
    model, processor = numeric
    found = abduct(model, processor, "It cost 12 or", " 99.9 euros", draws=1)
    count = len(found.tokens)
    result = counterfactual(model, processor, "It cost 12 or", ["It cost 12 or"], found, max_new_tokens=count)
    assert result.factual.text == result.interventions[0].text == " 99.9 euros"
    with pytest.raises(ValueError, match="give a list"):
        counterfactual(model, processor, "Hello", "Bye", 3)
    with pytest.raises(ValueError, match="give a list"):
        counterfactual(model, processor, "Hello", [{"role": "user", "content": "Bye"}], 3)


def test_a_number_without_read_out_noise_is_refused(numeric):
    model, processor = numeric
    noise = model.action.number_noise.item()
    model.action.number_noise.data.zero_()
    try:
        with pytest.raises(AbductionError, match=r"token 1 .*number 99\.9.*β_Y = 0"):
            abduct(model, processor, "It cost", " 99.9")
    finally:
        model.action.number_noise.data.fill_(noise)


def test_a_token_that_no_cause_chooses_is_refused(converted):
    """<NUM> before training: the mean of the digits' rows with a bias of −20 never exceeds the best digit."""
    with pytest.raises(AbductionError, match=r"token 2 .*<NUM>.*never the largest"):
        abduct(converted.model, converted.processor, "hello", [1, 2, converted.processor.num_token_id])


def test_a_token_beyond_the_truncation_is_refused_with_what_would_reach_it(converted):
    """The temperature that the message names is tried, and reaches it."""
    model, processor = converted.model, converted.processor
    (greedy,) = say(converted, "hello", 0, 1, temperature=0.0)
    other = [(greedy + 100) % 256]
    with pytest.raises(AbductionError, match=r"token 0 .*truncation ends at 9\.95") as caught:
        abduct(model, processor, "hello", other, temperature=0.01)
    assert "density_floor=0" in str(caught.value)
    temperature = float(str(caught.value).rsplit("temperature=", 1)[1])
    assert abduct(model, processor, "hello", other, temperature=temperature, sweeps=0).tokens == other
    assert abduct(model, processor, "hello", other, temperature=0.01, density_floor=0.0).tokens == other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"continuation": []}, "empty"),
        ({"continuation": [1, 257, 2]}, "ends the text"),
        ({"continuation": [999]}, "999 is outside the vocabulary"),
        ({"continuation": [1, 2], "values": [0.0]}, "1 values for 2 tokens"),
        ({"continuation": [1], "temperature": 0.0}, "temperature is 0.0"),
        ({"continuation": [1], "draws": 0}, "draws is 0"),
        ({"continuation": [1], "density_floor": 1.0}, "density_floor is 1.0"),
        ({"continuation": [1], "noise": "lost"}, "noise is 'lost'"),
    ],
)
def test_mistakes_are_named(converted, arguments, message):
    with pytest.raises(ValueError, match=message):
        abduct(converted.model, converted.processor, "hello", **arguments)


def test_a_path_that_rounding_breaks_is_drawn_again_with_a_larger_margin(converted, monkeypatch):
    from causal_qwen.counterfactual import abduction

    verdicts = iter([False, True, True])
    replays = abduction._replays
    monkeypatch.setattr(abduction, "_replays", lambda *given: next(verdicts) and replays(*given))
    found = abduct(converted.model, converted.processor, "hello", [3, 4], draws=2)
    assert found.replayed == pytest.approx(2 / 3)
    monkeypatch.setattr(abduction, "_replays", lambda *given: False)
    with pytest.raises(AbductionError, match="do not replay"):
        abduct(converted.model, converted.processor, "hello", [3, 4], sweeps=0)


# The parts, each against its own oracle.


@pytest.mark.parametrize("bound", [math.inf, 0.6])
def test_the_projection_is_the_quadratic_optimum(bound):
    """Against scipy's SLSQP on 20 random problems whose constraints come in two rounds."""
    draw = np.random.default_rng(0)
    solved = 0
    for _ in range(20):
        rows, floors = draw.normal(size=(12, 6)), draw.uniform(-1, 0.5, size=12)
        box = None if bound == math.inf else [(-bound, bound)] * 6
        reference = minimize(
            lambda x: x @ x / 2,
            np.zeros(6),
            jac=lambda x: x,
            bounds=box,
            constraints={"type": "ineq", "fun": lambda x: rows @ x - floors, "jac": lambda x: rows},  # noqa: B023
            method="SLSQP",
            options={"maxiter": 500, "ftol": 1e-12},
        )
        projection = Projection(6, bound)
        feasible = projection.add(rows[:7], floors[:7]) and projection.add(rows[7:], floors[7:])
        assert feasible == reference.success
        if feasible:
            solved += 1
            np.testing.assert_allclose(projection.point, reference.x, atol=1e-5)
            assert (rows @ projection.point - floors).min() > -1e-7
            assert np.abs(projection.point).max() <= bound + 1e-7
    assert solved >= 5


def test_the_projection_proves_that_there_is_no_point():
    projection = Projection(2, math.inf)
    assert projection.add(np.array([[1.0, 0.0]]), np.array([1.0]))
    assert not projection.add(np.array([[-1.0, 0.0]]), np.array([-0.5]))
    assert not Projection(2, 1.0).add(np.array([[1.0, 1.0]]), np.array([2.5]))
    assert not Projection(2, 1.0).add(np.zeros((1, 2)), np.array([0.1]))


def test_the_interval_is_where_no_gap_is_negative():
    draw = np.random.default_rng(0)
    for _ in range(50):
        slopes, gaps = draw.normal(size=6), draw.uniform(0.1, 2, size=6)
        low, high = interval(slopes, gaps)
        for inside in (low + 1e-9, high - 1e-9, 0.0):
            assert not math.isfinite(inside) or (gaps + inside * slopes).min() >= -1e-8
        for outside in (low - 1e-6, high + 1e-6):
            assert not math.isfinite(outside) or (gaps + outside * slopes).min() < 0
    assert interval(np.ones(1), np.ones(1)) == (-1.0, math.inf)
    assert interval(np.zeros(0), np.zeros(0)) == (-math.inf, math.inf)


def test_the_conditional_draw_is_a_truncated_cauchy():
    """At u it is the u-quantile of the Cauchy between its ends: P(ε ≤ draw) splits the mass u : 1 − u."""
    for low, high in ((-1.0, 2.0), (3.0, 9.0), (-math.inf, 0.5), (-math.inf, math.inf)):
        for uniform in (0.05, 0.5, 0.95):
            drawn, mass = conditional_draw(low, high, uniform)
            assert low <= drawn <= high
            assert mass == pytest.approx((math.atan(high) - math.atan(low)) / math.pi)
            assert math.atan(drawn) - math.atan(low) == pytest.approx(uniform * mass * math.pi)


TOY_WEIGHT = torch.tensor([[1.0, 0.2, -0.3], [-0.5, 0.8, 0.1], [0.3, -0.9, 0.6], [0.9, 0.4, -0.8]])


def toy(number=None, *, size=1):
    """Token 0 of 4 wins at each position, in a three-dimensional cause; it would lose without noise."""
    return Evidence(
        TOY_WEIGHT,
        torch.tensor([0.0, 0.3, 0.1, 0.2]),
        torch.tensor([[-0.2, 0.1, 0.0]]).repeat(size, 1),
        torch.tensor([[0.7, 0.5, 1.1]]).repeat(size, 1),
        torch.zeros(size, dtype=torch.long),
        {} if number is None else dict.fromkeys(range(size), number),
        ["token 0"] * size,
        1.0,
    )


@pytest.mark.parametrize("number", [None, NumberEvidence(np.array([0.6, -1.0, 0.3]), 1.5)])
def test_the_walk_has_the_law_of_the_prior_given_the_token(number):
    """Against rejection: prior draws where token 0 wins, at a number kept with probability 1/(1 + ε_Y²).

    Positions are independent, so that one draw of many positions is many draws.
    """
    evidence = toy(number, size=1000)
    draw = np.random.default_rng(1)
    walk = evidence.walk(1, 8, draw, margin=1e-6, floor=0.05)
    bound = truncation_bound(0.05)
    prior = np.tan(math.atan(bound) * draw.uniform(-1, 1, size=(60_000, 3)))
    causes = evidence.loc[0].numpy() + evidence.gain[0].numpy() * prior
    kept = (causes @ TOY_WEIGHT.numpy().T + evidence.bias.numpy()).argmax(-1) == 0
    if number is not None:
        noise = number.target - prior @ number.row
        kept &= (np.abs(noise) <= bound) & (draw.uniform(size=len(noise)) < 1 / (1 + noise**2))
    (path,) = walk.paths  # (1000, 4)
    assert np.abs(path).max() <= bound
    for coordinate in range(3):
        assert ks_2samp(path[:, coordinate], prior[kept, coordinate]).pvalue > 1e-3
    assert ks_2samp(path[:, :3] @ [1.0, -1.0, 0.5], prior[kept] @ [1.0, -1.0, 0.5]).pvalue > 1e-3
    if number is None:
        assert walk.acceptance == 1.0
    else:
        assert 0.3 < walk.acceptance < 1.0
        np.testing.assert_allclose(path[:, 3], number.target - path[:, :3] @ number.row, atol=1e-4)


def test_the_start_of_the_walk_is_the_smallest_noise():
    """Against SLSQP on the toy; the margin of 1e-6 is below the tolerance."""
    evidence = toy()
    walk = evidence.walk(1, 0, np.random.default_rng(0), margin=1e-6, floor=0.01)
    weight, bias = TOY_WEIGHT.double().numpy(), evidence.bias.double().numpy()
    loc, gain = evidence.loc.double().numpy()[0], evidence.gain.double().numpy()[0]

    def gaps(x):
        scores = weight @ (loc + gain * x) + bias
        return scores[0] - scores[1:]

    reference = minimize(
        lambda x: x @ x, np.zeros(3), constraints={"type": "ineq", "fun": gaps}, method="SLSQP"
    )
    np.testing.assert_allclose(walk.paths[0][0, :3], reference.x, atol=1e-3)


@pytest.mark.slow
def test_texts_are_replayed_by_the_embedded_base(calibrated_once):
    conversion = convert("smollm2")
    observed = say(conversion, "The reason why the sea is salty is that", 1, 8)
    texts = [
        ("The reason why the sea is salty is that", observed),
        ("The weather today is", " cold and windy."),
    ]
    for prompt, text in texts:
        found = abduct(conversion.model, conversion.processor, prompt, text, sweeps=1)
        assert say(conversion, prompt, found.individuals[0], len(found.tokens)) == found.tokens
        assert found.individuals[0].path.abs().max() <= BOUND
