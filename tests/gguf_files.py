"""GGUF files as llama.cpp writes them: a model of transformers with a vocabulary, in float or quantised."""

import json

import gguf
import numpy as np
import torch

# The names of llama.cpp for the tensors of a layer; Qwen3 has two norms more, Qwen2 biases.
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
}
NORMAL, CONTROL, UNUSED = 1, 3, 5


def vocabulary(tokenizer):
    """Tokens in the order of their ids, the ids of those that are added, and merges."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    return tokens, {entry["id"] for entry in state["added_tokens"]}, merges


def write_gguf(
    model, tokenizer, path, *, kind="F32", placeholders=True, spare_type=UNUSED, control=True, extra=None
):
    """Write ``model`` with its vocabulary.

    Args:
        model: Of Qwen2, Qwen3 or Llama.
        tokenizer: Byte-level BPE.
        path: The file.
        kind: Of the matrices: F32, F16, BF16 or Q8_0; vectors are F32.
        placeholders: Whether rows without a token are named [PAD<row>], as llama.cpp's converter names them.
        spare_type: What a placeholder is marked as.
        control: Whether added tokens are marked as such.
        extra: Tensors beside the model's, by llama.cpp's names.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    tokens, added, merges = vocabulary(tokenizer)
    types = [CONTROL if index in added and control else NORMAL for index in range(len(tokens))]
    if not merges:  # a file has at least one, of tokens that it has
        tokens, types, merges = [*tokens, "ab"], [*types, NORMAL], ["a b"]
    if placeholders:
        spare = range(len(tokens), config.vocab_size)
        tokens, types = [*tokens, *(f"[PAD{row}]" for row in spare)], [*types, *(spare_type for _ in spare)]
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names |= {} if config.tie_word_embeddings else {"output": "lm_head"}
    for index in range(config.num_hidden_layers):
        names |= {f"blk.{index}.{theirs}": f"model.layers.{index}.{ours}" for theirs, ours in LAYER.items()}
    tensors = model.state_dict()
    for theirs, ours in names.items():
        for part in ("weight", "bias"):
            if (name := f"{ours}.{part}") in tensors:
                tensor = _as_llama_cpp(tensors[name], theirs, config)
                _add(writer, f"{theirs}.{part}", tensor, TYPES[kind])
    for name, tensor in (extra or {}).items():
        _add(writer, name, tensor, TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_llama_cpp(tensor, name, config):
    """Llama's queries and keys have the two halves of a head interleaved in GGUF."""
    if config.model_type != "llama" or not name.endswith(("attn_q", "attn_k")):
        return tensor
    heads = config.num_attention_heads if name.endswith("attn_q") else config.num_key_value_heads
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _add(writer, name, tensor, kind):
    array = np.ascontiguousarray(tensor.detach().to(torch.float32).numpy())
    if array.ndim == 1 or kind == TYPES["F32"]:
        writer.add_tensor(name, array)
    elif kind == TYPES["F16"]:
        writer.add_tensor(name, array.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
