"""Pushing, against a stand-in for a hub on this machine: what arrives is what is in the directory."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

import training_runs
from causal_qwen import hub
from causal_qwen.cli import app, main

TOKEN = "hf_stand_in"
# huggingface_hub's own, where it sends a file without Xet.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")


class StandIn(ThreadingHTTPServer):
    """The few addresses that an upload uses: who am I, make a repository, how to send each file, LFS, commit.

    Attributes:
        files: Path → bytes, of what was committed.
        created: What was asked of new repositories.
        refuse: Status for every request, or None.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.created, self.objects, self.refuse = {}, [], {}, None

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self):
        self.answer(self.known({"/api/whoami-v2": lambda body: {"name": "ana", "type": "user"}}, b""))

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        routes = {
            "/api/repos/create": self.create,
            "/api/validate-yaml": lambda body: {"errors": [], "warnings": []},
            "/api/models/ana/tiny/preupload/main": self.preupload,
            "/ana/tiny.git/info/lfs/objects/batch": self.batch,
            "/api/models/ana/tiny/commit/main": self.commit,
        }
        self.answer(self.known(routes, body))

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[hashlib.sha256(body).hexdigest()] = body
        self.answer((200, {}))

    def known(self, routes, body):
        if self.server.refuse is not None:
            return self.server.refuse, {"error": "no"}
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "who are you?"}
        route = routes.get(self.path.split("?")[0])
        return (404, {"error": self.path}) if route is None else (200, route(body))

    def create(self, body):
        self.server.created.append(json.loads(body))
        return {"url": f"{self.server.endpoint}/ana/tiny", "name": "ana/tiny", "id": "1"}

    def preupload(self, body):
        files = json.loads(body)["files"]
        mode = {True: "lfs", False: "regular"}
        return {
            "files": [
                {
                    "path": one["path"],
                    "uploadMode": mode[one["path"].endswith(".safetensors")],
                    "shouldIgnore": False,
                }
                for one in files
            ]
        }

    def batch(self, body):
        return {
            "transfer": "basic",
            "objects": [
                {**one, "actions": {"upload": {"href": f"{self.server.endpoint}/put/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ],
        }

    def commit(self, body):
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                assert line["value"]["encoding"] == "base64"
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                self.server.files[line["value"]["path"]] = self.server.objects[line["value"]["oid"]]
        return {"commitUrl": f"{self.server.endpoint}/ana/tiny/commit/1", "commitOid": "1", "success": True}

    def answer(self, reply):
        status, content = reply
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.endpoint)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def directory(tmp_path_factory, conversion):
    return conversion.save(tmp_path_factory.mktemp("hub") / "model")


def content(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_every_byte_arrives(stand_in, directory):
    address = hub.push(directory, "ana/tiny", private=True, endpoint=stand_in.endpoint)
    assert address == f"{stand_in.endpoint}/ana/tiny"
    assert stand_in.files == content(directory)
    assert {"README.md", "model.safetensors", "config.json", "conversion.json"} <= stand_in.files.keys()
    assert stand_in.created == [{"name": "tiny", "organization": "ana", "visibility": "private"}]


def test_the_command_prints_the_address(stand_in, directory):
    result = CliRunner().invoke(
        app, ["push", str(directory), "ana/tiny", "--endpoint", stand_in.endpoint, "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["address"] == f"{stand_in.endpoint}/ana/tiny"


def test_convert_pushes_what_it_wrote(stand_in, base_directory, tmp_path):
    arguments = ["convert", str(base_directory), str(tmp_path / "out"), "--calibration", "none"]
    result = CliRunner().invoke(app, [*arguments, "--push", "ana/tiny", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_token_id"] == 258
    assert stand_in.files == content(tmp_path / "out")


def test_train_pushes_what_it_wrote(stand_in, directory, tmp_path):
    recipe = training_runs.recipe(tmp_path, directory, max_steps=1)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.to_yaml(), encoding="utf-8")
    result = CliRunner().invoke(app, ["train", str(file), "--push", "ana/tiny", "--json"])
    assert result.exit_code == 0, result.output
    assert stand_in.files == content(Path(json.loads(result.stdout)["output"]))
    assert b"# A CausalQwen model" in stand_in.files["README.md"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "answers 401: the token is missing or not valid; run `hf auth login`, or set HF_TOKEN"),
        (403, "answers 403: the token may not write there"),
        (404, "answers 404: there is no such owner or repository"),
        (409, "answers 409: no"),
    ],
)
def test_what_a_hub_refuses_is_one_line(stand_in, directory, status, message):
    stand_in.refuse = status
    with pytest.raises(ValueError, match="ana/tiny") as caught:
        hub.push(directory, "ana/tiny", endpoint=stand_in.endpoint)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_convert_finds_out_before_it_works(stand_in, tmp_path, monkeypatch, capsys):
    stand_in.refuse = 401
    arguments = ["convert", "smollm2", str(tmp_path / "out"), "--push", "ana/tiny"]
    monkeypatch.setattr("sys.argv", ["causal-qwen", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert "answers 401" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_token_no_network_and_no_name_are_said(stand_in, directory, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="Repo id must"):
        hub.push(directory, "a/b/c")
    stand_in.shutdown()
    stand_in.server_close()
    with pytest.raises(ValueError, match=r"cannot reach http://127.0.0.1:\d+ \(.*\); is there a net"):
        hub.push(directory, "ana/tiny", endpoint=stand_in.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        hub.push(directory, "ana/tiny", endpoint=stand_in.endpoint)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="ana/tiny: there is no token to write with; run `hf auth login`"):
        hub.push(directory, "ana/tiny", endpoint=stand_in.endpoint)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such directory"),
        ({}, "no config.json"),
        ({"config.json": "{"}, "config.json is not JSON"),
        ({"config.json": "[]"}, "a model of type None"),
        ({"config.json": '{"model_type": "qwen2"}'}, "'qwen2', not a causal one; convert it first"),
        ({"config.json": '{"model_type": "causal_qwen2"}'}, "no weights"),
    ],
)
def test_only_a_causal_model_is_pushed(tmp_path, files, message):
    directory = tmp_path / "model"
    if files is not None:
        directory.mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        hub.push(directory, "ana/tiny")
