"""Programs of others, in processes of their own: transformers' server and chat, and lm-eval."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoProcessor

from causal_qwen import convert
from conftest import TEXT, tiny_source
from number_speakers import number_processor, number_speaker

PROGRAMS = Path(sys.executable).parent
CHAT = [{"role": "user", "content": "It cost 12.5 or"}]
NEW = 8
CHOICES = [
    {"question": "2 + 3 =", "choices": [" 5", " 6", " 23"], "answer": 0},
    {"question": "The opposite of hot is", "choices": [" warm", " cold"], "answer": 1},
    {"question": "Seven is larger than", "choices": [" nine", " six", " ten"], "answer": 1},
    {"question": "Rivers flow to the", "choices": [" sea", " sky"], "answer": 0},
]
METRIC = "- {{metric: {}, aggregation: mean, higher_is_better: true}}\n"
TASKS = {
    "choose": "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\n"
    "metric_list:\n" + METRIC.format("acc") + METRIC.format("acc_norm"),
    "continue": "output_type: generate_until\ndoc_to_target: '{{choices[answer]}}'\n"
    "generation_kwargs: {until: ['\\n'], max_gen_toks: 8, do_sample: false}\n"
    "metric_list:\n" + METRIC.format("exact_match"),
}


def environment(place):
    """Of a process that has caches of its own, and does not know this test's imports."""
    return os.environ | {"HF_HOME": str(place / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """A directory with a model that writes numbers."""
    place = tmp_path_factory.mktemp("speaker")
    number_speaker().save_pretrained(place / "model")
    number_processor().save_pretrained(place / "model")
    return place / "model"


@pytest.fixture(scope="module")
def server(speaker):
    """`transformers serve` on it; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PROGRAMS / "transformers", "serve", speaker, "--trust-remote-code"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    log = speaker.parent / "server.log"
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment(speaker.parent))
        try:
            deadline = time.monotonic() + 120
            while True:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                try:
                    if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def answer(speaker):
    """What generate() says in the chat."""
    model = AutoModelForCausalLM.from_pretrained(speaker)
    processor = AutoProcessor.from_pretrained(speaker)
    batch = processor.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    ids = model.generate(**batch, max_new_tokens=NEW, do_sample=False)
    text = processor.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum(character.isdigit() for character in text) > NEW
    return text


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_transformers_serves_a_model_that_writes_numbers(server, speaker, answer, stream):
    body = {"model": str(speaker), "messages": CHAT, "max_tokens": NEW, "temperature": 0.0, "stream": stream}
    response = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    if not stream:
        assert response.json()["choices"][0]["message"]["content"] == answer
        return
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == answer


@pytest.mark.slow
def test_transformers_chats_with_it(server, speaker, answer):
    command = [PROGRAMS / "transformers", "chat", speaker, server, f"max_new_tokens={NEW}", "do_sample=False"]
    settings = environment(speaker.parent)
    settings.pop("HF_HUB_OFFLINE", None)  # offline, huggingface_hub would not talk to this machine either
    process = subprocess.run(
        command, input=f"{CHAT[0]['content']}\nn\n!exit\n",
        capture_output=True, text=True, env=settings, timeout=120,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert answer.split()[0] in process.stdout, process.stdout


@pytest.mark.slow
def test_a_fresh_process_finds_the_classes_after_the_import(speaker):
    """And without it where the directory's own module may run."""
    script = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer
place = sys.argv[1]
classes = AutoConfig, AutoModelForCausalLM, AutoProcessor
print(*(type(auto.from_pretrained(place, trust_remote_code=True)).__name__ for auto in classes))
import causal_qwen
print(*(type(auto.from_pretrained(place)).__name__ for auto in classes))
print(AutoTokenizer.from_pretrained(place).padding_side)
"""
    process = subprocess.run(
        [sys.executable, "-c", script, speaker],
        capture_output=True, text=True, env=environment(speaker.parent), timeout=120,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    names = "CausalQwen2Config CausalQwen2ForCausalLM CausalQwen2Processor"
    assert process.stdout.splitlines() == [names, names, "left"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lm_eval_gives_the_bases_scores(tmp_path, monkeypatch):
    """Log-likelihoods bit for bit, and the same continuations."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import lm_eval
    from lm_eval.tasks import TaskManager

    base = tiny_source(rows=258, tie_word_embeddings=True)
    base.model.save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    convert(base, tmp_path / "model", calibration_text=TEXT)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    (tmp_path / "tasks").mkdir()
    for name, fields in TASKS.items():
        common = (
            f"task: habits_{name}\ndataset_path: json\ntest_split: test\ndoc_to_text: '{{{{question}}}}'\n"
        )
        common += f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'data.jsonl'}}}}}\n"
        (tmp_path / "tasks" / f"{name}.yaml").write_text(common + fields)
    tasks = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)

    def scores(place):
        results = lm_eval.simple_evaluate(
            model="hf", model_args={"pretrained": str(place), "dtype": "float32"}, device="cpu", batch_size=2,
            tasks=[f"habits_{name}" for name in TASKS], task_manager=tasks, bootstrap_iters=0,
        )  # fmt: skip
        return results["results"], {
            name: [sample["resps"] for sample in samples] for name, samples in results["samples"].items()
        }

    expected, responses = scores(tmp_path / "base")
    assert scores(tmp_path / "model") == (expected, responses)
    assert 0 < expected["habits_choose"]["acc,none"] < 1
    assert len(responses["habits_choose"]) == len(responses["habits_continue"]) == len(CHOICES)
