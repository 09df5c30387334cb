"""The server as its clients use it: the openai package, curl, plain HTTP."""

import json
import math
import shutil
import subprocess
import threading
import time

import httpx
import openai
import pytest
import torch

from causal_qwen import Individual, counterfactual
from causal_qwen.counterfactual.comparison import Side, compare
from causal_qwen.data import prompt_batch
from causal_qwen.decoder.json_scanner import JsonScanner
from causal_qwen.evaluation import predict
from causal_qwen.generation.batching import NativeBatch
from causal_qwen.prompting import Settings, Speaker
from serving_models import NAME, NUM, served, tiny_desk

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "It weighs 12.5 kg and"


@pytest.fixture(scope="module")
def desk(one_thread):
    return tiny_desk(batch=6, tokens=200, seconds=60.0)


@pytest.fixture(scope="module")
def address(desk):
    with served(desk) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def speaker(desk):
    return Speaker(desk.model, desk.processor, desk.engine)


def post(address, path, **body):
    return httpx.post(f"{address}{path}", json=body, timeout=60)


def alone(speaker, prompt, seed, **settings):
    (answer,) = speaker.answer([prompt], Settings(**settings), [Individual(seed)])
    return answer


def test_openai_completion(client, speaker):
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, seed=5)
    expected = alone(speaker, PROMPT, 5, mode="causal", max_new_tokens=20)
    (choice,) = answer.choices
    assert choice.text == expected.text
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == speaker.length(PROMPT)
    assert choice.individual == {"seed": 5, "persistence": None, "start": 0}
    numbers = [(n["position"], n["value"], n["lower"], n["upper"], n["extrapolates"]) for n in choice.numbers]
    assert numbers == [(n.position, n.value, n.lower, n.upper, n.extrapolates) for n in expected.numbers]
    assert all(number["text"] in choice.text for number in choice.numbers)


def test_openai_chat_and_stream(client, speaker):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 7"}]
    whole = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=24, seed=9)
    text = whole.choices[0].message.content
    assert text == alone(speaker, messages, 9, mode="causal", max_new_tokens=24).text
    stream = client.chat.completions.create(
        model=NAME,
        messages=messages,
        max_tokens=24,
        seed=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == text
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage == whole.usage
    assert len(events) > 10


def test_openai_stream_of_several_choices(client):
    prompts = [PROMPT, "Another text"]
    whole = client.completions.create(model=NAME, prompt=prompts, n=2, seed=3, max_tokens=12)
    assert len({choice.text for choice in whole.choices}) == 4
    assert [choice.individual["seed"] for choice in whole.choices] == [3, 4, 3, 4]
    texts = ["", "", "", ""]
    for event in client.completions.create(
        model=NAME, prompt=prompts, n=2, seed=3, max_tokens=12, stream=True
    ):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        ({"inference_mode": "standard"}, {"mode": "standard"}),
        (
            {"inference_mode": "standard", "sample": True, "top_k": 0},
            {"mode": "standard", "sample": True, "top_k": 0},
        ),
        ({"inference_mode": "compatible", "temperature": 0}, {"mode": "compatible"}),
        (
            {"inference_mode": "compatible", "temperature": 0.7, "top_p": 0.9},
            {"mode": "compatible", "sample": True, "temperature": 0.7, "top_p": 0.9},
        ),
        (
            {"temperature": 0.6, "persistence": 0.9, "density_floor": 0.1, "top_p": 0.8},
            {"mode": "causal", "temperature": 0.6, "persistence": 0.9, "density_floor": 0.1, "top_p": 0.8},
        ),
        ({"stop": ["e", "q7"]}, {"mode": "causal", "stop": ("e", "q7")}),
        (
            {"interval_level": 0.5, "raw_intervals": True},
            {"mode": "causal", "level": 0.5, "raw_intervals": True},
        ),
    ],
    ids=lambda value: next(iter(value)),
)
def test_every_setting_decides_as_alone_while_others_run(address, speaker, body, settings):
    """Eight others, with other settings, come and go meanwhile."""
    others = [
        threading.Thread(
            target=post, args=(address, "/v1/completions"), kwargs={"prompt": "x" * i, "max_tokens": 5 * i}
        )
        for i in range(1, 9)
    ]
    for other in others:
        other.start()
    answer = post(address, "/v1/completions", prompt=PROMPT, max_tokens=30, seed=11, **body)
    for other in others:
        other.join()
    expected = alone(speaker, PROMPT, 11, max_new_tokens=30, **settings)
    (choice,) = answer.json()["choices"]
    assert choice["text"] == expected.text
    assert choice["finish_reason"] == ("stop" if expected.finish_reason == "stop_string" else "length")
    assert [n["lower"] for n in choice["numbers"]] == [n.lower for n in expected.numbers]
    assert (choice["individual"] or {}).get("seed") == expected.seed


def test_an_individual_goes_on_where_it_was(address, desk):
    person = Individual(6, 0.5, 3)
    body = {"seed": 6, "persistence": 0.5, "start": 3}
    answer = post(address, "/v1/completions", prompt=PROMPT, max_tokens=15, individual=body).json()
    speaker = Speaker(desk.model, desk.processor, desk.engine)
    (expected,) = speaker.answer([PROMPT], Settings(mode="causal", max_new_tokens=15), [person])
    assert answer["choices"][0]["text"] == expected.text
    assert answer["choices"][0]["individual"] == body


def test_log_probabilities_are_those_of_softmax(address, desk):
    answer = post(address, "/v1/completions", prompt=PROMPT, max_tokens=8, seed=2, logprobs=3).json()
    logprobs, text = answer["choices"][0]["logprobs"], answer["choices"][0]["text"]
    assert "".join(logprobs["tokens"]) == text
    output = desk.model.generate(
        **prompt_batch(desk.processor, [PROMPT]),
        inference_mode="causal",
        individual=2,
        max_new_tokens=8,
        engine=desk.engine,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[0, -8:]
    rows = torch.stack([step[0].log_softmax(-1) for step in output.logits])
    expected = rows.gather(1, tokens[:, None])[:, 0].tolist()
    assert logprobs["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    best = [max(one.values()) for one in logprobs["top_logprobs"]]
    assert best == pytest.approx(rows.amax(1).tolist(), abs=1e-4)
    chat = post(
        address,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
    ).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert "".join(entry["token"] for entry in content) == chat["choices"][0]["message"]["content"]


def test_json_objects(address):
    for seed in range(6):
        answer = post(
            address,
            "/v1/completions",
            prompt=PROMPT,
            max_tokens=200,
            seed=seed,
            response_format={"type": "json_object"},
        ).json()
        (choice,) = answer["choices"]
        assert "{".startswith(choice["text"].lstrip()[:1])
        scanner = JsonScanner()
        scanner.push(choice["text"])
        assert not scanner.failed
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)


def test_counterfactual_is_that_of_the_library(address, desk):
    prompts = ["He weighs 12.5 kg and", PROMPT]
    body = post(
        address, "/v1/counterfactual", prompt=PROMPT, interventions=prompts, seed=4, max_tokens=12
    ).json()
    expected = counterfactual(
        desk.model, desk.processor, PROMPT, prompts, 4, max_new_tokens=12, engine=desk.engine
    ).to_dict()
    for mine, theirs in zip(
        [body["factual"], *body["interventions"], body["control"]],
        [expected["factual"], *expected["interventions"], expected["control"]],
        strict=True,
    ):
        for name in ("prompt", "text", "identical_to_factual", "edit_distance", "divergence"):
            assert mine[name] == theirs[name]
        assert "".join(mine["tokens"]) == mine["text"]
        assert [n["value"] for n in mine["numbers"]] == [n["value"] for n in theirs["numbers"]]
    assert body["interventions"][1]["identical_to_factual"]
    assert body["control"]["individual"]["seed"] == 5


def test_predictions_are_those_of_the_library(address, desk):
    rows = [{"weight": 100 * i} for i in range(1, 7)]
    body = post(address, "/v1/predict", rows=rows, interval_level=0.8).json()
    expected = list(
        predict(
            desk.model,
            desk.processor,
            rows,
            reading=desk.reading,
            level=0.8,
            batch_size=1,
            engine=desk.engine,
        )
    )
    assert [one["median"] for one in body["data"]] == pytest.approx([one.median for one in expected])
    assert [one["prob_num"] for one in body["data"]] == pytest.approx([one.prob_num for one in expected])
    assert body["data"][0]["prompt"] == expected[0].prompt
    assert body["template"] == desk.reading.templates[0]
    wrong = post(address, "/v1/predict", rows=[{"weight": 1}, {"height": 2}])
    assert wrong.status_code == 400
    assert "weight" in wrong.json()["error"]["message"]
    own = post(address, "/v1/predict", rows=[{"prompt": "It costs "}], template="{prompt}").json()
    assert math.isfinite(own["data"][0]["median"])


def test_comparison_is_that_of_the_library(address, desk, speaker):
    a, b = "The first text", "Another text"
    settings = {"max_new_tokens": 8, "temperature": 0.9}
    expected = compare(
        Side(speaker, [a], Settings(**settings)),
        Side(speaker, [b], Settings(**settings)),
        individuals=5,
        scores=["distinct"],
        seed=3,
        batch_size=1,
    ).first
    body = {"a": {"prompt": a}, "b": {"prompt": b}, "score": "distinct_tokens", "pairs": 5, "seed": 3}
    body |= {"max_tokens": 8, "temperature": 0.9}
    whole = post(address, "/v1/compare", **body).json()
    assert whole["estimate"]["difference"] == pytest.approx(-expected.difference)  # B − A
    assert whole["estimate"]["lower"] == pytest.approx(-expected.upper)
    assert [pair["seed"] for pair in whole["pairs"]] == [3, 4, 5, 6, 7]
    with httpx.stream("POST", f"{address}/v1/compare", json=body | {"stream": True}, timeout=60) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert [event["object"] for event in events] == ["compare.pair"] * 5 + ["compare.result"]
    assert events[-1]["pairs"] == whole["pairs"]
    for score in ("nats", "characters", {"contains": "e"}, "number", "tokens"):
        other = post(address, "/v1/compare", **body | {"score": score, "coupling": "independent"}).json()
        assert len(other["pairs"]) == 5
    refused = post(address, "/v1/compare", **body | {"inference_mode": "compatible"})
    assert refused.status_code == 400


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(address):
    command = ["curl", "-sN", f"{address}/v1/completions", "-H", "Content-Type: application/json"]
    body = json.dumps({"prompt": "Hello", "max_tokens": 4, "stream": True, "seed": 1})
    said = subprocess.run(
        [*command, "-d", body], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    events = [line.removeprefix("data: ") for line in said.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["individual"]["seed"] == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("completions", b"{", 400, None, None),
        ("completions", b"[]", 400, None, None),
        ("completions", b'{"prompt": 5}', 400, "prompt", None),
        ("completions", b'{"prompt": ""}', 400, "prompt", None),
        ("completions", b'{"prompt": "a", "colour": 1}', 400, "colour", "unknown_field"),
        ("completions", b'{"prompt": "a", "temperature": -1}', 400, "temperature", None),
        ("completions", b'{"prompt": "a", "temperature": NaN}', 400, "temperature", None),
        ("completions", b'{"prompt": "a", "max_tokens": 10000}', 400, "max_tokens", None),
        ("completions", b'{"prompt": "a", "seed": 1, "individual": 2}', 400, None, None),
        ("completions", b'{"prompt": "a", "presence_penalty": 1}', 400, "presence_penalty", None),
        ("completions", b'{"prompt": "a", "model": "gpt-4"}', 404, "model", "model_not_found"),
        ("completions", b'{"prompt": "\\ud800"}', 400, None, None),
        ("completions", b'{"prompt": "' + b"a" * 600 + b'"}', 400, None, "context_length_exceeded"),
        ("chat/completions", b'{"messages": []}', 400, "messages", None),
        (
            "chat/completions",
            b'{"messages": [{"role": "king", "content": "a"}]}',
            400,
            "messages.0.role",
            None,
        ),
        ("predict", b'{"rows": []}', 400, "rows", None),
    ],
)
def test_errors_have_openai_s_shape(address, path, body, status, param, code):
    response = httpx.post(
        f"{address}/v1/{path}", content=body, headers={"Content-Type": "application/json"}, timeout=30
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert param is None or error["param"].startswith(param)
    assert "/" not in error["message"].replace("application/json", "")


def test_paths_and_methods_that_are_not_there(address):
    for response, status in (
        (httpx.get(f"{address}/v1/nothing"), 404),
        (httpx.get(f"{address}/v1/completions"), 405),
        (httpx.get(f"{address}/v1/models/other"), 404),
        (httpx.get(f"{address}/../pyproject.toml"), 404),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_the_page_the_description_and_the_figures(address):
    page = httpx.get(f"{address}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "http" not in httpx.get(f"{address}/docs").text.replace("http-equiv", "")
    assert "/v1/completions" in httpx.get(f"{address}/openapi.json").json()["paths"]
    assert httpx.get(f"{address}/health").json()["status"] == "ok"
    (card,) = httpx.get(f"{address}/v1/models").json()["data"]
    assert card["id"] == NAME
    assert card["writes_numbers"]
    assert card["target"] == "price"
    figures = httpx.get(f"{address}/metrics").text
    assert 'causal_qwen_tokens_total{kind="generated"}' in figures
    assert "causal_qwen_first_token_seconds_bucket" in figures


def test_a_client_that_goes_away_frees_its_row(desk, monkeypatch):
    step = NativeBatch.step  # slowed down, so that the text cannot end before its client goes away
    monkeypatch.setattr(NativeBatch, "step", lambda batch: (time.sleep(0.01), step(batch))[1])
    with served(tiny_desk(batch=1, tokens=400)) as (address, app):
        with httpx.stream(
            "POST", f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 400, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(lines), next(lines), next(lines)  # who speaks, which is known at once, and a token
            assert app.state.scheduler.running == 1
        deadline, disconnected = time.monotonic() + 10, app.state.scheduler.metrics.disconnected
        while not disconnected.value() and time.monotonic() < deadline:  # counted when the row is free
            time.sleep(0.01)
        assert disconnected.value() == 1
        assert app.state.scheduler.running == 0
        with pytest.raises(httpx.ReadTimeout):  # nor does one that waits for the whole
            httpx.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 400}, timeout=0.15)
        while app.state.scheduler.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert app.state.scheduler.running == 0
        assert post(address, "/v1/completions", prompt="a", max_tokens=2).status_code == 200


def test_a_full_queue_says_when_to_come_again(desk, monkeypatch):
    step, go = NativeBatch.step, threading.Event()  # nothing ends before the queue has been seen
    monkeypatch.setattr(NativeBatch, "step", lambda batch: (go.wait(60), step(batch))[1])
    with served(tiny_desk(batch=1, waiting=1)) as (address, app):
        done = []

        def ask():
            done.append(post(address, "/v1/completions", prompt="a", max_tokens=3).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30
        while (
            not (app.state.scheduler.running and app.state.scheduler.waiting) and time.monotonic() < deadline
        ):
            time.sleep(0.005)
        response = post(address, "/v1/completions", prompt="a", max_tokens=2)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
        go.set()
        for thread in threads:
            thread.join()
        assert done == [200, 200]


def test_limits_of_time_and_size(desk):
    with served(tiny_desk(batch=1, seconds=0.3, tokens=500, body=1000)) as (address, _):
        answer = post(address, "/v1/completions", prompt="a", max_tokens=500).json()
        assert answer["choices"][0]["finish_reason"] == "timeout"
        assert 0 < answer["usage"]["completion_tokens"] < 500
        assert post(address, "/v1/completions", prompt="a" * 2000).status_code == 413
        parts = (b'{"prompt": "' + b"a" * 400 for _ in range(5))  # without a length
        headers = {"Content-Type": "application/json"}
        assert httpx.post(f"{address}/v1/completions", content=parts, headers=headers).status_code == 413


def test_the_key(desk):
    with served(tiny_desk(), key="secret") as (address, _):
        assert httpx.get(f"{address}/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            response = httpx.get(f"{address}/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="secret")
        assert client.models.list().data[0].id == NAME


def test_the_model_itself_serves_one_at_a_time(desk):
    with served(tiny_desk(native=False)) as (address, app):
        body = post(address, "/v1/completions", prompt=PROMPT, n=2, seed=5, max_tokens=10, logprobs=1).json()
        assert app.state.scheduler.batch.size == 1
        speaker = Speaker(desk.model, desk.processor)
        for choice in body["choices"]:
            expected = alone(speaker, PROMPT, 5 + choice["index"], mode="causal", max_new_tokens=10)
            assert choice["text"] == expected.text


def test_numbers_are_said(address):
    """Otherwise the tests above would compare less than they claim."""
    answer = post(address, "/v1/completions", prompt=PROMPT, n=8, seed=0, max_tokens=30).json()
    assert sum(len(choice["numbers"]) for choice in answer["choices"]) >= 3
    assert NUM == 258
