"""Upload to the hub, against a stand-in on loopback that speaks as much of its API as is asked."""

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from pipeline.errors import ConfigError
from pipeline.export.hub import push
from pipeline.store.object_store import Store, open_store

OID = "1" * 40


@dataclass(slots=True)
class Hub:
    """Requests that the stand-in received."""

    url: str = ""
    tokens: set[str] = field(default_factory=set)
    created: list[dict[str, object]] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Large files by digest."""
    files: dict[str, bytes | str] = field(default_factory=dict)
    """Committed paths: small ones whole, large ones by digest."""
    uploads_to_refuse: int = 1
    status: int = 200


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    # The stand-in speaks the older of the hub's two ways for large files; Xet's needs its servers.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_loopback")
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    def handle(handler: BaseHTTPRequestHandler) -> None:
        hub.tokens.add(handler.headers.get("authorization", "none"))
        body = handler.rfile.read(int(handler.headers.get("content-length", "0")))
        status, answer = answer_of(hub, handler.command, handler.path.partition("?")[0], body)
        data = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def quiet(*_: object) -> None:
        """Log nothing."""

    methods = {f"do_{verb}": handle for verb in ("GET", "POST", "PUT")}
    return type("Handler", (BaseHTTPRequestHandler,), {**methods, "log_message": quiet})


def answer_of(hub: Hub, verb: str, path: str, body: bytes) -> tuple[int, object]:
    if hub.status != 200:
        return hub.status, {"error": "the hub says no"}
    match verb, path.rsplit("/", 2)[1:]:
        case "POST", ["repos", "create"]:
            hub.created.append(json.loads(body))
            return 200, {"url": f"{hub.url}/datasets/me/set"}
        case "POST", ["preupload", "main"]:
            asked = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": p, "uploadMode": mode_of(p), "shouldIgnore": False} for p in asked]
            return 200, {"files": files}
        case "POST", ["objects", "batch"]:
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/blob/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        case "POST", ["commit", "main"]:
            take_commit(hub, body)
            url = f"{hub.url}/datasets/me/set/commit/{OID}"
            return 200, {"success": True, "commitOid": OID, "commitUrl": url}
        case "PUT", ["blob", digest]:
            if hub.uploads_to_refuse:
                hub.uploads_to_refuse -= 1
                return 503, {}
            hub.blobs[digest] = body
            return 200, {}
        case "GET", ["tree", "main"]:
            return 200, []
    return 200, {"errors": [], "warnings": [], "id": "me/set", "sha": "0" * 40}


def mode_of(path: str) -> str:
    return "lfs" if path.endswith(".parquet") else "regular"


def take_commit(hub: Hub, body: bytes) -> None:
    for line in map(json.loads, body.decode().splitlines()):
        if line["key"] == "file":
            hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        if line["key"] == "lfsFile":
            hub.files[line["value"]["path"]] = line["value"]["oid"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "set"))
    store.write_whole("data/train-00000.parquet", b"PAR1 rows PAR1")
    store.write_whole("README.md", b"---\n---\n# rows\n")
    store.write_whole("export.json", b"{}")
    store.write_whole("data/notes.txt", b"mine")
    return store


# The library's own upload hands its bytes to httpx in a way that is on its way out.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_data_set_is_uploaded_private_and_a_refused_file_again(hub: Hub, store: Store) -> None:
    lines: list[str] = []
    address = push(store, "me/set", log=lines.append)
    assert address == f"{hub.url}/datasets/me/set"
    assert hub.created[0].get("private") or hub.created[0]["visibility"] == "private"
    assert set(hub.files) == {"data/train-00000.parquet", "README.md", "export.json"}
    assert hub.files["README.md"] == b"---\n---\n# rows\n"
    assert hub.blobs[str(hub.files["data/train-00000.parquet"])] == b"PAR1 rows PAR1"
    assert hub.uploads_to_refuse == 0
    assert "Bearer hf_loopback" in hub.tokens
    assert lines[-1] == f"event=uploaded commit={OID}"


def test_refusal_of_the_hub_is_told_in_one_line(hub: Hub, store: Store) -> None:
    hub.status = 403
    with pytest.raises(ConfigError, match=r"^--push-to-hub: the hub says: ") as refused:
        push(store, "me/set", log=lambda line: None)
    assert "\n" not in str(refused.value)


def test_name_that_the_hub_cannot_have_is_refused(hub: Hub, store: Store) -> None:
    with pytest.raises(ConfigError, match="--push-to-hub: "):
        push(store, "me/a/set", log=lambda line: None)
    assert not hub.files


def test_token_must_be_in_the_environment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="the environment has no variable HF_TOKEN"):
        push(store, "me/set", log=lambda line: None)
