"""A tiny model that writes numbers of several digits, and its processor."""

import torch

from causal_qwen import CausalQwen2Processor
from causal_qwen.conversion.vocabulary import choose_num_token
from conftest import tiny_causal, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


def number_processor(**options):
    """Reads numbers as values, and chats."""
    tokenizer = choose_num_token(tiny_tokenizer(), 300).tokenizer
    tokenizer.chat_template = TEMPLATE
    return CausalQwen2Processor(tokenizer, **options)


def number_speaker(**overrides):
    """Says numbers often, with narrow intervals, so that many digits are written; no token ends a text."""
    spelling = number_processor().spelling
    model = tiny_causal(value_center=3.0, value_spread=0.3, number_spelling=spelling, **overrides)
    with torch.no_grad():
        model.action.bias[258] += 6.0
        model.action.number_noise.fill_(1e-4)
        model.action.b_noise.fill_(1e-5)
        model.abduction.scale.bias.sub_(12.0)
    model.generation_config.eos_token_id = None
    return model
