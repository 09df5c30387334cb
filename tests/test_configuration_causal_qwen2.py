"""The configuration: defaults of the specification, round trips, and mistakes that are named."""

import math

import pytest
from transformers import AutoConfig, Qwen2Config

from causal_qwen import CausalQwen2Config


def test_defaults():
    config = CausalQwen2Config()
    assert isinstance(config, Qwen2Config)
    expected = {
        "abduction_init_strategy": "identity",
        "scale_activation": "exp",
        "gamma_init": 10.0,
        "b_noise_init": 0.1,
        "ovr_threshold_init": 0.0,
        "learn_threshold": True,
        "numeric_encoding": "log",
        "value_space": "log",
        "num_token_id": None,
        "gate_alpha": 0.0,
        "inference_mode": "standard",
        "noise_gain": 1.0,
        "density_floor": 0.01,
        "persistence": 0.2,
        "softmax_loss_weight": 0.0,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.causal_size == config.hidden_size


def test_round_trip_through_a_directory(tmp_path):
    config = CausalQwen2Config(hidden_size=64, causal_size=16, value_spread=2, num_token_id=5)
    config.save_pretrained(tmp_path)
    for loaded in (CausalQwen2Config.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is CausalQwen2Config
        assert loaded.to_dict() | {"_name_or_path": None} == config.to_dict() | {"_name_or_path": None}


def test_a_causal_size_of_its_own_unties_the_vocabulary():
    assert CausalQwen2Config(hidden_size=64, tie_word_embeddings=True).tie_word_embeddings
    assert not CausalQwen2Config(hidden_size=64, causal_size=8, tie_word_embeddings=True).tie_word_embeddings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gama_init": 3.0}, "'gama_init'; did you mean 'gamma_init'"),
        ({"causalsize": 3}, "'causalsize'; did you mean 'causal_size'"),
        ({"scale_activation": "relu"}, "scale_activation is 'relu'; choose one of 'exp'"),
        ({"value_space": "cubic"}, "value_space is 'cubic'"),
        ({"gate_alpha": 1.5}, "gate_alpha is 1.5; it must lie between 0 and 1"),
        ({"persistence": math.nan}, "persistence is nan"),
        ({"ovr_rivals": 0}, "ovr_rivals is 0; at least 1, or None for all words"),
        ({"ovr_rival_scale": 0.0}, "ovr_rival_scale is 0.0; it must be above 0"),
        ({"ovr_gradient_bound": 0.0}, "ovr_gradient_bound is 0.0; it must be above 0, or None for no bound"),
        ({"density_floor": 1.0}, "density_floor is 1.0"),
        ({"gamma_init": 0.0}, "gamma_init is 0.0"),
        ({"causal_size": 0}, "causal_size is 0"),
        ({"num_token_id": 100, "vocab_size": 100}, "num_token_id is 100, outside the vocabulary of 100"),
    ],
)
def test_mistakes_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        CausalQwen2Config(**fields)
