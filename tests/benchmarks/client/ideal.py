"""Ideal client: it keeps all places filled, reads the answers and keeps nothing.

usage: python -m tests.benchmarks.client.ideal PROMPTS IN_FLIGHT URL...
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pyarrow.parquet as pq


class Place(asyncio.Protocol):
    """A connection that sends the next request as soon as the last one is answered."""

    def __init__(self, requests: Iterator[bytes], ended: "asyncio.Queue[None]") -> None:
        self._requests, self._ended = requests, ended
        self._missing = 0
        self._head = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            data, self._head = self._head + data, b""
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._head = data
                return
            length = data[:end].partition(b"content-length: ")[2].split(b"\r\n", 1)[0]
            self._missing = end + 4 + int(length)
        self._missing -= len(data)
        if not self._missing:
            self._next()

    def _next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._transport.close()
            self._ended.put_nowait(None)
        else:
            self._transport.write(request)


def requests_of(path: str) -> Iterator[bytes]:
    for prompt in pq.read_table(path)["prompt"]:
        message = {"role": "user", "content": prompt.as_py()}
        body = json.dumps({"model": "m", "messages": [message], "max_tokens": 60_000}).encode()
        yield (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )


async def ask(path: str, in_flight: int, urls: list[str]) -> None:
    loop, requests = asyncio.get_running_loop(), requests_of(path)
    ended: asyncio.Queue[None] = asyncio.Queue()
    ports = [urlsplit(url).port or 80 for url in urls for _ in range(in_flight)]
    for port in ports:
        await loop.create_connection(lambda: Place(requests, ended), "127.0.0.1", port)
    for _ in ports:
        await ended.get()


if __name__ == "__main__":
    asyncio.run(ask(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
