"""Checkpoints: damaged files of weights and of their configuration are refused by name, never half read."""

import functools
import json
import random
import struct

import torch
from safetensors.torch import save

from causal_qwen.decoder import CausalLM, DecoderConfig
from causal_qwen.decoder.weights import load_directory
from fuzzing.inputs import Mutated, mutated_bytes, mutated_json
from fuzzing.places import directory
from fuzzing.target import Target

__all__ = ["TARGETS", "check_config", "check_index", "check_weights"]

CONFIG = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@functools.cache
def weights() -> bytes:
    """The smallest checkpoint."""
    torch.manual_seed(0)
    state = CausalLM(DecoderConfig.from_hf_config(CONFIG)).state_dict()
    return save(
        {name if name == "lm_head.weight" else f"model.{name}": value for name, value in state.items()}
    )


def mutated_header(draw: random.Random, data: bytes) -> bytes:
    """One change of the header of a safetensors file, or of any byte."""
    if draw.random() < 0.3 or len(data) < 8:
        return mutated_bytes(draw, data)
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + size], data[8 + size :]
    if draw.random() < 0.1:
        return (
            struct.pack("<Q", draw.choice((0, 1, size - 1, size + 1, 2**32, 2**63, 2**64 - 1)) % 2**64)
            + header
            + rest
        )
    header = mutated_json(draw, header)
    return struct.pack("<Q", len(header)) + header + rest


def _load(name: str, **files: bytes) -> None:
    place = directory(name)
    for old in place.iterdir():
        old.unlink()
    contents = {"config.json": json.dumps(CONFIG).encode(), WEIGHTS: weights()} | files
    for file, content in contents.items():
        (place / file).write_bytes(content)
    if INDEX in files:
        (place / WEIGHTS).rename(place / "part.safetensors")
    model = load_directory(place)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with torch.no_grad():
        assert model(ids).logits.shape == (1, 2, model.config.vocab_size)


def check_weights(data: bytes) -> None:
    """A decoder from a damaged weight file."""
    _load("weights", **{WEIGHTS: data})


def check_config(data: bytes) -> None:
    """A decoder from a damaged config.json."""
    _load("config", **{"config.json": data})


def check_index(data: bytes) -> None:
    """A decoder from a damaged index of shards."""
    _load("index", **{INDEX: data})


def index() -> bytes:
    """Of one shard."""
    names = [f"model.{name}" for name in CausalLM(DecoderConfig.from_hf_config(CONFIG)).state_dict()]
    names = ["lm_head.weight" if name.endswith("lm_head.weight") else name for name in names]
    return json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "part.safetensors")}).encode()


TARGETS = (
    Target(
        name="decoder-weights",
        source=Mutated(lambda: [weights()], mutated_header),
        check=check_weights,
        share=40,
    ),
    Target(
        name="decoder-config",
        source=Mutated(lambda: [json.dumps(CONFIG).encode()], mutated_json),
        check=check_config,
        share=25,
    ),
    Target(
        name="decoder-index", source=Mutated(lambda: [index()], mutated_json), check=check_index, share=15
    ),
)
