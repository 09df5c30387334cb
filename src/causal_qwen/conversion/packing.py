"""A converted directory as a `NativeModel`: packed once, then mapped from the cache in a moment.

What is packed is everything that a start needs: weights in the engine's precision, heads, tokenizer and
configurations, in one file. Its name says what it was made from, by content: whatever changes in the
directory gives another file, and a copy of the directory the same one. transformers is needed for packing
alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from causal_qwen.conversion.files import write_file
from causal_qwen.conversion.headers import ConversionError, read_json_object
from causal_qwen.decoder.config import DecoderConfig
from causal_qwen.decoder.engine import Engine
from causal_qwen.decoder.packed import PackedWeights, Precision, parts
from causal_qwen.decoder.stored import Stored, open_stored, write_stored
from causal_qwen.decoder.weights import CheckpointTensors
from causal_qwen.directories import cache_directory, check_space
from causal_qwen.intervals import give_up_where_moved
from causal_qwen.native_model import GenerationDefaults, NativeConfig, NativeModel, UnservedError
from causal_qwen.number_processor import NumberProcessor
from causal_qwen.packed_tokenizer import PackedTokenizer, tokenizer_state

__all__ = ["Asked", "content_key", "load_native", "unserved"]

logger = logging.getLogger(__name__)

Asked = Literal["auto", "float32", "bfloat16", "int8", "int4"]
VERSION = 1  # of what is packed, and how
READ = (".safetensors", ".json", ".jinja", ".txt", ".model")  # of a directory
HEADS = ("abduction.", "action.", "numeric_embedding.")
TOKENIZER = "tokenizer"
SECONDS_AT_REST = 2.0  # a file that changed later may change again without its times saying so
BYTES = {"float32": 4.1, "bfloat16": 2.1, "int8": 1.3, "int4": 1.3}  # of a parameter, at most
MOST_BYTES = 8e9  # of all packed files; the least recently used go first
KEY_DIGITS = 32


def load_native(
    directory: str | Path, *, dtype: Asked = "auto", tell: Callable[[str], None] | None = None
) -> tuple[NativeModel, NumberProcessor]:
    """A converted model on the native engine, and its processor.

    Args:
        directory: Where `convert` or `train` wrote it.
        dtype: Precision of the weights; "auto" keeps theirs.
        tell: Called with a line where something takes a while or is given up; the log when None.

    Raises:
        ConversionError: If the directory is missing, damaged or incomplete.
        UnservedError: If only transformers runs this model.
    """
    directory, tell = Path(directory), tell or logger.info
    config = _config(directory)
    cast = _cast(config, dtype)
    reason = unserved(config)
    if reason is not None:
        raise UnservedError(f"{directory}: {reason}")
    precision: Precision = ("bfloat16" if cast == torch.bfloat16 else "float32") if dtype == "auto" else dtype
    kind = f"{precision}-of-{str(cast).removeprefix('torch.')}"
    path = cache_directory() / "packed" / f"{content_key(directory)}-{kind}.safetensors"
    stored = open_stored(path)
    if stored is None:
        stored = _packed(directory, path, cast, precision, tell)
    else:
        _touch(path)
    native = NativeConfig.of(json.loads(stored.facts["config"]))
    moved = give_up_where_moved(native, precision if dtype != "auto" else str(cast).removeprefix("torch."))
    if moved:
        tell(moved)
    return _assembled(stored, native, tell)


def unserved(config: Mapping[str, Any]) -> str | None:
    """Why the native engine does not run a model with this config.json; None if it does."""
    try:
        DecoderConfig.from_hf_config(config)
    except ValueError as error:
        return str(error)
    if not str(config["model_type"]).startswith("causal_"):
        return f"model_type is {config['model_type']!r}, which is not converted yet"
    return None


def content_key(directory: Path) -> str:
    """What the files of a directory say, and who reads them, in 32 digits.

    A file is read whole when it is new or its size, its times or its place on the disk have changed;
    otherwise what it held is remembered in the cache.

    Raises:
        OSError: If a file cannot be read.
    """
    files = sorted(file for file in directory.iterdir() if file.suffix in READ and file.is_file())
    place = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:KEY_DIGITS]
    memory = cache_directory() / "packed" / f"{place}.json"
    known = _remembered(memory)
    now, digests, kept = time.time(), {}, {}
    for file in files:
        state = file.stat()
        mark = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev]
        entry = known.get(file.name)
        if entry is not None and entry[:-1] == mark:
            digest = entry[-1]
        else:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        digests[file.name] = digest
        if now - max(state.st_mtime, state.st_ctime) > SECONDS_AT_REST:
            kept[file.name] = [*mark, digest]
    if kept != known:
        try:
            write_file(memory, json.dumps(kept))
        except OSError as error:
            logger.info("the contents of %s are not remembered: %s", directory, error)
    versions = [importlib.metadata.version(name) for name in ("transformers", "tokenizers")]
    identity = json.dumps([VERSION, versions, digests], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:KEY_DIGITS]


def _remembered(memory: Path) -> dict[str, list[Any]]:
    """{file name: [size, times, inode, device, digest]}; nothing where the memory is missing or damaged."""
    try:
        entries = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {name: entry for name, entry in entries.items() if isinstance(entry, list) and len(entry) == 6}


def _config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ConversionError(f"{directory}: no such directory")
    return read_json_object(directory / "config.json", str(directory))


def _cast(config: Mapping[str, Any], dtype: Asked) -> torch.dtype:
    """What transformers would load the weights as, before they are packed.

    Raises:
        UnservedError: If only transformers can tell.
    """
    if dtype != "auto":
        return torch.bfloat16 if dtype == "bfloat16" else torch.float32
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    named = config.get("dtype", config.get("torch_dtype"))
    if named not in kinds:
        raise UnservedError(f"config.json says dtype {named!r}; give --dtype")
    return kinds[named]


def _packed(
    directory: Path, path: Path, cast: torch.dtype, precision: Precision, tell: Callable[[str], None]
) -> Stored:
    """The parts of a model, written to the cache and mapped; in memory where the cache cannot be written."""
    tell("packing the weights (once; kept for later processes) …")
    from causal_qwen.conversion.loading import check_converted

    checkpoint, processor = check_converted(str(directory))
    tensors = CheckpointTensors(directory, cast)
    tied, head = bool(checkpoint.config.get("tie_word_embeddings")), "lm_head.weight" in tensors
    if tied == head:
        raise UnservedError("config.json and the weights disagree on whether the embedding is the head")
    generation = directory / "generation_config.json"
    entries = read_json_object(generation, str(directory)) if generation.is_file() else {}
    GenerationDefaults.of(entries)
    state = tokenizer_state(processor.tokenizer) | {"numbers": processor.numbers}
    state["chat_template"] = processor.chat_template
    if state["clean_up"] or isinstance(state["chat_template"], dict):
        raise UnservedError("its tokenizer needs transformers for every text")
    facts = {
        "config": json.dumps(checkpoint.config),
        "generation_config": json.dumps(entries),
        "processor": json.dumps(state),
    }

    def contents() -> Iterator[tuple[str, Tensor]]:
        config = DecoderConfig.from_hf_config(checkpoint.config)
        yield from parts(config, tensors, precision=precision)
        for name in tensors.others(HEADS):
            yield name, tensors.whole(name)
        backend = processor.tokenizer.backend_tokenizer.to_str().encode()
        yield TOKENIZER, torch.frombuffer(bytearray(backend), dtype=torch.uint8)

    try:
        check_space(path, int(checkpoint.parameters * BYTES[precision]))
        write_stored(path, contents(), facts)
        _make_room(path)
        stored = open_stored(path)
    except OSError as error:
        tell(f"the packed weights are not kept ({error})")
        stored = None
    return Stored(dict(contents()), facts) if stored is None else stored


def _assembled(
    stored: Stored, config: NativeConfig, tell: Callable[[str], None]
) -> tuple[NativeModel, NumberProcessor]:
    decoder = DecoderConfig.from_hf_config(json.loads(stored.facts["config"]))
    state = json.loads(stored.facts["processor"])
    text = bytes(stored.tensors[TOKENIZER].numpy()).decode()
    processor = NumberProcessor(PackedTokenizer.of(text, state), numbers=state["numbers"])
    heads = {name: tensor for name, tensor in stored.tensors.items() if name.startswith(HEADS)}
    defaults = GenerationDefaults.of(json.loads(stored.facts["generation_config"]))
    engine = Engine(decoder, PackedWeights.of_parts(decoder, stored.tensors), tell=tell)
    return NativeModel(config, engine, heads, defaults), processor


def _touch(path: Path) -> None:
    """Say that it was used; where that cannot be said, it counts as old."""
    try:
        os.utime(path)
    except OSError as error:
        logger.info("%s: %s", path, error)


def _make_room(newest: Path) -> None:
    """Remove the least recently used files while all together are too many bytes; never the newest."""
    total, states = newest.stat().st_size, []
    for file in newest.parent.glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # another process makes room, too
            states.append((file.stat(), file))
    for state, file in sorted(states, key=lambda pair: -pair[0].st_mtime):
        if file == newest:
            continue
        total += state.st_size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)
