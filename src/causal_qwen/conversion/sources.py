"""Base checkpoints: how each becomes a plain model of a family with its tokenizer.

Qwen2 is Llama plus biases on q, k and v, so a Llama checkpoint becomes Qwen2 with those biases at zero. Where a
source is and whether it is whole is `checkpoints`' business.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jinja2
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.chat_template_utils import _compile_jinja_template

from causal_qwen.conversion.checkpoints import (
    ARCHITECTURES,
    CAUSAL,
    DAMAGE,
    EMBEDDED,
    FAMILIES,
    guarded,
    read_checkpoint,
)
from causal_qwen.conversion.files import atomic_directory
from causal_qwen.conversion.headers import ConversionError, read_json_object
from causal_qwen.directories import cache_directory, check_space

__all__ = ["EMBEDDED", "FAMILIES", "Base", "ConversionError", "load_base", "load_tokenizer", "load_weights"]

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


def load_base(source: str | Path, *, dtype: torch.dtype | str = "auto") -> Base:
    """Load a base model as one of the classes of `FAMILIES`.

    Args:
        source: "smollm2", a local directory, a .gguf file or a hub id.
        dtype: Of the weights; "auto" keeps the checkpoint's own (float32 for GGUF).

    Raises:
        ConversionError: If the source is missing, unreadable, incomplete or of another architecture.
    """
    name = str(source)
    path = read_checkpoint(name, base=True).path
    model, tokenizer = _load(name, path if path.is_dir() else _dequantised(name, path), dtype)
    return Base(name, model.eval(), tokenizer)


def _dequantised(source: str, file: Path) -> Path:
    """A directory with the model of a GGUF file in float32, made once per file content.

    Reading GGUF takes half a minute (its vocabulary is parsed in Python), the directory well under a second.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    directory = cache_directory() / f"gguf-{digest[:16]}"
    if directory.is_dir() and not _is_whole(directory):
        shutil.rmtree(directory)
    if not directory.is_dir():
        check_space(directory, read_checkpoint(file).bytes())
        model, tokenizer = _load(source, file.parent, torch.float32, gguf_file=file.name)
        with atomic_directory(directory) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    return directory


def _is_whole(directory: Path) -> bool:
    try:
        read_checkpoint(directory)
        load_tokenizer(str(directory), directory)
    except ConversionError:
        return False
    return True


def _load(
    source: str, directory: Path, dtype: torch.dtype | str, *, gguf_file: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    config = guarded(source, lambda: AutoConfig.from_pretrained(directory, **options))
    if gguf_file is None:
        tokenizer = load_tokenizer(source, directory)
    else:
        tokenizer = guarded(source, lambda: AutoTokenizer.from_pretrained(directory, **options))
    model = load_weights(source, directory, config, dtype, gguf_file=gguf_file)
    if isinstance(config, LlamaConfig) or gguf_file is not None:
        model = _plain(model)
    return model, tokenizer


def load_weights(
    source: str,
    directory: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    *,
    gguf_file: str | None = None,
) -> Any:
    """The model in its own class; a tensor that is missing is an error, never a random initialisation.

    Args:
        source: What errors call it.
        directory: Where it is.
        config: Of an architecture of `ARCHITECTURES` or `CAUSAL`.
        dtype: Of the weights; "auto" keeps theirs.
        gguf_file: A file of the directory, instead of safetensors.

    Raises:
        ConversionError: If a tensor is damaged, missing or misshapen.
    """
    architecture: Any = (ARCHITECTURES | CAUSAL)[config.model_type]
    file = {"use_safetensors": True} if gguf_file is None else {"gguf_file": gguf_file}
    model, info = guarded(
        source,
        lambda: architecture.from_pretrained(
            directory, config=config, dtype=dtype, output_loading_info=True, local_files_only=True, **file
        ),
    )
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            names = sorted(map(str, info[kind]))
            raise ConversionError(
                f"{source}: incomplete checkpoint, {len(names)} tensors with "
                f"{kind.replace('_', ' ')} such as {names[0]}"
            )
    return model


def load_tokenizer(source: str, directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that tokenizer.json describes.

    AutoTokenizer applies Qwen's splitting rules to any directory whose config says qwen2, whatever its
    tokenizer.json says, so it is asked only where there is no such file (vocabulary and merges alone).

    Raises:
        ConversionError: If there is none, or a file of it is damaged.
    """
    if not any(all((directory / name).is_file() for name in names) for names in TOKENIZERS):
        raise ConversionError(
            f"{source}: no tokenizer there (tokenizer.json, or vocab.json and merges.txt); copy it from the base"
        )
    files = [name for name in ("tokenizer.json", "tokenizer_config.json") if (directory / name).is_file()]
    for name in files:
        read_json_object(directory / name, source)
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


def _check_chat_template(source: str, template: str | dict[str, str] | None) -> None:
    """Refuse a template that is none, here rather than in the middle of a conversation."""
    for text in template.values() if isinstance(template, dict) else [template] if template else []:
        try:
            _compile_jinja_template(text)
        except jinja2.TemplateSyntaxError as error:
            raise ConversionError(
                f"{source}: the chat template is damaged, line {error.lineno}: {error.message}; "
                "mend chat_template.jinja, or take the base's"
            ) from error


def _plain(base: PreTrainedModel) -> PreTrainedModel:
    """The same function in a family: shared tensors, zero biases where Llama has none, no trace of
    quantisation.
    """
    family: Any = type(base)
    tensors = dict(base.state_dict())
    if isinstance(base.config, LlamaConfig):
        family = Qwen2ForCausalLM
        config = Qwen2Config(**{name: getattr(base.config, name) for name in SHARED_FIELDS})
    else:
        fields = base.config.to_dict()
        fields.pop("quantization_config", None)
        config = family.config_class.from_dict(fields)
    # By the weights themselves: transformers does not read the width of a head in a GGUF file.
    head_dim = len(tensors["model.layers.0.self_attn.k_proj.weight"]) // config.num_key_value_heads
    if head_dim != getattr(config, "head_dim", config.hidden_size // config.num_attention_heads):
        config.head_dim = head_dim
    if family is Qwen2ForCausalLM:
        for name, weight in list(tensors.items()):
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                tensors.setdefault(name.replace(".weight", ".bias"), weight.new_zeros(weight.shape[0]))
    plain, info = family.from_pretrained(
        None, config=config, state_dict=tensors, dtype=base.dtype, output_loading_info=True
    )
    if info["missing_keys"] or info["unexpected_keys"]:
        names = info["missing_keys"] or info["unexpected_keys"]
        raise ConversionError(f"tensors do not fit {family.__name__}: {names}")
    plain.generation_config = base.generation_config
    return cast(PreTrainedModel, plain)
