"""A webhook's other end: a real HTTP server on loopback that can be told to refuse or to wait."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(slots=True)
class Receiver:
    """Answers the next posts with `codes`, then with 204."""

    url: str
    codes: list[int] = field(default_factory=list)
    got: list[dict[str, object]] = field(default_factory=list)
    refused: int = 0
    hold: threading.Event = field(default_factory=threading.Event)
    """Set: answer at once."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    found = Receiver(url="")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.hold.wait(20)
            code = found.codes.pop(0) if found.codes else 204
            if code < 300:
                found.got.append(json.loads(body))
            else:
                found.refused += 1
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_port}/hook?key=secret"
    found.hold.set()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield found
    found.hold.set()
    server.shutdown()
    thread.join()
    server.server_close()
