"""The server keeps to its own description, whatever is sent: schemathesis finds no failure of its side."""

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

from causal_qwen.serving.app import application
from serving_models import served, tiny_desk

DESK = tiny_desk(tokens=3, seconds=20.0)
SCHEMA = schemathesis.openapi.from_dict(application(DESK).openapi())
OPERATIONS = {operation.ok().label: operation.ok() for operation in SCHEMA.get_all_operations()}


@pytest.fixture(scope="module")
def address():
    with served(DESK) as (address, _):
        yield address


# By pytest's own parameters: schemathesis' items share one id, and pytest-xdist runs one test of an id.
@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_no_request_breaks_the_server(name, data, address):
    operation = OPERATIONS[name]
    modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation.body else [])]
    mode = data.draw(st.sampled_from(modes))
    case = data.draw(operation.as_strategy(generation_mode=mode))
    response = case.call(base_url=address)
    assert response.status_code < 500, response.text
    if mode is GenerationMode.NEGATIVE:
        assert response.status_code >= 400, case
    if response.status_code >= 400 and response.request.method != "HEAD":
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
