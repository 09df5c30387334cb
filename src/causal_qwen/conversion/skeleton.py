"""skeleton(): a causal model without memory for its weights, to be counted and not to be run.

Of a source only the configuration is read: JSON, or the header of a GGUF file. The published shapes of
Qwen2.5 are known by name, where neither a directory nor a hub is at hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, PreTrainedConfig, Qwen2Config

from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion.checkpoints import (
    CAUSAL,
    EMBEDDED,
    FAMILIES,
    guarded,
    locate,
    read_checkpoint,
    read_config,
)
from causal_qwen.conversion.gguf import gguf_config
from causal_qwen.conversion.headers import ConversionError
from causal_qwen.conversion.sources import family_of
from causal_qwen.conversion.transfer import causal_config

__all__ = ["SHAPES", "is_shape", "skeleton", "skeleton_of"]

# As published: hidden_size, intermediate_size, layers, heads, key and value heads, rows of the vocabulary,
# and whether W is the embedding.
SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, False),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064, False),
    "Qwen2.5-72B": (8192, 29568, 80, 64, 8, 152064, False),
}
SHAPE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
SHAPE_CONTEXT = 32_768  # tokens that each of them reads


def is_shape(source: str) -> bool:
    """Whether ``source`` names a published shape, and no directory that has the same name."""
    return source in SHAPES and not Path(source).exists()


def skeleton(source: str, *, dtype: str = "auto", num_token_id: int | None = None) -> CausalLM:
    """The causal model of a source on the device "meta".

    Args:
        source: As for `load_model`, or a name of `SHAPES`. Of a hub id only JSON is fetched.
        dtype: Of the backbone; "auto" is what the configuration says, and float32 where it says nothing.
        num_token_id: The row that <NUM> will take, of a base that is not converted yet; None takes it to be
            one that the base has already.

    Raises:
        ConversionError: If the source is missing, damaged or of another architecture.
    """
    config = _config(source)
    if config.model_type in CAUSAL:
        return skeleton_of(CAUSAL[config.model_type], config, dtype=dtype)
    base, plain = family_of(config)
    if num_token_id is None:
        num_token_id = plain.vocab_size - 1
    rows = max(plain.vocab_size, num_token_id + 1)
    family = FAMILIES[base]
    return skeleton_of(
        family, causal_config(family, plain, num_token_id=num_token_id, vocab_size=rows), dtype=dtype
    )


def skeleton_of(family: type[CausalLM], config: PreTrainedConfig, *, dtype: str = "auto") -> CausalLM:
    """The model of a causal configuration on the device "meta"; heads are float32 whatever the rest is."""
    wanted = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        model: Any = guarded(family.__name__, lambda: family(config))
    model.model.to(wanted)
    model.lm_head.to(wanted)
    return cast(CausalLM, model)


def _config(source: str) -> PreTrainedConfig:
    """Of the source's own architecture."""
    if is_shape(source):
        fields = dict(zip(SHAPE_FIELDS, SHAPES[source], strict=True))
        return Qwen2Config(**fields, max_position_embeddings=SHAPE_CONTEXT, dtype=torch.bfloat16)
    try:
        path = locate(source, weights=False)
    except ConversionError as error:
        if source == EMBEDDED or Path(source).exists():
            raise
        raise ConversionError(f"{error}; a shape can be named without one: {', '.join(SHAPES)}") from error
    if path.is_file():
        return gguf_config(read_checkpoint(source))
    read_config(source)  # refuses another architecture
    return cast(
        PreTrainedConfig,
        guarded(
            source, lambda: AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        ),
    )
