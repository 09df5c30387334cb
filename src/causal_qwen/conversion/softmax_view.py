"""The softmax view of a causal model as a plain model of its base's family: logits = W'z + b', and no more.

W' = W·W_loc and b' = W·b_loc + b, so that softmax(W'z + b') is what `compatible` decides by. The row of <NUM>
goes; numbers, scales and thresholds have no place in the family. This module does not know files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion.assembly import EMBEDDING, HEAD
from causal_qwen.conversion.checkpoints import FAMILIES
from causal_qwen.conversion.sources import SHARED_FIELDS
from causal_qwen.conversion.vocabulary import settings_of
from causal_qwen.heads import exact
from causal_qwen.processing_causal_qwen2 import NUM_TOKEN

__all__ = ["SoftmaxView", "as_llama", "softmax_view"]

# Modules of a causal model that the base's family does not have.
HEADS = ("abduction.", "action.", "numeric_embedding.")
BLOCK = 8192  # rows of W at a time


@dataclass(frozen=True)
class SoftmaxView:
    """A plain model, and what of the logits it has no place for.

    Args:
        family: The base's class in transformers.
        config: Its configuration.
        tensors: By the family's names; a head that is tied to the embedding is left out.
        bias: (V,) b', 0 on the median token; None where it is 0 on all tokens, as after conversion.
        tokenizer: Without <NUM>.
        generation_config: Without what only causal models know.
    """

    family: Any
    config: PreTrainedConfig
    tensors: dict[str, Tensor]
    bias: Tensor | None
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig


@torch.no_grad()
def softmax_view(model: CausalLM, tokenizer: PreTrainedTokenizerBase) -> SoftmaxView:
    """The plain model whose logits are those of ``model`` without <NUM>, but for a bias of tokens.

    Args:
        model: Converted or trained; its tensors are shared where they stay as they are.
        tokenizer: With <NUM>.
    """
    plain: Any = model
    family: Any = next(base for base, causal in FAMILIES.items() if isinstance(model, causal))
    tensors = {name: tensor for name, tensor in plain.state_dict().items() if not name.startswith(HEADS)}
    tied = bool(plain.config.tie_word_embeddings)
    W, loc = tensors[HEAD], plain.abduction.loc
    bias = exact(plain.action.bias) + _product(W, exact(loc.bias)[None]).squeeze(1)  # (V,)
    if not _is_identity(loc.weight):
        tensors[HEAD], tied = _product(W, exact(loc.weight).T).to(W.dtype), False  # (V, H)
    rows = len(W)
    num = plain.config.num_token_id
    if num is not None:
        for name in (EMBEDDING, HEAD):
            tensors[name] = _without_row(tensors[name], num)
        bias = _without_row(bias, num)
        rows, tokenizer = len(bias), _without_num(tokenizer, num)
    if tied:
        del tensors[HEAD]
    bias = bias - bias.median()
    known = family.config_class().to_dict()
    fields = {name: value for name, value in plain.config.to_dict().items() if name in known}
    fields |= {"vocab_size": rows, "tie_word_embeddings": tied, "architectures": [family.__name__]}
    fields.pop("model_type")
    config = family.config_class(**fields)
    config.dtype = plain.dtype
    ours = plain.generation_config.to_dict()
    generation = {name: ours[name] for name in GenerationConfig().to_dict() if name in ours}
    return SoftmaxView(
        family,
        config,
        tensors,
        bias if bias.any() else None,
        tokenizer,
        GenerationConfig(**generation),
    )


def as_llama(view: SoftmaxView) -> SoftmaxView:
    """The same function of Qwen2 as Llama, which has biases on q, k and v if it is asked to, and one on o.

    transformers gives Qwen's tokenizer to whatever calls itself Qwen2, and Llama the one that it came with.
    """
    config: Any = view.config
    biases = {name: tensor for name, tensor in view.tensors.items() if name.endswith("_proj.bias")}
    fields = {name: getattr(config, name) for name in SHARED_FIELDS}
    fields["attention_bias"] = any(bool(bias.any()) for bias in biases.values())
    fields["head_dim"] = getattr(config, "head_dim", None)
    llama = LlamaConfig(**fields, architectures=[LlamaForCausalLM.__name__])
    llama.dtype = config.dtype
    tensors = {name: tensor for name, tensor in view.tensors.items() if name not in biases}
    if llama.attention_bias:
        outputs = [name for name in tensors if name.endswith("o_proj.weight")]
        tensors |= biases | {
            name.replace(".weight", ".bias"): tensors[name].new_zeros(len(tensors[name])) for name in outputs
        }
    return replace(view, family=LlamaForCausalLM, config=llama, tensors=tensors)


def _is_identity(weight: Tensor) -> bool:
    height, width = weight.shape
    return height == width and torch.equal(
        weight, torch.eye(height, dtype=weight.dtype, device=weight.device)
    )


def _product(W: Tensor, vectors: Tensor) -> Tensor:
    """W·vectorsᵀ of vectors (n, D): (V, n) float32, summed in float64."""
    return torch.cat([(rows.double() @ vectors.double().T).float() for rows in W.split(BLOCK)])


def _without_row(tensor: Tensor, row: int) -> Tensor:
    """Without the last row; a row that others follow becomes a copy of the next, as spare as it was."""
    if row == len(tensor) - 1:
        return tensor[:row]
    copy = tensor.clone()
    copy[row] = tensor[row + 1]
    return copy


def _without_num(tokenizer: PreTrainedTokenizerBase, num: int) -> PreTrainedTokenizerBase:
    """The tokenizer without <NUM>: its last token is gone, an earlier one is a row without a token again."""
    state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    others = [token for token in state["added_tokens"] if token["content"] != NUM_TOKEN]
    vocabulary = state["model"]["vocab"]
    last = max(tokenizer.get_vocab().values()) == num
    if isinstance(vocabulary, dict) and NUM_TOKEN in vocabulary:
        names = {token: index for token, index in vocabulary.items() if not (last and token == NUM_TOKEN)}
        state["model"]["vocab"] = {
            f"[PAD{num}]" if token == NUM_TOKEN else token: index for token, index in names.items()
        }
    elif not last:  # other added tokens follow, whose ids count the tokens before them
        entry = next(token for token in state["added_tokens"] if token["content"] == NUM_TOKEN)
        others = sorted([*others, entry | {"content": f"[PAD{num}]"}], key=lambda token: token["id"])
    state["added_tokens"] = others
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(state, ensure_ascii=False))
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, **settings_of(tokenizer))
    plain.chat_template = tokenizer.chat_template
    return plain
