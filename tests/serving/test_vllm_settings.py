"""What a request to vLLM may ask for; no vLLM is needed to read it."""

import sys
from types import SimpleNamespace

import pytest

from causal_qwen import CausalQwen2Config, Individual
from causal_qwen.serving.vllm.processors import Processing
from causal_qwen.serving.vllm.settings import RequestSettings

PLAIN = {
    "n": 1,
    "seed": None,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "bad_words": [],
    "allowed_token_ids": None,
    "logit_bias": None,
    "structured_outputs": None,
}


def request(fields=None, **extra_args):
    return SimpleNamespace(**PLAIN | (fields or {}), extra_args=extra_args or None)


@pytest.fixture
def config():
    return CausalQwen2Config(inference_mode="causal", noise_gain=3.0, persistence=0.4, density_floor=0.02)


def test_the_configuration_answers_what_a_request_leaves_out(config):
    decision = RequestSettings.of(request()).decision(config, request())
    assert (decision.mode, decision.do_sample) == ("causal", True)
    assert (decision.noise_gain, decision.persistence, decision.density_floor) == (3.0, 0.4, 0.02)


def test_a_request_answers_for_itself(config):
    asked = request({"temperature": 0.7}, inference_mode="standard", do_sample=1, noise_gain=2, persistence=0)
    decision = RequestSettings.of(asked).decision(config, asked)
    assert (decision.mode, decision.do_sample, decision.temperature) == ("standard", True, 0.7)
    assert (decision.noise_gain, decision.persistence) == (2.0, 0.0)


def test_a_named_individual_is_sampled_in_standard_too(config):
    standard = RequestSettings.of(request(inference_mode="standard"))
    assert not standard.decision(config, request()).do_sample
    named = RequestSettings.of(request(inference_mode="standard", individual=7))
    assert named.decision(config, request()).do_sample


@pytest.mark.parametrize("who", [7, Individual(7).to_json()])
def test_an_individual_is_a_seed_or_its_json(who):
    asked = request(individual=who)
    assert RequestSettings.of(asked).person(asked).seed == 7


def test_the_seed_names_somebody_and_nobody_is_somebody_new():
    asked = request({"seed": 9})
    assert RequestSettings.of(asked).person(asked).seed == 9
    backwards = request({"seed": -1})  # vLLM takes them, and so must we
    assert RequestSettings.of(backwards).person(backwards).seed == 2**64 - 1
    assert RequestSettings.of(request()).person(request()).seed >= 0


@pytest.mark.parametrize(
    ("fields", "extra", "words"),
    [
        ({}, {"inference_mode": "soft"}, "inference_mode is 'soft'; choose one of standard, causal"),
        ({}, {"persistance": 0.1}, "did you mean 'persistence'"),
        ({}, {"persistence": 2}, "persistence is 2.0; it must lie between 0 and 1"),
        ({}, {"noise_gain": float("nan")}, "noise_gain is nan; it must be a finite number"),
        ({}, {"density_floor": -1}, "density_floor"),
        ({}, {"do_sample": "yes"}, "do_sample is 'yes'; it must be true or false"),
        ({}, {"individual": -1}, "seed is -1"),
        ({}, {"individual": "seven"}, "not an individual"),
        ({}, {"individual": Individual(1, start=2**47).to_json()}, "positions go up to"),
        ({}, {"individual": 1, "inference_mode": "compatible"}, "samples tokens, not individuals"),
        ({}, {"individual": 1, "do_sample": 0}, "nothing is sampled"),
        ({"n": 2}, {"individual": 1}, "n is 2, and individual is one"),
        ({}, {"gumbel": 1}, "gumbel draws tokens from softmax"),
        ({}, {"gumbel": 1, "inference_mode": "causal"}, "gumbel draws tokens from softmax"),
        ({"n": 2}, {"gumbel": 1, "inference_mode": "compatible"}, "n is 2, and gumbel is one"),
        ({}, {"numeric_values": [1.0, "two"]}, r"numeric_values\[1\] is 'two'"),
        ({}, {"numeric_values": 3}, "one number per <NUM>"),
        ({}, {"numbers": "written"}, "choose one of hidden, kept"),
        ({}, {"interval_level": 1.0}, "interval_level"),
    ],
)
def test_what_is_wrong_is_named(fields, extra, words):
    with pytest.raises(ValueError, match=words):
        RequestSettings.of(request(fields, **extra))


def test_fields_of_others_are_left_to_them():
    assert RequestSettings.of(request(kv_transfer_params={}, session_id="a")) == RequestSettings()


def test_logits_are_asked_for_only_where_something_reads_them():
    def needs(mode, **fields):
        return Processing.of(request(fields), mode).needs_logits

    assert needs("compatible")
    assert not needs("causal", top_k=50, top_p=0.9, repetition_penalty=1.2)
    assert needs("standard", logprobs=1)
    assert needs("causal", bad_words=["no"])
    assert Processing.of(request(), "causal", others=True).adjusts


def test_processors_are_those_of_generate():
    params = request({"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1})
    chosen = Processing.of(params, "causal", 3).processors(None, [[1]], [[2]], "cpu")
    assert [type(one).__name__ for one in chosen] == [
        "_Penalised",
        "SuppressTokensLogitsProcessor",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]


def test_tokens_that_are_drawn_by_gumbel_noise_are_ours_to_decide():
    """Logits are divided by T before the nucleus is taken, and vLLM's own are not needed."""
    params = request({"top_p": 0.9, "temperature": 0.7})
    processing = Processing.of(params, "compatible", drawn=True)
    assert not processing.needs_logits
    names = [type(one).__name__ for one in processing.processors(None, [[1]], [[2]], "cpu")]
    assert names == ["TemperatureLogitsWarper", "TopPLogitsWarper"]
    asked = request(inference_mode="compatible", gumbel=7, do_sample=1)
    settings = RequestSettings.of(asked)
    assert settings.person(asked).seed == 7
    assert not settings.decision(CausalQwen2Config(), asked).do_sample


def test_nothing_of_vllm_is_imported_to_find_the_plugin():
    import causal_qwen.serving.vllm

    assert callable(causal_qwen.serving.vllm.register)
    assert "causal_qwen.serving.vllm.engine" not in sys.modules
