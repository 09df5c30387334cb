"""Presets, the reading of transformers' configs, and errors that say what would be right."""

import dataclasses

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from causal_qwen.decoder import DecoderConfig, RopeScaling


def test_presets_are_the_published_shapes():
    tiny, large = DecoderConfig.tiny(), DecoderConfig.llama_7b()
    assert (tiny.vocab_size, tiny.hidden_size, tiny.num_hidden_layers, tiny.num_attention_heads) == (
        32000,
        128,
        4,
        4,
    )
    assert (tiny.intermediate_size, tiny.max_position_embeddings, tiny.head_dim) == (512, 2048, 32)
    assert (large.hidden_size, large.num_hidden_layers, large.intermediate_size) == (4096, 32, 11008)
    assert (large.num_key_value_heads, large.head_dim, large.max_position_embeddings) == (32, 128, 4096)
    assert DecoderConfig.llama_7b(num_key_value_heads=8).num_key_value_heads == 8
    assert DecoderConfig.tiny(hidden_size=64).head_dim == 16, "an override moves what follows from it"


def test_config_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DecoderConfig.tiny().vocab_size = 1


def test_configs_are_read_alike_as_object_and_as_dictionary():
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    for config in (
        Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope),
        LlamaConfig(
            hidden_size=64, num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope, head_dim=8
        ),
        Qwen3Config(
            hidden_size=64, num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope, head_dim=8
        ),
    ):
        ours = DecoderConfig.from_hf_config(config)
        assert ours == DecoderConfig.from_hf_config(config.to_dict())
        assert ours.rope_theta == 1e6
        assert ours.norm_eps == config.rms_norm_eps
        assert ours.qkv_bias == (config.model_type == "qwen2")
        assert ours.qk_norm == (config.model_type == "qwen3")
    assert ours.head_dim == 8, "an explicit head_dim is kept"


def test_config_json_of_transformers_4_is_read():
    # There rope_theta and rope_scaling were fields of their own, and sliding_window was set though unused.
    old = {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 32768,
    }
    ours = DecoderConfig.from_hf_config(old)
    assert (ours.head_dim, ours.rope_theta, ours.tie_word_embeddings, ours.qkv_bias) == (64, 1e6, True, True)
    scaled = DecoderConfig.from_hf_config(old | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert scaled.rope_scaling == RopeScaling(kind="linear", factor=2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": 10}, "not a multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads"),
        ({"head_dim": 7}, "head_dim is 7; .* even"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm'; it must be"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; it must be positive"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    ],
)
def test_impossible_values_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.tiny(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "yarn"}, "kind is 'yarn'"),
        ({"factor": 0.5}, "factor is 0.5"),
        ({"low_freq_factor": 4.0}, "the low one smaller"),
        ({"original_context": 0}, "original_context is 0"),
    ],
)
def test_impossible_rope_scalings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**({"kind": "llama3", "factor": 8.0} | changes))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MistralConfig(),
            "model_type is 'mistral'; this decoder reads qwen2, causal_qwen2, qwen3",
        ),
        (Qwen2Config(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (Qwen2Config(use_sliding_window=True), "use_sliding_window is True"),
        (Qwen3Config(use_sliding_window=True), "use_sliding_window is True"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types contain sliding_attention",
        ),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"model_type": "llama"}, "vocab_size is None"),
    ],
)
def test_what_this_decoder_does_not_do_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf_config(config)


def test_qwen3_has_normed_heads_of_their_own_width_and_biases_where_it_says_so():
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    for model_type in ("qwen3", "causal_qwen3"):
        config = {"model_type": model_type, **sizes, **heads}
        plain = DecoderConfig.from_hf_config(config)
        assert plain.qk_norm
        assert (plain.qkv_bias, plain.o_bias, plain.mlp_bias) == (False, False, False)
        assert plain.head_dim == Qwen3Config(**sizes, **heads).head_dim == 128, "transformers' default"
        biased = DecoderConfig.from_hf_config(config | {"attention_bias": True, "head_dim": 32})
        assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, False)
        assert biased.head_dim == 32
