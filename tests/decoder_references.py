"""Tiny models of transformers that the decoder is held against."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def reference(family, **changes):
    """A tiny transformers model whose every parameter is random, biases and norms included."""
    torch.manual_seed(0)
    config_class, model_class = FAMILIES[family]
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    rope = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    width = {"head_dim": 16} if family == "qwen3" else {}  # twice hidden_size / num_attention_heads
    model = model_class(config_class(**(sizes | heads | rope | width | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2).add_(1.0 if "norm" in name else 0.0)
    return model
