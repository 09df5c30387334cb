"""GGUF files out: a plain Qwen2 or Qwen3 model with its vocabulary, as llama.cpp and Ollama read it.

Tensors are written one at a time, each quantised on the way. This module does not know causal models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from causal_qwen.conversion.headers import ConversionError
from causal_qwen.conversion.softmax_view import SoftmaxView
from causal_qwen.progress import Watch

__all__ = ["BIASED", "Kind", "splitting", "write_gguf"]

Kind = Literal["f32", "f16", "q8_0"]
KINDS = {
    "f32": (GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
# Families whose head has a bias in llama.cpp.
BIASED = ("qwen2",)
# The expression by which Qwen2 and Qwen3 split text: digits alone, at most one break before letters.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
REGEX = "ByteLevel with its regex"
LLAMA_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPLITTINGS = {
    (REGEX,): "gpt-2",
    ("digits", REGEX): "smollm",
    (QWEN_SPLIT, "ByteLevel"): "qwen2",
    (LLAMA_SPLIT, "ByteLevel"): "llama-bpe",
}


def write_gguf(
    file: Path, view: SoftmaxView, *, kind: Kind, description: str, watch: Watch, phase: str = "writing"
) -> None:
    """Write a model and its vocabulary.

    Args:
        file: To write.
        view: What to write; its bias goes with it where the family has a place for one.
        kind: Of the matrices; vectors are float32 always.
        description: Of the file, in its metadata.
        watch: Told the elements.
        phase: What the watch is told that this is.

    Raises:
        ConversionError: If llama.cpp has no name for how the tokenizer splits text, or its tokens have gaps.
    """
    config: Any = view.config
    quantisation, file_type = KINDS[kind]
    writer = gguf.GGUFWriter(file, config.model_type)
    writer.add_description(description)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_vocabulary(writer, view.tokenizer, config.vocab_size)
    tensors = dict(_named(view))
    kinds = {name: _kind_of(tensor, quantisation) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        size, stored = tensor.numel(), kinds[name]
        block, block_bytes = GGML_QUANT_SIZES[stored]
        writer.add_tensor_info(
            name, tensor.shape, np.dtype(np.float32), size // block * block_bytes, raw_dtype=stored
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with watch(phase, sum(tensor.numel() for tensor in tensors.values())) as advance:
        for name, tensor in tensors.items():
            array = tensor.detach().cpu().float().contiguous().numpy()
            writer.write_tensor_data(gguf.quants.quantize(array, kinds[name]))
            advance(tensor.numel())
    writer.close()


def _named(view: SoftmaxView) -> Iterator[tuple[str, Tensor]]:
    """The tensors by llama.cpp's names."""
    config: Any = view.config
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in view.tensors.items():
        module, _, part = name.rpartition(".")
        yield f"{names.get_name(module)}.{part}", tensor
    if view.bias is not None and config.model_type in BIASED:
        yield "output.bias", view.bias


def _kind_of(tensor: Tensor, wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    """Vectors are float32; rows that a block does not divide are float16."""
    if tensor.ndim == 1:
        return GGMLQuantizationType.F32
    if tensor.shape[-1] % GGML_QUANT_SIZES[wanted][0]:
        return GGMLQuantizationType.F16
    return wanted


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Tokens in the order of their ids, rows without one as [PAD<row>], and merges."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token for token in state["added_tokens"]}
    tokens = [f"[PAD{row}]" for row in range(rows)]
    types = [TokenType.UNUSED] * rows
    for token, index in tokenizer.get_vocab().items():
        if token == tokens[index]:  # a name for no token
            continue
        tokens[index], types[index] = token, TokenType.NORMAL
    for index, token in added.items():
        if types[index] != TokenType.UNUSED:
            types[index] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_named_splitting(state))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    for add, index in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if index is not None:
            add(index)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def splitting(state: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer.json splits text before merging; None where none is known here."""
    splitter = state["pre_tokenizer"] or {}
    parts = splitter["pretokenizers"] if splitter.get("type") == "Sequence" else [splitter]
    return SPLITTINGS.get(tuple(_signature(part) for part in parts))


def _named_splitting(state: dict[str, Any]) -> str:
    name = splitting(state)
    if state["model"]["type"] != "BPE" or name is None:
        raise ConversionError(
            f"the tokenizer ({state['model']['type']}, {json.dumps(state['pre_tokenizer']):.150}) splits "
            "text in a way that has no known name in llama.cpp; use --to hf, and llama.cpp's own converter"
        )
    return name


def _signature(part: dict[str, Any]) -> str:
    if part.get("type") == "ByteLevel" and not part.get("add_prefix_space"):
        return REGEX if part.get("use_regex") else "ByteLevel"
    if part.get("type") == "Digits" and part.get("individual_digits"):
        return "digits"
    if part.get("type") == "Split" and part.get("behavior") == "Isolated" and "Regex" in part["pattern"]:
        return str(part["pattern"]["Regex"])
    return json.dumps(part)
