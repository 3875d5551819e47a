"""Stand-in chat servers in a process of their own, which count what their clients ask.

usage: python -m tests.benchmarks.client.servers NUM_SERVERS MEDIAN_S ANSWER_TOKENS

The first line printed has the ports as JSON. `GET /seen` returns the counts since the start as
JSON. The servers parse as little as they can: they share the machine with the client.
"""

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.client.workload import ID_CHARACTERS, Workload, bodies, delays

ROOT = Path(__file__).resolve().parents[3]
_READ_BYTES = 2**20


@dataclass(slots=True)
class Seen:
    """Requests and answers of all servers of the process."""

    first_s: float = 0.0
    in_flight: int = 0
    peak_in_flight: int = 0
    asked: Counter[bytes] = field(default_factory=Counter)
    answered: Counter[bytes] = field(default_factory=Counter)
    answered_s: list[float] = field(default_factory=list)

    def as_json(self) -> bytes:
        return json.dumps(
            {
                "first_s": self.first_s,
                "peak_in_flight": self.peak_in_flight,
                "requests": self.asked.total(),
                "asked_again": self.asked.total() - len(self.asked),
                "answered_again": self.answered.total() - len(self.answered),
                "answered_s": self.answered_s,
            }
        ).encode()


class Connection(asyncio.Protocol):
    """A connection of a client, which sends one request at a time."""

    def __init__(
        self, seen: Seen, takes_s: list[float], answers: list[tuple[bytes, bytes]]
    ) -> None:
        self._seen, self._takes_s, self._answers = seen, takes_s, answers
        self._pieces: list[bytes] = []
        self._missing = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        request = b"".join(self._pieces)
        end = request.find(b"\r\n\r\n")
        if end < 0:
            self._pieces, self._missing = [request], 1
            return
        head = request[:end].lower()
        _, found, length = head.partition(b"content-length:")
        size = end + 4 + (int(length.split(b"\r\n", 1)[0]) if found else 0)
        if len(request) < size:
            self._pieces, self._missing = [request], size - len(request)
            return
        self._pieces, self._missing = [], 0
        self._answer(request, end)

    def _answer(self, request: bytes, end: int) -> None:
        path = request[: request.find(b"\r\n")].split(b" ")[1]
        if path.endswith(b"/models"):
            self._send(b'{"object":"list","data":[{"id":"m","max_model_len":262144}]}')
        elif path.endswith(b"/seen"):
            self._send(self._seen.as_json())
        elif path.endswith(b"/chat/completions"):
            start = request.index(b"row-", end)
            self._begin(
                request[start : start + ID_CHARACTERS],
                b"\nconnection: close" in request[:end].lower(),
            )
        else:
            self._send(b"{}", status=b"404 Not Found")

    def _begin(self, row: bytes, is_last: bool) -> None:
        seen = self._seen
        seen.first_s = seen.first_s or time.time()
        seen.asked[row] += 1
        seen.in_flight += 1
        seen.peak_in_flight = max(seen.peak_in_flight, seen.in_flight)
        number = int(row[4:])
        takes_s = self._takes_s[number % len(self._takes_s)]
        if takes_s:
            asyncio.get_running_loop().call_later(takes_s, self._end, row, number, is_last)
        else:
            self._end(row, number, is_last)

    def _end(self, row: bytes, number: int, is_last: bool) -> None:
        seen = self._seen
        seen.in_flight -= 1
        if self._transport.is_closing():
            return
        seen.answered[row] += 1
        seen.answered_s.append(time.time())
        head, tail = self._answers[number % len(self._answers)]
        self._send(head + row + tail)
        if is_last:
            self._transport.close()

    def _send(self, body: bytes, status: bytes = b"200 OK") -> None:
        self._transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (status, len(body), body)
        )


async def serve(num_servers: int, median_s: float, answer_tokens: int) -> None:
    loop, seen = asyncio.get_running_loop(), Seen()
    takes_s, answers = delays(median_s), bodies(answer_tokens)
    ports = []
    for _ in range(num_servers):
        server = await loop.create_server(
            lambda: Connection(seen, takes_s, answers), "127.0.0.1", 0, backlog=4096
        )
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


@dataclass(frozen=True, slots=True)
class Standins:
    """Running stand-in servers."""

    ports: list[int]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}/v1" for port in self.ports]

    def seen(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[0]}/seen", timeout=60) as page:
            return json.load(page)  # type: ignore[no-any-return]


@contextmanager
def standins(load: Workload) -> Iterator[Standins]:
    """Serve until the block ends."""
    arguments = [str(n) for n in (load.num_servers, load.median_s, load.answer_tokens)]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Standins(json.loads(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
