"""Sources of conversion: damaged directories, GGUF files and tokenizers are refused before loading."""

import functools
import json
import random
import shutil
from pathlib import Path

from causal_qwen import CausalQwen2Processor
from causal_qwen.conversion.checkpoints import read_checkpoint
from causal_qwen.conversion.sources import load_tokenizer
from causal_qwen.conversion.vocabulary import choose_num_token
from conftest import tiny_base, tiny_tokenizer
from fuzzing.inputs import Mutated, mutated_bytes, mutated_json
from fuzzing.places import directory, written
from fuzzing.target import Target
from fuzzing.weights import mutated_header
from gguf_files import write_gguf
from qwen_vocabulary import PATTERN, SPECIAL, vocabulary_file

__all__ = ["TARGETS", "check_config", "check_gguf", "check_tokenizer", "check_weights"]

SMALL_VOCABULARY = 700
TEXT = "第3章: 12.5 kg, it's <|im_end|> here"


@functools.cache
def base() -> Path:
    """A whole checkpoint, as small as they come."""
    place = directory("base")
    tiny_base(num_hidden_layers=1, hidden_size=16, intermediate_size=16).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def content(name: str) -> list[bytes]:
    """A file of it."""
    return [(base() / name).read_bytes()]


def changed(name: str, data: bytes) -> Path:
    """A copy of the checkpoint with one file changed."""
    place = directory("changed")
    if not any(place.iterdir()):
        shutil.copytree(base(), place, dirs_exist_ok=True)
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copyfile(base() / file, place / file)
    (place / name).write_bytes(data)
    return place


def check_config(data: bytes) -> None:
    """config.json fits the weights, or the error says what does not."""
    checkpoint = read_checkpoint(changed("config.json", data), base=True)
    assert checkpoint.parameters > 0


def check_weights(data: bytes) -> None:
    """The weights are those that config.json implies, or the error says which are not."""
    checkpoint = read_checkpoint(changed("model.safetensors", data), base=True)
    assert checkpoint.parameters > 0


@functools.cache
def gguf_file() -> bytes:
    """A GGUF file with a small vocabulary."""
    file = directory("gguf") / "whole.gguf"
    write_gguf(tiny_base(num_hidden_layers=1, hidden_size=32, intermediate_size=32), tiny_tokenizer(), file)
    return file.read_bytes()


def mutated_front(draw: random.Random, data: bytes) -> bytes:
    """One change, mostly of the header."""
    size = 1500 if draw.random() < 0.8 else len(data)
    return mutated_bytes(draw, data[:size]) + data[size:]


def check_gguf(data: bytes) -> None:
    """A GGUF file is what its header says, or refused."""
    checkpoint = read_checkpoint(written(data, ".gguf"), base=True)
    assert checkpoint.parameters > 0


@functools.cache
def tokenizer_files() -> list[bytes]:
    """Ours, of bytes alone, and the first words of Qwen's with its splitting rules."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    words = directory("qwen") / "small.tiktoken"
    words.write_bytes(b"".join(vocabulary_file().read_bytes().splitlines(keepends=True)[:SMALL_VOCABULARY]))
    backend = TikTokenConverter(
        vocab_file=str(words), pattern=PATTERN, extra_special_tokens=SPECIAL
    ).converted()
    return [tiny_tokenizer().backend_tokenizer.to_str().encode(), backend.to_str().encode()]


def check_tokenizer(data: bytes) -> None:
    """With <NUM>, digits as text are still what the tokenizer itself makes of them, and nothing is lost."""
    json_files = {"tokenizer.json": data, "tokenizer_config.json": b"{}"}
    place = directory("tokenizer")
    for name, body in json_files.items():
        (place / name).write_bytes(body)
    tokenizer = load_tokenizer("base", place)
    num_token = choose_num_token(tokenizer, max(tokenizer.get_vocab().values(), default=0) + 3)
    processor = CausalQwen2Processor(num_token.tokenizer)
    assert processor(TEXT, numbers="text")["input_ids"] == tokenizer(TEXT)["input_ids"]
    batch = processor(TEXT)
    assert isinstance(processor.decode(batch["input_ids"], batch["numeric_values"]), str)


def mutated_tokenizer(draw: random.Random, data: bytes) -> bytes:
    """One change outside of the long lists of words, mostly."""
    if draw.random() < 0.3:
        return mutated_json(draw, data)
    try:
        state = json.loads(data)
        vocabulary = state["model"].pop("vocab")
        front = json.loads(mutated_json(draw, json.dumps(state).encode()))
        front["model"].setdefault("vocab", vocabulary)
        return json.dumps(front).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return mutated_bytes(draw, data)


TARGETS = (
    Target(
        name="checkpoint-config",
        source=Mutated(functools.partial(content, "config.json"), mutated_json),
        check=check_config,
        share=15,
        seconds=10,
    ),
    Target(
        name="checkpoint-weights",
        source=Mutated(functools.partial(content, "model.safetensors"), mutated_header),
        check=check_weights,
        share=15,
        seconds=10,
    ),
    Target(
        name="checkpoint-gguf",
        source=Mutated(lambda: [gguf_file()], mutated_front),
        check=check_gguf,
        share=15,
        seconds=10,
    ),
    Target(
        name="tokenizers",
        source=Mutated(tokenizer_files, mutated_tokenizer, most=2),
        check=check_tokenizer,
        share=20,
        seconds=10,
    ),
)
