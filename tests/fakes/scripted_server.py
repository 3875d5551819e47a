"""A real HTTP server on loopback that answers chat requests by a script, in a thread of its own."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Response of the server; `cut` closes the connection after half of the body.

    `drip_s` is the pause before each byte; an `endless` body is sent again and again.
    """

    status: int = 200
    body: bytes = b"{}"
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = "application/json"
    delay_s: float = 0.0
    cut: bool = False
    drip_s: float = 0.0
    endless: bool = False


# Maps a request's body and its number, from 1, to the reply.
Script = Callable[[dict[str, Any], int], Reply]


def completion_body(text: str, finish: str | None = "stop", **message: object) -> bytes:
    """A chat completion as SGLang sends it."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, **message},
        "finish_reason": finish,
    }
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def last_text(request: dict[str, Any]) -> str:
    return str(request["messages"][-1]["content"])


# Token ids of the server: a byte each, and one that ends a turn.
END_ID = 256
TokenIds = Literal["all", "prompt", "none"]


def with_token_ids(
    body: bytes, request: dict[str, Any], returned: TokenIds, *, has_end: bool
) -> bytes:
    """Add token ids to each choice of a completion that has none, as SGLang does."""
    if returned == "none" or b"token_ids" in body:
        return body
    try:
        completion = json.loads(body)
        choices = completion["choices"] if isinstance(completion, dict) else []
        for choice in choices:
            _add_ids(choice, request, returned, has_end=has_end)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        # A script that sends something else.
        return body
    return json.dumps(completion).encode() if choices else body


def _add_ids(
    choice: dict[str, Any], request: dict[str, Any], returned: TokenIds, *, has_end: bool
) -> None:
    message, is_whole = choice["message"], choice["finish_reason"] == "stop"
    text = f"{message.get('reasoning_content') or ''}{message.get('content') or ''}"
    prompt = "".join(str(turn["content"]) for turn in request["messages"])
    choice["prompt_token_ids"] = list(prompt.encode("utf-8", "replace"))
    if returned == "all":
        ids = list(text.encode("utf-8", "replace"))
        choice["response_token_ids"] = [*ids, END_ID] if is_whole and has_end else ids
        choice["matched_stop"] = END_ID if is_whole else None


def answer(request: dict[str, Any], number: int) -> Reply:
    """Answer at once, with some reasoning."""
    return Reply(
        body=completion_body(f"\n\nanswer to {last_text(request)}", reasoning_content="thinking")
    )


@dataclass(slots=True)
class ScriptedServer:
    """`requests` holds the bodies of all chat requests in the order of their arrival."""

    script: Script = answer
    models: Reply = field(
        default=Reply(body=json.dumps({"data": [{"id": "m", "max_model_len": 8192}]}).encode())
    )
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    in_flight: int = 0
    peak_in_flight: int = 0
    keeps_requests: bool = True
    token_ids: TokenIds = "all"
    """Ids that it returns where they are requested."""
    has_end_token: bool = True
    num_requests: int = 0
    num_connections: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # The client has gone, or the test is over.
            pass
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first = await reader.readline()
        if not first:
            return False
        path, headers = first.split()[1].decode(), {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        reply = await self._reply(path, headers, body)
        sent = reply.body[: len(reply.body) // 2] if reply.cut else reply.body
        lines = [f"HTTP/1.1 {reply.status} Scripted"]
        lines += ["connection: close" if reply.endless else f"content-length: {len(reply.body)}"]
        lines += [f"content-type: {reply.content_type}"]
        lines += [f"{name}: {value}" for name, value in reply.headers]
        response = "\r\n".join([*lines, "", ""]).encode() + sent
        if reply.drip_s:
            await self._drip(writer, response, reply.drip_s)
        else:
            writer.write(response)
            await writer.drain()
        while reply.endless:
            writer.write(reply.body)
            await writer.drain()
        return not reply.cut

    async def _drip(self, writer: asyncio.StreamWriter, response: bytes, pause_s: float) -> None:
        for byte in response:
            await asyncio.sleep(pause_s)
            writer.write(bytes([byte]))
            await writer.drain()

    async def _reply(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if path.endswith("/models"):
            return self.models
        if not path.endswith("/chat/completions"):
            return Reply(status=404, body=b'{"error": {"message": "no such page"}}')
        request = json.loads(body)
        self.num_requests += 1
        if self.keeps_requests:
            self.requests.append(request)
            self.headers.append(headers)
        reply = self.script(request, self.num_requests)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        await asyncio.sleep(reply.delay_s)
        self.in_flight -= 1
        if not request.get("return_token_ids") or reply.status != 200:
            return reply
        body = with_token_ids(reply.body, request, self.token_ids, has_end=self.has_end_token)
        return replace(reply, body=body)


@contextmanager
def serving(server: ScriptedServer, port: int = 0) -> Iterator[ScriptedServer]:
    """Serve on a port, or a free one, until the block ends."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", port, limit=2**24)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        ready.set()
        await stop.wait()
        listening.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
