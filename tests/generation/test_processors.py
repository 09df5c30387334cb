"""Our processors are transformers', bit for bit."""

import re

import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from causal_qwen.generation.processors import (
    RepetitionPenalty,
    Suppression,
    Temperature,
    TopK,
    TopP,
    processors_of,
)
from causal_qwen.native_model import GenerationDefaults

PAIRS = [
    (RepetitionPenalty(1.3), RepetitionPenaltyLogitsProcessor(1.3)),
    (Temperature(0.7), TemperatureLogitsWarper(0.7)),
    (TopK(5), TopKLogitsWarper(5)),
    (TopK(500), TopKLogitsWarper(500)),
    (TopP(0.8), TopPLogitsWarper(0.8)),
    (Suppression(30), SuppressTokensLogitsProcessor(list(range(30, 40)))),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_processor_is_transformers_own(ours, theirs):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 40, generator=generator) * 3
    logits[0, 3:9] = logits[0].max()  # ties
    ids = torch.randint(0, 40, (4, 6), generator=generator)
    before = logits.clone()
    assert torch.equal(ours(ids, logits), theirs(ids, before.clone()))
    assert torch.equal(logits, before)


def test_only_what_changes_something_is_run_and_in_transformers_order():
    every = GenerationDefaults(do_sample=True, repetition_penalty=1.1, temperature=0.5, top_k=3, top_p=0.9)
    assert [type(one) for one in processors_of(every)] == [RepetitionPenalty, Temperature, TopK, TopP]
    assert processors_of(GenerationDefaults()) == []
    assert processors_of(GenerationDefaults(do_sample=True)) == [TopK(50)]  # transformers' default
    assert processors_of(GenerationDefaults(temperature=0.1, top_k=2)) == []  # nothing is sampled
    assert processors_of(GenerationDefaults(do_sample=True, top_k=0)) == []


@pytest.mark.parametrize(
    ("processor", "value"),
    [(RepetitionPenalty, 0.0), (Temperature, 0.0), (TopK, -1), (TopP, 0.0), (TopP, 1.5)],
)
def test_a_value_out_of_range_is_named(processor, value):
    with pytest.raises(ValueError, match=re.escape(str(value))):
        processor(value)
