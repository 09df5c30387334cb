"""The server keeps to its own description, whatever is sent: schemathesis finds no failure of its side."""

import hypothesis
import pytest
import schemathesis

from causal_qwen.serving.app import application
from serving_models import served, tiny_desk

DESK = tiny_desk(tokens=3, seconds=20.0)
SCHEMA = schemathesis.openapi.from_dict(application(DESK).openapi())


@pytest.fixture(scope="module")
def address():
    with served(DESK) as (address, _):
        yield address


@pytest.mark.slow
@SCHEMA.parametrize()
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None)
def test_no_request_breaks_the_server(case, address):
    response = case.call(base_url=address)
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and response.request.method != "HEAD":
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
