"""Base checkpoints: how each becomes a plain model of a family with its tokenizer.

Qwen2 is Llama plus biases on q, k and v, so a Llama checkpoint becomes Qwen2 with those biases at zero. Where
a source is and whether it is whole is `checkpoints`' business.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jinja2
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.chat_template_utils import render_jinja_template

from causal_qwen.conversion.assembly import EMBEDDING, HEAD, Weights, assemble
from causal_qwen.conversion.checkpoints import (
    ARCHITECTURES,
    DAMAGE,
    EMBEDDED,
    FAMILIES,
    WEIGHTS,
    Checkpoint,
    guarded,
    read_checkpoint,
    weight_files,
)
from causal_qwen.conversion.files import atomic_directory
from causal_qwen.conversion.gguf import gguf_config, gguf_tokenizer, gguf_weights
from causal_qwen.conversion.headers import ConversionError, read_json_object
from causal_qwen.conversion.weights import read_weights, weights_dtype, write_weights
from causal_qwen.directories import cache_directory, check_space
from causal_qwen.progress import Watch, unwatched

__all__ = [
    "EMBEDDED",
    "FAMILIES",
    "Base",
    "BaseFiles",
    "ConversionError",
    "family_of",
    "load_base",
    "load_tokenizer",
    "open_base",
]

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
# What Llama and Qwen2 configurations share. rope_parameters matter most: without them theta is silently
# 10,000.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# A tokenizer is one of these sets of files.
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))


@dataclass(frozen=True)
class Base:
    """A base model of a family, ready to be converted or compared with.

    Args:
        name: The source as it was given.
        model: The base in evaluation mode.
        tokenizer: The tokenizer that came with it.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class BaseFiles:
    """A base whose configuration and tokenizer have been read, and whose weights have not.

    Args:
        name: The source as it was given.
        config: Of the checkpoint's own architecture.
        tokenizer: The tokenizer that came with it.
        directory: Where the weights are, or will be once `gguf` is dequantised.
        gguf: The file that they are in, if it has not been dequantised yet.
    """

    name: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    directory: Path
    gguf: Checkpoint | None = None

    def read(self, *, dtype: torch.dtype | str = "auto", watch: Watch = unwatched) -> Weights:
        """Read the weights, each tensor into memory of its own.

        Args:
            dtype: Of the weights; "auto" keeps the checkpoint's own: what config.json says, else what its
                first tensor has; for a GGUF file its half type, and float32 if it is quantised.
            watch: Told of dequantising and reading.

        Raises:
            ConversionError: If a tensor is damaged.
            OSError: If there is no room for a dequantised model.
        """
        if self.gguf is not None:
            self._dequantise(self.gguf, watch)
        files = weight_files(self.directory, self.name)
        if dtype == "auto":
            dtype = self.config.dtype or weights_dtype(files) or torch.float32
        family, config = family_of(self.config)
        config.dtype = wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        tensors = guarded(self.name, lambda: read_weights(files, dtype=wanted, watch=watch))
        if not any(name.startswith("model.") for name in tensors):  # a backbone that was saved alone
            tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        if config.tie_word_embeddings and HEAD in tensors:
            # Some checkpoints hold both. transformers ties them only if they are equal.
            config.tie_word_embeddings = torch.equal(tensors[EMBEDDING], tensors[HEAD])
            if config.tie_word_embeddings:
                del tensors[HEAD]
        if isinstance(self.config, LlamaConfig):
            for name, weight in list(tensors.items()):
                if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                    tensors[name.replace(".weight", ".bias")] = weight.new_zeros(len(weight))
        return Weights(family, config, tensors, self._generation_config())

    def _dequantise(self, gguf: Checkpoint, watch: Watch) -> None:
        """Write the model of a GGUF file as a checkpoint in safetensors."""
        check_space(self.directory, gguf.bytes())
        with atomic_directory(self.directory, overwrite=True) as temporary:
            self.config.save_pretrained(temporary)
            GenerationConfig.from_model_config(self.config).save_pretrained(temporary)
            self.tokenizer.save_pretrained(temporary)
            tensors = gguf_weights(gguf, self.config)
            write_weights(temporary / WEIGHTS, tensors, watch=watch, phase="dequantising")

    def _generation_config(self) -> GenerationConfig:
        if (self.directory / GENERATION_FILE).is_file():
            return guarded(self.name, lambda: GenerationConfig.from_pretrained(self.directory))
        return GenerationConfig.from_model_config(self.config)


def open_base(source: str | Path) -> BaseFiles:
    """Find a base and read everything but its weights.

    Args:
        source: "smollm2", a local directory, a .gguf file or a hub id.

    Raises:
        ConversionError: If the source is missing, damaged, incomplete or of another architecture.
    """
    name = str(source)
    checkpoint = read_checkpoint(name, base=True)
    if checkpoint.path.is_dir():
        return _open_directory(name, checkpoint.path)
    config = gguf_config(checkpoint)
    directory = _dequantised_directory(checkpoint.path, config.dtype)
    if directory.is_dir():
        try:
            read_checkpoint(directory, base=True)
            return _open_directory(name, directory)
        except ConversionError as error:
            logger.warning("%s is made again: %s", directory, error)
    return BaseFiles(name, config, gguf_tokenizer(checkpoint), directory, checkpoint)


def load_base(source: str | Path, *, dtype: torch.dtype | str = "auto", watch: Watch = unwatched) -> Base:
    """Load a base model as one of the classes of `FAMILIES`.

    Args:
        source: "smollm2", a local directory, a .gguf file or a hub id.
        dtype: Of the weights; "auto" keeps the checkpoint's own, as `BaseFiles.read` says.
        watch: Told of dequantising and reading.

    Raises:
        ConversionError: If the source is missing, unreadable, incomplete or of another architecture.
    """
    files = open_base(source)
    weights = files.read(dtype=dtype, watch=watch)
    model = assemble(files.name, weights.family, weights.config, weights.tensors)
    model.generation_config = weights.generation_config
    return Base(files.name, cast(PreTrainedModel, model.eval()), files.tokenizer)


def _open_directory(name: str, directory: Path) -> BaseFiles:
    config = guarded(
        name,
        lambda: AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False),
    )
    vars(config).pop("quantization_config", None)  # of what was dequantised before it was saved
    return BaseFiles(name, config, load_tokenizer(name, directory), directory)


def _dequantised_directory(file: Path, dtype: torch.dtype) -> Path:
    """Where the model of a GGUF file is kept in safetensors, made once per content of the file."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    suffix = "" if dtype == torch.float32 else f"-{str(dtype).removeprefix('torch.')}"
    return cache_directory() / f"gguf-{digest[:16]}{suffix}"


def family_of(config: PreTrainedConfig) -> tuple[Any, PreTrainedConfig]:
    """The class of `FAMILIES` that computes the same function, and its configuration."""
    if not isinstance(config, LlamaConfig):
        return ARCHITECTURES[config.model_type], copy.deepcopy(config)
    plain = Qwen2Config(**{name: getattr(config, name) for name in SHARED_FIELDS})
    if config.head_dim != config.hidden_size // config.num_attention_heads:
        plain.head_dim = config.head_dim
    return Qwen2ForCausalLM, plain


def load_tokenizer(source: str, directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that tokenizer.json describes.

    AutoTokenizer applies Qwen's splitting rules to any directory whose config says qwen2, whatever its
    tokenizer.json says, so it is asked only where there is no such file (vocabulary and merges alone).

    Raises:
        ConversionError: If there is none, or a file of it is damaged.
    """
    if not any(all((directory / name).is_file() for name in names) for names in TOKENIZERS):
        raise ConversionError(
            f"{source}: no tokenizer there (tokenizer.json, or vocab.json and merges.txt); "
            "copy it from the base"
        )
    files = [name for name in ("tokenizer.json", "tokenizer_config.json") if (directory / name).is_file()]
    states = {name: read_json_object(directory / name, source) for name in files}
    _check_tokenizer(source, states.get("tokenizer.json", {}))
    cls = PreTrainedTokenizerFast if "tokenizer.json" in files else AutoTokenizer
    try:
        tokenizer = cls.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # The tokenizers library raises Exception itself; anything else is a mistake of ours.
        if type(error) is not Exception and not isinstance(error, DAMAGE):
            raise
        raise ConversionError(
            f"{source}: {' or '.join(files) or 'the vocabulary'} is damaged ({error}); fetch it again"
        ) from error
    _check_chat_template(source, tokenizer.chat_template)
    return cast(PreTrainedTokenizerBase, tokenizer)


def _check_tokenizer(source: str, state: dict[str, Any]) -> None:
    """Refuse a tokenizer.json that would end the process: compiled code panics where parts are of no kind."""
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model"):
        if not isinstance(state.get(part), dict | None):
            raise ConversionError(
                f"{source}: {part} of tokenizer.json is a {type(state[part]).__name__}, not an object; "
                "fetch it again"
            )
    if (state.get("model") or {}).get("continuing_subword_prefix"):
        raise ConversionError(
            f"{source}: tokenizer.json has a continuing_subword_prefix, which byte-level vocabularies have "
            "not; fetch it again"
        )


def _check_chat_template(source: str, template: str | dict[str, str] | None) -> None:
    """Refuse a template that is none, here rather than in the middle of a conversation."""
    for text in template.values() if isinstance(template, dict) else [template] if template else []:
        try:
            render_jinja_template([], chat_template=text)  # of no conversation: it is only compiled
        except jinja2.TemplateSyntaxError as error:
            raise ConversionError(
                f"{source}: the chat template is damaged, line {error.lineno}: {error.message}; "
                "mend chat_template.jinja, or take the base's"
            ) from error
