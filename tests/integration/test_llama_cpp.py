"""A model that was exported speaks in llama.cpp as it does here, on real pretrained weights."""

import json
import subprocess
import sys

import pytest
import torch

from causal_qwen import Engine, convert
from causal_qwen.conversion import export

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed here (pip install xllamacpp)")
pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was",
    "def fibonacci(n):",
    "In 1969, the first",
    "The best way to cook rice is",
]
TOKENS = 100
# A process of its own: its threads must not wait beside ours. Keys and values in float32, as here.
SPEAKER = """
import json, sys, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx, parameters.n_parallel, parameters.cpuparams.n_threads = 512, 1, 1
parameters.verbosity = -1
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(parameters)
request = {"temperature": 0.0, "cache_prompt": False, "ignore_eos": True, "logprobs": 1}
said = []
for prompt in json.loads(sys.argv[2]):
    answer = server.handle_completions(request | {"prompt": prompt, "max_tokens": int(sys.argv[3])})
    said.append([token["id"] for token in answer["choices"][0]["logprobs"]["content"]])
print("said", json.dumps(said))
"""


def spoken(file, prompts, tokens):
    """Greedy tokens of llama.cpp."""
    command = [sys.executable, "-c", SPEAKER, str(file), json.dumps(prompts), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("said ")]
    return json.loads(line.removeprefix("said "))


@pytest.fixture(scope="module")
def conversion():
    return convert("smollm2", calibration="none")


def ours(conversion, prompts, tokens):
    """Greedy tokens of our engine."""
    # Neither may end a text: llama.cpp's ignore_eos forbids the token.
    options = {"inference_mode": "compatible", "do_sample": False, "min_new_tokens": tokens}
    engine = Engine.from_model(conversion.model)
    inputs = conversion.processor(prompts, return_tensors="pt", padding=True, padding_side="left")
    ids = conversion.model.generate(**inputs, **options, max_new_tokens=tokens, engine=engine)
    return ids[:, inputs["input_ids"].shape[1] :].tolist()


def test_greedy_tokens_are_ours(conversion, tmp_path):
    export(conversion.model, conversion.processor, tmp_path / "plain.gguf", to="gguf", kind="f32")
    assert spoken(tmp_path / "plain.gguf", PROMPTS, TOKENS) == ours(conversion, PROMPTS, TOKENS)


def test_a_bias_of_tokens_is_heard(conversion, tmp_path):
    loud = conversion.processor.tokenizer.convert_tokens_to_ids("Ġbanana")
    with torch.no_grad():
        conversion.model.action.bias[loud] = 100.0
    try:
        export(conversion.model, conversion.processor, tmp_path / "plain.gguf", to="gguf", kind="f32")
    finally:
        with torch.no_grad():
            conversion.model.action.bias[loud] = 0.0
    assert spoken(tmp_path / "plain.gguf", PROMPTS[:1], 3) == [[loud] * 3]
