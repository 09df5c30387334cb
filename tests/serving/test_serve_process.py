"""`causal-qwen serve` as a process: it starts, drains at SIGTERM, or says in one line why it cannot start."""

import re
import socket
import threading

import httpx
import pytest
import uvicorn

from causal_qwen.serving.server import _Server, bound_to
from command_processes import start, wait_for
from conftest import CHAT_TEMPLATE, tiny_processor
from serving_models import tiny_speaker


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    tiny_speaker().save_pretrained(place)
    tiny_processor(chat_template=CHAT_TEMPLATE).save_pretrained(place)
    return place


def address_in(log):
    found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text() if log.exists() else "")
    return found and found[0]


def test_whoever_is_told_the_address_can_connect():
    async def nothing(scope, receive, send):
        pass

    with bound_to("127.0.0.1", 0) as bound:
        address, answered = bound.getsockname(), []
        with pytest.raises(ConnectionRefusedError):  # not before it is told
            socket.create_connection(address)

        def ready():
            socket.create_connection(address, timeout=5).close()
            answered.append(True)
            server.should_exit = True

        server = _Server(uvicorn.Config(nothing, lifespan="off", log_level="error"), lambda: None, ready)
        server.run(sockets=[bound])
    assert answered == [True]


@pytest.mark.slow
def test_a_signal_lets_everybody_finish(directory, tmp_path):
    log = tmp_path / "log"
    arguments = ["serve", directory, "--port", 0, "--max-batch", 2]
    environment = {"CAUSAL_QWEN_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
    child = start(arguments, directory=tmp_path, stderr=log, **environment)
    try:
        wait_for(lambda: address_in(log), child, 120)
        address, headers = address_in(log), {"Authorization": "Bearer secret"}
        assert httpx.get(f"{address}/v1/models").status_code == 401
        done = []

        def ask():
            body = {"prompt": "a", "max_tokens": 150}
            done.append(httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(3)]  # two run, one waits
        for thread in threads:
            thread.start()

        def all_taken():  # who comes first waits too, until the batch takes it
            state = httpx.get(f"{address}/health").json()
            return (state["running"], state["waiting"]) == (2, 1)

        wait_for(all_taken, child)
        child.terminate()
        for thread in threads:
            thread.join()
        assert [response.json()["usage"]["completion_tokens"] for response in done] == [150] * 3
        child.join(30)
        assert child.exitcode == 0
        assert log.read_text().splitlines()[-1] == "stopped"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")
    finally:
        child.kill()


@pytest.mark.slow
def test_what_cannot_start_says_so_in_one_line(directory, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, reason in (
            ([directory, "--port", port], "cannot listen on 127.0.0.1"),
            ([tmp_path / "nothing", "--port", 0], "nothing"),
            ([directory, "--port", 0, "--api-key", "@missing"], "missing"),
        ):
            log = tmp_path / f"log-{len(list(tmp_path.iterdir()))}"
            child = start(["serve", *arguments], directory=tmp_path, stderr=log)
            child.join(60)
            assert child.exitcode == 1
            errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
            assert len(errors) == 1
            assert reason in errors[0]
            assert "Traceback" not in log.read_text()
