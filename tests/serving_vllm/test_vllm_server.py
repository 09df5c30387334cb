"""vLLM's own server, started as its users start it, asked by the openai client."""

import os
import socket
import subprocess
import sys
import time
from importlib.metadata import entry_points

import openai
import pytest

from causal_qwen import Individual

START = 300.0  # seconds that a start may take on a slow machine


@pytest.fixture(scope="module")
def client(base_directory, tmp_path_factory):
    """A client of ``vllm serve DIR``: no flag but the port, and the size that a small machine has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", base_directory]
    sizes = ["--max-model-len", "512", "--max-num-seqs", "16", "--dtype", "float32", "--enforce-eager"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *sizes],
            stdout=stream,
            stderr=stream,
            env=environment,
        )
    asked = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        _wait(asked, server, log)
        yield asked
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait(client, server, log) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and server.poll() is None:
        try:
            client.models.list()
        except openai.APIConnectionError:
            time.sleep(1.0)
        else:
            return
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def complete(client, **settings) -> str:
    xargs = settings.pop("vllm_xargs", {})
    model = client.models.list().data[0].id
    answer = client.completions.create(
        model=model,
        prompt="Once upon a time, there was",
        max_tokens=16,
        extra_body={"vllm_xargs": xargs},
        **settings,
    )
    return answer.choices[0].text


def test_the_plugin_is_found_by_its_entry_point():
    names = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert names["causal_qwen"] == "causal_qwen.serving.vllm:register"
    assert not [entry for entry in entry_points(group="vllm.logits_processors") if "causal" in entry.value]


def test_an_individual_is_the_same_in_any_form(client):
    causal = {"inference_mode": "causal"}
    first = complete(client, vllm_xargs=causal | {"individual": 7})
    assert first == complete(client, vllm_xargs=causal | {"individual": Individual(7).to_json()})
    assert first == complete(client, vllm_xargs=causal, seed=7)
    assert first != complete(client, vllm_xargs=causal | {"individual": 8})
    assert first != complete(client, vllm_xargs=causal | {"individual": 7, "persistence": 0.9})


def test_temperature_is_noise_and_inert_without_sampling(client):
    greedy = complete(client, vllm_xargs={"inference_mode": "compatible"}, temperature=0.0)
    assert complete(client, temperature=0.3) == complete(client, temperature=1.7) == greedy
    calm = complete(client, temperature=0.0, vllm_xargs={"inference_mode": "causal", "individual": 7})
    assert calm == greedy


def test_tokens_are_drawn_by_whoever_is_named(client):
    compatible = {"inference_mode": "compatible"}
    first = complete(client, vllm_xargs=compatible | {"gumbel": 7})
    assert first == complete(client, vllm_xargs=compatible | {"gumbel": 7}, seed=1)
    assert first != complete(client, vllm_xargs=compatible | {"gumbel": 8})
    greedy = complete(client, vllm_xargs=compatible, temperature=0.0)
    assert greedy == complete(client, vllm_xargs=compatible | {"gumbel": 7}, temperature=0.0)


def test_chats_are_answered(client):
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Say hello."}],
        max_tokens=8,
        extra_body={"vllm_xargs": {"inference_mode": "causal", "individual": 3}},
    )
    assert answer.choices[0].message.content


@pytest.mark.parametrize(
    ("xargs", "words"),
    [
        ({"inference_mode": "casual"}, "inference_mode is 'casual'; choose one of"),
        ({"persistance": 0.5}, "did you mean 'persistence'"),
        ({"inference_mode": "causal", "density_floor": 1.5}, "density_floor"),
        ({"inference_mode": "compatible", "individual": 7}, "samples tokens, not individuals"),
        ({"individual": "{}"}, "not an individual"),
        ({"gumbel": 7}, "gumbel draws tokens from softmax"),
    ],
)
def test_what_is_wrong_is_refused_in_words(client, xargs, words):
    with pytest.raises(openai.BadRequestError, match=words):
        complete(client, vllm_xargs=xargs)
