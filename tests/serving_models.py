"""A tiny model behind a real server, for tests: it says words and numbers, chats, and reads tables."""

import contextlib
import socket
import threading
import time

import torch
import uvicorn

from causal_qwen.data import Reading
from causal_qwen.decoder import Engine
from causal_qwen.serving.app import application
from causal_qwen.serving.desk import Desk, Limits
from conftest import CHAT_TEMPLATE, tiny_causal, tiny_processor

NAME = "tiny"
NUM = 258


def tiny_speaker():
    """Says numbers now and then; no token ends a text."""
    model = tiny_causal(noise_gain=0.02, value_center=3.0, value_spread=0.3)
    with torch.no_grad():
        model.action.bias[NUM] += 2.0
        model.action.number_noise.fill_(0.05)
        model.action.bias[259:] -= 100.0  # rows that no token uses
    model.generation_config.eos_token_id = None
    return model


def tiny_desk(*, native=True, **limits):
    model, processor = tiny_speaker(), tiny_processor(chat_template=CHAT_TEMPLATE)
    engine = Engine.from_model(model) if native else None
    reading = Reading(template="A car of {weight} kg costs {price}", target="price")
    return Desk(model, processor, engine, name=NAME, reading=reading, limits=Limits(**limits))


@contextlib.contextmanager
def served(desk, key=None):
    """The address of a server, and its application."""
    app = application(desk, key=key)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}", app
    finally:
        server.should_exit = True
        thread.join(20)
        bound.close()
