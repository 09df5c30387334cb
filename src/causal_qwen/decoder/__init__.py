"""Our own decoder: a complete decoder-only transformer and its generation, without transformers."""

from causal_qwen.decoder.cache import KVCache, kv_cache_bytes
from causal_qwen.decoder.config import DecoderConfig, RopeScaling
from causal_qwen.decoder.engine import Engine
from causal_qwen.decoder.generation import Generation, generate, pad_left
from causal_qwen.decoder.model import CausalLM, DecoderOutput
from causal_qwen.decoder.sampling import Sampling
from causal_qwen.decoder.stopping import JsonComplete, Repetition, StopReason, StopString
from causal_qwen.decoder.weights import from_hf, load_directory

__all__ = [
    "CausalLM",
    "DecoderConfig",
    "DecoderOutput",
    "Engine",
    "Generation",
    "JsonComplete",
    "KVCache",
    "Repetition",
    "RopeScaling",
    "Sampling",
    "StopReason",
    "StopString",
    "from_hf",
    "generate",
    "kv_cache_bytes",
    "load_directory",
    "pad_left",
]
