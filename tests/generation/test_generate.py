"""generate(): what each mode decides, by whom, and that nothing but the individual and the prompt matters."""

import dataclasses
import math

import pytest
import scipy.stats
import torch
from transformers import GenerationConfig, LogitsProcessor, TextStreamer

from causal_qwen import CausalGenerateOutput, CausalQwen2Processor, Individual, NumberStreamer, convert
from causal_qwen.cauchy import Cauchy, truncation_bound
from causal_qwen.conversion import Base, bundled_text
from causal_qwen.conversion.vocabulary import choose_num_token
from causal_qwen.generation import Causes, Decision, ReadOut
from causal_qwen.individual import one_per_row
from conftest import tiny_base, tiny_causal, tiny_tokenizer

NEW = 20


@pytest.fixture(scope="module")
def base():
    return Base("tiny", tiny_base(vocab_size=258, tie_word_embeddings=True), tiny_tokenizer())


@pytest.fixture(scope="module")
def model(base):
    """A fresh conversion with an added <NUM> row: what a user has on day one."""
    return convert(base, calibration_text=bundled_text("heldout")).model


@pytest.fixture(scope="module")
def speaker():
    """A model that writes numbers: <NUM> competes, and every parameter carries signal."""
    model = tiny_causal(value_center=2.0, value_spread=0.7)
    with torch.no_grad():
        model.action.bias[258] = 3.0
        model.action.number_noise.fill_(0.3)
    return model


@pytest.fixture(scope="module")
def prompts():
    """Five uneven prompts, padded on the left."""
    encoded = tiny_tokenizer()(
        ["a", "The sea", "1 2 3 4 5", "x = (", "Once upon a time there"],
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def causal(model, prompts, individual, **options):
    return model.generate(
        **prompts, inference_mode="causal", individual=individual, max_new_tokens=NEW, **options
    )


# --- compatible, and standard on day one
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "min_p": 0.05, "num_return_sequences": 2},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_beams": 2},
        {"do_sample": False, "repetition_penalty": 1.5},
        {"do_sample": False, "no_repeat_ngram_size": 2, "bad_words_ids": [[65]]},
        {"do_sample": False, "cache_implementation": "static"},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "eos_token_id": [30, 31, 32, 33, 34]},
        {"do_sample": False, "stop_strings": ["e", "q"]},
    ],
    ids=str,
)
def test_compatible_is_token_identical_to_the_base(base, model, prompts, options):
    tokenizer = {"tokenizer": base.tokenizer} if "stop_strings" in options else {}
    torch.manual_seed(0)
    expected = base.model.generate(**prompts, max_new_tokens=NEW, **options, **tokenizer)
    torch.manual_seed(0)
    actual = model.generate(
        **prompts, max_new_tokens=NEW, inference_mode="compatible", **options, **tokenizer
    )
    assert torch.equal(actual, expected)


def test_compatible_with_prompt_lookup(base, model, prompts):
    ids = prompts["input_ids"][-1:]
    expected = base.model.generate(ids, max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=3)
    actual = model.generate(
        ids, max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=3, inference_mode="compatible"
    )
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.3}, {"cache_implementation": "static"}], ids=str
)
def test_standard_without_sampling_is_the_bases_greedy_on_day_one(base, model, prompts, options):
    expected = base.model.generate(**prompts, max_new_tokens=NEW, do_sample=False, **options)
    assert torch.equal(model.generate(**prompts, max_new_tokens=NEW, do_sample=False, **options), expected)
    assert model.config.inference_mode == "standard"


def test_ovr_normalisation_draws_from_the_one_vs_rest_probabilities(speaker, ids):
    outputs = speaker.generate(
        ids[:1], max_new_tokens=1, inference_mode="compatible", normalisation="ovr", do_sample=True, top_k=0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    laws = speaker(ids[:1], output_scores=True)
    prob = Cauchy(laws.loc_S[0, -1], laws.scale_S[0, -1]).sf(speaker.action.threshold)
    torch.testing.assert_close(outputs.scores[0][0].softmax(-1), prob / prob.sum(), rtol=1e-4, atol=1e-7)


# --- laws
# -----------------------------------------------------------------------------------------------------------


def decide(model, ids, seeds, **settings):
    """One position, decided for the same state by many individuals, or their seeds."""
    outputs = model(ids[:1].expand(len(seeds), -1), logits_to_keep=1)
    decision = Decision(**settings, individuals=one_per_row(list(seeds), len(seeds)))
    causes = Causes(outputs.U[:, -1], outputs.U0[:, -1])
    return outputs, decision.choose(ReadOut(model), causes, ids[:1].expand(len(seeds), -1), 0, [])


@pytest.mark.parametrize("rho", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_causal_scores_follow_the_stated_law(speaker, ids, rho, temperature):
    """W u + b with u = loc_U + T·κ·(scale_U + |b_noise|)·ε is Cauchy(logit, T·κ·|W|(scale_U + |b_noise|))."""
    settings = {"mode": "causal", "do_sample": True, "density_floor": 0.0, "persistence": rho}
    with torch.no_grad():
        outputs, choice = decide(
            speaker, ids, range(2000), **settings, temperature=temperature, noise_gain=3.0
        )
        scale = speaker.lm_head.weight.abs() @ (outputs.scale_U[0, 0] + speaker.action.b_noise.abs())
    for token in (0, 77, 258):
        law = scipy.stats.cauchy(outputs.logits[0, 0, token].item(), 3.0 * temperature * scale[token].item())
        assert scipy.stats.kstest(choice.scores[:, token].numpy(), law.cdf).pvalue > 1e-3


def test_causal_numbers_have_the_quantiles_that_standard_reports(speaker, ids):
    """κ = 1 and β_Y·ε_Y: the drawn number is Cauchy(loc_Y, scale_Y) in value space, whatever κ words have."""
    settings = {"mode": "causal", "do_sample": True, "density_floor": 0.0}
    with torch.no_grad():
        outputs, choice = decide(speaker, ids, range(3000), **settings, noise_gain=50.0)
    y = speaker.value_space.encode(choice.values)
    law = scipy.stats.cauchy(outputs.loc_Y[0, 0].item(), outputs.scale_Y[0, 0].item())
    assert scipy.stats.kstest(y.numpy(), law.cdf).pvalue > 1e-3
    inside = ((choice.values >= choice.lower) & (choice.values <= choice.upper)).double().mean().item()
    assert inside == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_a_redrawn_individual_has_the_law_of_the_one_that_is_kept(speaker, ids, rho):
    """scale_U·ε + |b_noise|·ε' ~ Cauchy(scale_U + |b_noise|): scores and numbers are equal in law, not in
    value.
    """
    settings = {"mode": "causal", "do_sample": True, "density_floor": 0.0, "persistence": rho}
    with torch.no_grad():
        speaker_noise = speaker.action.b_noise.abs()
        kept, redrawn = (
            decide(speaker, ids, people, **settings, noise_gain=3.0)
            for people in (range(600), [Individual(seed, world=0) for seed in range(600)])
        )
        scale = speaker.lm_head.weight.abs() @ (kept[0].scale_U[0, 0] + speaker_noise)
    for token in (0, 77, 258):
        law = scipy.stats.cauchy(kept[0].logits[0, 0, token].item(), 3.0 * scale[token].item())
        assert scipy.stats.kstest(redrawn[1].scores[:, token].numpy(), law.cdf).pvalue > 1e-3
    assert not redrawn[1].scores[:, 77].eq(kept[1].scores[:, 77]).any()
    law = scipy.stats.cauchy(kept[0].loc_Y[0, 0].item(), kept[0].scale_Y[0, 0].item())
    y = speaker.value_space.encode(redrawn[1].values)
    assert scipy.stats.kstest(y.numpy(), law.cdf).pvalue > 1e-3


def test_given_the_individual_only_the_exogenous_noise_is_redrawn(speaker, ids):
    """Over the worlds of one individual: Cauchy(W(loc_U + κ·scale_U·ε) + b, κ·|W||b_noise|), and a number
    around w·(loc_U + scale_U·ε) + b_Y with scale |w||b_noise| + |β_Y|.
    """
    settings = {"mode": "causal", "do_sample": True, "density_floor": 0.0, "persistence": 0.2}
    person = Individual(5)
    with torch.no_grad():
        outputs, choice = decide(
            speaker, ids, [person.redrawn(world) for world in range(600)], **settings, noise_gain=3.0
        )
        action, W = speaker.action, speaker.lm_head.weight
        epsilon = person.noise(0, W.shape[1], density_floor=0.0, persistence=0.2)[:-1]
        own = outputs.scale_U[0, 0] * epsilon  # (D,)
        loc = W @ (outputs.loc_U[0, 0] + 3.0 * own) + action.bias
        scale = 3.0 * W.abs() @ action.b_noise.abs()
        number = action.numbers(Cauchy(outputs.loc_U[0, 0] + own, action.b_noise.abs()))
    for token in (0, 77, 258):
        law = scipy.stats.cauchy(loc[token].item(), scale[token].item())
        assert scipy.stats.kstest(choice.scores[:, token].numpy(), law.cdf).pvalue > 1e-3
    law = scipy.stats.cauchy(number.loc.item(), number.scale.item())
    assert scipy.stats.kstest(speaker.value_space.encode(choice.values).numpy(), law.cdf).pvalue > 1e-3


def test_rows_outside_of_worlds_do_not_notice_their_neighbours(speaker, ids):
    """Bit for bit, and a mirrored individual moves its cause to the other side."""
    settings = {"mode": "causal", "do_sample": True}
    with torch.no_grad():
        alone = decide(speaker, ids, [3, 4], **settings)[1].scores
        outputs, mixed = decide(
            speaker, ids, [Individual(3), Individual(4, world=1), Individual(3).antithetic()], **settings
        )
    assert torch.equal(mixed.scores[0], alone[0])
    assert not mixed.scores[1].eq(alone[1]).all()
    logits = outputs.logits[0, 0]
    torch.testing.assert_close(mixed.scores[2] - logits, logits - mixed.scores[0], rtol=1e-3, atol=1e-4)


def test_in_standard_mode_it_is_the_world_that_moves_the_location(speaker, ids):
    """The individual's own part stays a law there, so nothing else of the noise is used."""
    people = [Individual(3), Individual(3, world=0), Individual(4, world=0)]
    with torch.no_grad():
        _, choice = decide(speaker, ids, people, mode="standard", do_sample=True)
    assert not choice.scores[0].eq(choice.scores[1]).all()
    same = dataclasses.replace(people[1], path=torch.zeros(1, speaker.config.causal_size + 1))
    with torch.no_grad():
        _, other = decide(speaker, ids, [same] * 3, mode="standard", do_sample=True)
    assert torch.equal(other.scores[1], choice.scores[1])


@pytest.mark.parametrize("floor", [0.01, 0.5])
def test_truncated_causes_stay_within_the_bound(speaker, ids, floor):
    with torch.no_grad():
        outputs, choice = decide(speaker, ids, range(300), mode="causal", do_sample=True, density_floor=floor)
        noise = outputs.scale_U[0, 0] + speaker.action.b_noise.abs()
        reach = truncation_bound(floor) * (speaker.lm_head.weight.abs() @ noise)
    assert ((choice.scores - outputs.logits[:, 0]).abs() <= reach * (1 + 1e-4) + 1e-4).all()


def test_standard_sampling_moves_the_location_linearly_in_temperature(speaker, ids):
    def standing(temperature):
        with torch.no_grad():
            return decide(
                speaker, ids, [7], mode="standard", do_sample=True, temperature=temperature, noise_gain=2.0
            )[1].scores

    with torch.no_grad():
        outputs = speaker(ids[:1], logits_to_keep=1)
        U = Cauchy(outputs.loc_U[:, 0], outputs.scale_U[:, 0])
        S = speaker.action.scores(
            U, Cauchy(outputs.loc_U0[:, 0], outputs.scale_U0[:, 0]), speaker.lm_head.weight
        )
        still = speaker.action.z_scores(S)
    torch.testing.assert_close(standing(0.0), still, rtol=1e-4, atol=1e-5)
    move = standing(1.0) - still
    assert move.abs().max() > 1e-3
    torch.testing.assert_close(standing(2.0) - still, 2 * move, rtol=1e-3, atol=1e-4)


def test_temperature_is_inert_without_sampling_and_zero_is_noise_free(model, speaker, prompts):
    for one in (model, speaker):
        greedy = one.generate(**prompts, max_new_tokens=NEW, do_sample=False)
        # transformers warns that a temperature without sampling does nothing, which is the point here
        config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=257, eos_token_id=257)
        config.temperature = 5.0
        assert torch.equal(one.generate(**prompts, generation_config=config), greedy)
    cold = [
        model.generate(**prompts, max_new_tokens=NEW, temperature=0.0, individual=3, top_k=0, **mode)
        for mode in ({"inference_mode": "causal"}, {"inference_mode": "standard", "do_sample": True})
    ]
    greedy = model.generate(**prompts, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(cold[0], greedy)
    assert torch.equal(cold[1], greedy)


# --- individuals
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", [{"inference_mode": "causal"}, {"inference_mode": "standard", "do_sample": True}], ids=str
)
def test_the_same_individual_says_the_same_anywhere(speaker, prompts, mode):
    people = [
        Individual(10),
        Individual(11, world=0),
        Individual(12).antithetic(),
        Individual(13, world=1).antithetic(),
        Individual(14),
    ]
    together = speaker.generate(
        **prompts, individual=people, max_new_tokens=NEW, return_dict_in_generate=True, **mode
    )
    assert len({tuple(row) for row in together.sequences[:, -NEW:].tolist()}) == 5
    order = [3, 0, 4, 1, 2]
    shuffled = speaker.generate(
        **{name: rows[order] for name, rows in prompts.items()},
        individual=[people[row] for row in order], max_new_tokens=NEW, **mode,
    )  # fmt: skip
    assert torch.equal(shuffled, together.sequences[order])
    for row in range(5):
        real = prompts["attention_mask"][row].bool()
        alone = prompts["input_ids"][row][real][None]
        for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
            text = speaker.generate(alone, individual=people[row], max_new_tokens=NEW, **mode, **options)
            assert text[0, -NEW:].tolist() == together.sequences[row, -NEW:].tolist()


def test_seeds_come_from_torch_when_nobody_is_named(speaker, prompts):
    torch.manual_seed(0)
    first = causal(speaker, prompts, None, return_dict_in_generate=True)
    torch.manual_seed(0)
    second = causal(speaker, prompts, None, return_dict_in_generate=True)
    assert torch.equal(first.sequences, second.sequences)
    assert len({person.seed for person in first.individuals}) == 5
    again = causal(speaker, prompts, first.individuals)
    assert torch.equal(again, first.sequences)
    several = causal(speaker, prompts, None, num_return_sequences=3, return_dict_in_generate=True)
    assert len(several.individuals) == len(several.sequences) == 15


# --- processors, stopping, outputs
# ----------------------------------------------------------------------------------


class Forbid(LogitsProcessor):
    """Allows two tokens, and prefers the second by what it adds."""

    def __call__(self, input_ids, scores):
        allowed = torch.full_like(scores, -math.inf)
        allowed[:, 40] = scores[:, 40]
        allowed[:, 41] = scores[:, 41] + 1e6
        return allowed


@pytest.mark.parametrize(
    "mode",
    [
        {"do_sample": False},
        {"do_sample": True},
        {"inference_mode": "causal"},
        {"inference_mode": "compatible", "do_sample": True},
    ],
    ids=str,
)
def test_a_users_processor_is_honoured_in_every_mode(speaker, ids, mode):
    new = speaker.generate(ids, max_new_tokens=4, logits_processor=[Forbid()], **mode)[:, -4:]
    assert new.eq(41).all()


def test_top_k_one_leaves_one_token(model, prompts):
    greedy = model.generate(**prompts, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(causal(model, prompts, 5, top_k=1), greedy)


def test_finished_rows_are_padded(speaker, prompts):
    free = causal(speaker, prompts, [0, 1, 2, 3, 4])[:, -NEW:]
    stop = free[0, 2].item()
    stopped = causal(speaker, prompts, [0, 1, 2, 3, 4], eos_token_id=stop, pad_token_id=257)[:, -NEW:]
    row = stopped[0].tolist()
    end = free[0].tolist().index(stop)
    assert row[: end + 1] == free[0, : end + 1].tolist()
    assert set(row[end + 1 :]) <= {257}


def test_unused_rows_can_be_suppressed(ids):
    speaker = tiny_causal()
    with torch.no_grad():
        speaker.action.bias[259:] = 1e4
    assert speaker.generate(ids, max_new_tokens=3, do_sample=False)[:, -3:].min() >= 259
    assert speaker.generate(ids, max_new_tokens=3, do_sample=False, suppress_unused=True)[:, -3:].max() <= 258


def test_dict_output_has_scores_numbers_and_who(speaker, prompts):
    outputs = causal(
        speaker, prompts, [1, 2, 3, 4, 5], return_dict_in_generate=True, output_scores=True,
        output_logits=True, output_hidden_states=True,
    )  # fmt: skip
    assert isinstance(outputs, CausalGenerateOutput)
    assert len(outputs.scores) == len(outputs.logits) == len(outputs.hidden_states) == NEW
    assert outputs.scores[0].shape == outputs.logits[0].shape == (5, 300)
    is_num = outputs.sequences == 258
    assert is_num.any(), "this model writes numbers"
    assert outputs.numeric_values.shape == outputs.sequences.shape
    assert outputs.numeric_values[~is_num].eq(0).all()
    assert outputs.numeric_values[is_num].ne(0).all()
    assert (outputs.numeric_lower <= outputs.numeric_upper).all()


def test_numbers_are_fed_back(speaker, ids):
    """A step-by-step replay with forward() alone, where each value is read by the next step, decides the
    same.
    """
    outputs = speaker.generate(ids[:1], max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    sequence, values = outputs.sequences, outputs.numeric_values
    assert (sequence[:, 12:] == 258).any()
    laws = speaker(sequence, numeric_values=values, output_scores=True)
    standing = speaker.action.z_scores(Cauchy(laws.loc_S, laws.scale_S))
    assert torch.equal(standing[0, 11:-1].argmax(-1), sequence[0, 12:])
    deaf = speaker(sequence, numeric_values=torch.zeros_like(values), output_scores=True)
    assert not torch.allclose(deaf.loc_S, laws.loc_S)


def test_values_in_the_prompt_are_read(speaker):
    processor = CausalQwen2Processor(choose_num_token(tiny_tokenizer(), 300).tokenizer)
    texts = [
        speaker.generate(**processor(f"cost {v}", return_tensors="pt"), max_new_tokens=NEW, do_sample=False)
        for v in (1, 900000)
    ]
    assert not torch.equal(texts[0][:, -NEW:], texts[1][:, -NEW:])


# --- streaming and refusals
# -----------------------------------------------------------------------------------------


class Collect(NumberStreamer):
    def on_finalized_text(self, text, stream_end=False):
        self.collected = getattr(self, "collected", "") + text


def test_streamed_text_has_numbers_written(speaker, ids):
    processor = CausalQwen2Processor(choose_num_token(tiny_tokenizer(), 300).tokenizer)
    streamer = Collect(processor, skip_prompt=True)
    outputs = causal(speaker, {"input_ids": ids[:1]}, 3, streamer=streamer, return_dict_in_generate=True)
    assert (outputs.sequences[0, 12:] == 258).any()
    assert "<NUM>" not in streamer.collected
    assert any(character.isdigit() for character in streamer.collected)


def test_plain_streamers_work(model, base, ids, capsys):
    model.generate(
        ids[:1], max_new_tokens=5, do_sample=False, streamer=TextStreamer(base.tokenizer, skip_prompt=True)
    )
    new = model.generate(ids[:1], max_new_tokens=5, do_sample=False)[0, 12:]
    assert capsys.readouterr().out.strip() == base.tokenizer.decode(new).strip()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inference_mode": "causal", "num_beams": 2}, "beam.*inference_mode='compatible'"),
        ({"num_beams": 2, "do_sample": False}, "use inference_mode='compatible'"),
        ({"inference_mode": "causal", "prompt_lookup_num_tokens": 3}, "use inference_mode='compatible'"),
        ({"inference_mode": "dreaming"}, "inference_mode is 'dreaming'"),
        ({"inference_mode": "causal", "individual": [1, 2]}, "2 individuals for 3 rows"),
        ({"individual": 3, "do_sample": False}, "nothing is sampled"),
        ({"inference_mode": "compatible", "individual": 3}, "samples tokens, not individuals"),
        ({"inference_mode": "causal", "temperature": -1.0}, "temperature is -1.0"),
        ({"inference_mode": "causal", "density_floor": 1.0}, "density_floor is 1.0"),
        ({"inference_mode": "causal", "persistence": 2.0}, "persistence is 2.0"),
        ({"interval_level": 1.0}, "interval_level is 1.0"),
        ({"normalisation": "ovr"}, "needs inference_mode='compatible'"),
        ({"normalisation": "max", "inference_mode": "compatible"}, "normalisation is 'max'"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_with_a_reason(model, ids, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(ids, max_new_tokens=2, **options)


def test_settings_may_come_from_the_generation_config(model, prompts):
    config = GenerationConfig(
        inference_mode="causal", persistence=1.0, max_new_tokens=NEW, pad_token_id=257, eos_token_id=257
    )
    chosen = model.generate(**prompts, generation_config=config, individual=4)
    assert torch.equal(chosen, causal(model, prompts, Individual(4, 1.0)))


# --- one decision at a time
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["standard", "causal", "compatible"])
def test_steps_decide_as_generate_does(speaker, prompts, mode):
    options = {"individual": 6} if mode == "causal" else {}
    ids = prompts["input_ids"][-1:]
    stepped = speaker.generate_step_by_step(ids, NEW, mode, **options)
    tokens = [step.choice.tokens.item() for step in stepped]
    top_k = {"top_k": 0} if mode == "causal" else {"do_sample": False}
    generated = speaker.generate(
        ids, inference_mode=mode, max_new_tokens=NEW, eos_token_id=9999, **options, **top_k
    )
    assert tokens == generated[0, -NEW:].tolist()


def test_inference_shows_the_laws_behind_a_token(speaker, prompts):
    inference = speaker.inference(prompts["input_ids"], "standard")
    outputs = speaker(prompts["input_ids"])
    torch.testing.assert_close(inference.U.loc, outputs.loc_U[:, -1])
    torch.testing.assert_close(inference.Y.scale, outputs.scale_Y[:, -1])
    assert inference.choice.tokens.shape == (5,)
