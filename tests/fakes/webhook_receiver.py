"""Receiver of a webhook: a real HTTP server on loopback that can refuse or delay."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(slots=True)
class Receiver:
    """Answer the next posts with `codes`, then with 204."""

    url: str
    codes: list[int] = field(default_factory=list)
    got: list[dict[str, object]] = field(default_factory=list)
    refused: int = 0
    followed: int = 0
    """Requests that followed a redirect."""
    hold: threading.Event = field(default_factory=threading.Event)
    """Answers wait until it is set."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver(url="")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.hold.wait(20)
            code = receiver.codes.pop(0) if receiver.codes else 204
            if code < 300:
                receiver.got.append(json.loads(body))
            else:
                receiver.refused += 1
            self.send_response(code)
            if 300 <= code < 400:
                self.send_header("Location", receiver.url.replace("/hook", "/moved"))
            self.end_headers()

        def do_GET(self) -> None:
            receiver.followed += 1
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_port}/hook?key=secret"
    receiver.hold.set()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield receiver
    receiver.hold.set()
    server.shutdown()
    thread.join()
    server.server_close()
