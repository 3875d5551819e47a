"""A Hugging Face hub on loopback, with the files that a test gives it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0" * 40


@dataclass(slots=True)
class Hub:
    """Answer requests of `/OWNER/NAME/resolve/main/FILE`."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    """Files by `OWNER/NAME/FILE`; any other is not there."""
    statuses: dict[str, int] = field(default_factory=dict)
    """Files that are answered with this status."""
    moved: dict[str, str] = field(default_factory=dict)
    """Files that are redirected to this URL."""
    claimed_bytes: dict[str, int] = field(default_factory=dict)
    """Sizes that are claimed for files."""
    tokens: list[str | None] = field(default_factory=list)
    """The authorization of each request."""
    requested: list[str] = field(default_factory=list)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def _answer(self, *, has_body: bool) -> None:
            file = (
                self.path.lstrip("/").replace("resolve/main/", "").replace(f"resolve/{COMMIT}/", "")
            )
            hub.tokens.append(self.headers.get("Authorization"))
            hub.requested.append(file)
            if file in hub.moved:
                self.send_response(302)
                self.send_header("Location", hub.moved[file])
                self._send_facts(0, file)
                return
            status = hub.statuses.get(file, 200 if file in hub.files else 404)
            data = hub.files.get(file, b"")
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound")
            self._send_facts(hub.claimed_bytes.get(file, len(data)), file)
            if has_body:
                self.wfile.write(data)

        def _send_facts(self, size: int, file: str) -> None:
            self.send_header("ETag", f'"{abs(hash(file)):x}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(size))
            self.end_headers()

    return Handler


@contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def only_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Serve the only hub that the library finds, with an empty cache."""
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(cache))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield hub
