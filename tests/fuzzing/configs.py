"""Configurations: a damaged config.json is read as what it says, or refused by name."""

import dataclasses
import functools
import json

from causal_qwen import CausalQwen2Config
from causal_qwen.configuration import CausalFields
from causal_qwen.decoder import DecoderConfig
from conftest import TINY
from fuzzing.inputs import Mutated, mutated_json
from fuzzing.target import Target

__all__ = ["TARGETS", "check_causal", "check_decoder"]


@functools.cache
def causal_files() -> list[bytes]:
    """A converted model's config.json, without what is transformers' alone."""
    config = CausalQwen2Config(**TINY, num_token_id=258, conformal_scores=[0.1, 0.5, 2.0])
    names = [*TINY, *(field.name for field in dataclasses.fields(CausalFields))]
    return [json.dumps({name: getattr(config, name) for name in names}).encode()]


@functools.cache
def decoder_files() -> list[bytes]:
    """The config.json of a base of each family, of transformers 4 and 5."""
    own = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "tie_word_embeddings": True} | TINY
    llama = own | {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    }
    four = own | {"model_type": "qwen3", "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
    del four["rope_parameters"]
    return [json.dumps(fields).encode() for fields in (own, llama, four | {"head_dim": 8})]


def check_causal(data: bytes) -> None:
    """Fields are checked one by one and together; a configuration says the same when it is written."""
    fields = json.loads(data)
    if not isinstance(fields, dict):
        return
    config = CausalQwen2Config(**fields)
    assert config.causal_size >= 1
    again = CausalQwen2Config(**config.to_dict())
    assert again.to_dict() == config.to_dict()


def check_decoder(data: bytes) -> None:
    """Sizes make a decoder, or the error names the one that does not."""
    config = DecoderConfig.from_hf_config(json.loads(data))
    assert config.head_dim % 2 == 0
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.rope_theta > 0


def structured(draw, data):
    """What is no JSON any more is for the readers of files."""
    while True:
        changed = mutated_json(draw, data)
        try:
            json.loads(changed)
        except (ValueError, RecursionError):
            continue
        return changed


TARGETS = (
    Target(
        name="config-causal",
        source=Mutated(causal_files, structured),
        check=check_causal,
        share=20,
        seconds=10,
    ),
    Target(name="config-decoder", source=Mutated(decoder_files, structured), check=check_decoder, share=60),
)
