"""Send one HTTP request and read the whole response, within bounds of time and size.

Invariants: the time limit holds for the whole call, so a server that drips cannot stretch it; no
more than the stated bytes are read; a redirect is a response like any other, because the prompts
and the key belong to no other host; nothing compressed is requested or unpacked; nothing is sent to
an engine of ours before it is known to be at the other end.
"""

import resource
import ssl
from asyncio import timeout
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx2
import openai

from pipeline.engines.wire.peer import PeerCheck, checked_transport
from pipeline.engines.wire.text import one_line

# Requests that one client keeps in flight. assumed: twice the most that the planner gives an engine
MOST_IN_FLIGHT = 4096
# assumed: more than a worker opens besides its connections
_SPARE_FILES = 256
# assumed: a machine that is up accepts a connection within this, however busy it is
_CONNECT_TIMEOUT_S = 30.0
# Less than the 5 s after which uvicorn, and so SGLang and vLLM, closes an idle connection.
_KEEPALIVE_S = 3.0
# The name of a codec that changes nothing: without the header the library requests gzip.
_NO_ENCODING = "identity"


def raise_file_limit() -> int:
    """Raise the limit of open files where needed; return the requests that it allows in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_IN_FLIGHT + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    unlimited = soft == resource.RLIM_INFINITY
    return MOST_IN_FLIGHT if unlimited else max(1, min(MOST_IN_FLIGHT, soft - _SPARE_FILES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A whole response of a server."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_redirect(self) -> bool:
        return 300 <= self.status < 400


class WireError(Exception):
    """No whole response came. Caught in `engines` alone."""


class BrokenConnectionError(WireError):
    """The connection broke while the server worked on the request."""


class UnreachableError(WireError):
    """The server accepted no connection, so it never saw the request."""


class OversizeError(WireError):
    """The response is larger than any answer to the request can be, or compressed unasked."""


@dataclass(slots=True, kw_only=True)
class Transport:
    """Connections to one server, opened on first use inside the event loop that uses them."""

    base_url: str
    api_key: str
    check_peer: PeerCheck | None = None
    """Called after a connection is made, before anything is sent over it."""
    _http: httpx2.AsyncClient | None = field(default=None)
    _urls: dict[str, httpx2.URL] = field(default_factory=dict)
    """Parsed addresses of the few pages that are requested again and again."""

    async def get(self, url: str, *, most_bytes: int, timeout_s: float) -> Response:
        return await self._exchange("GET", url, None, most_bytes=most_bytes, timeout_s=timeout_s)

    async def post(
        self, url: str, content: bytes, *, most_bytes: int, timeout_s: float
    ) -> Response:
        return await self._exchange(
            "POST", url, content, most_bytes=most_bytes, timeout_s=timeout_s
        )

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def _exchange(
        self, method: str, url: str, content: bytes | None, *, most_bytes: int, timeout_s: float
    ) -> Response:
        """Raise TimeoutError when the time is up, and WireError when no whole response came."""
        http = self._opened()
        try:
            # Not the transport's time-out, which counts from byte to byte.
            async with timeout(timeout_s):
                response = await http.send(self._request(http, method, url, content), stream=True)
                try:
                    return await _whole(response, most_bytes)
                finally:
                    await response.aclose()
        except TimeoutError:
            # An OSError too, but not the connection's.
            raise
        except httpx2.TransportError as error:
            raise _fault(error) from None
        except (httpx2.InvalidURL, httpx2.StreamError, aiohttp.ClientError, OSError) as error:
            # Responses that are no HTTP, and headers beyond the library's bounds.
            raise BrokenConnectionError(_named(error)) from None

    def _request(
        self, http: httpx2.AsyncClient, method: str, url: str, content: bytes | None
    ) -> httpx2.Request:
        """Build a request of parts that are parsed once.

        measured: httpx2 2.16, CPU per request 0.70 ms through `AsyncClient.stream`, and 0.42 ms so.
        """
        parsed_url = self._urls.get(url)
        if parsed_url is None:
            parsed_url = self._urls[url] = httpx2.URL(url)
        return httpx2.Request(
            method,
            parsed_url,
            headers=http.headers,
            content=content,
            extensions={"timeout": http.timeout.as_dict()},
        )

    def _opened(self) -> httpx2.AsyncClient:
        if self._http is None:
            self._http = _http_client(
                self.base_url,
                self.check_peer,
                headers={
                    "authorization": f"Bearer {self.api_key}",
                    "content-type": "application/json",
                    "accept-encoding": _NO_ENCODING,
                },
                timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
                follow_redirects=False,
            )
        return self._http


async def _whole(response: httpx2.Response, most_bytes: int) -> Response:
    encoding = response.headers.get("content-encoding", _NO_ENCODING).strip().lower()
    if encoding != _NO_ENCODING:
        raise OversizeError(f"the response is compressed ({one_line(encoding)}), unasked")
    chunks, num_bytes = [], 0
    async for chunk in response.aiter_raw():
        num_bytes += len(chunk)
        if num_bytes > most_bytes:
            raise OversizeError(f"the response has more than {most_bytes:,} bytes")
        chunks.append(chunk)
    return Response(status=response.status_code, headers=response.headers, content=b"".join(chunks))


def _http_client(
    url: str,
    check_peer: PeerCheck | None,
    **settings: Any,  # noqa: ANN401 - those of httpx2
) -> httpx2.AsyncClient:
    """Open a client with as many connections as there are requests in flight."""
    if url.startswith("http://"):
        # The system's certificates need 0.1 s to load, and no redirect is followed to https.
        settings["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if check_peer is not None:
        settings["transport"] = checked_transport(
            check_peer, limit=MOST_IN_FLIGHT, keepalive_timeout=_KEEPALIVE_S
        )
    limits = httpx2.Limits(
        max_connections=MOST_IN_FLIGHT,
        max_keepalive_connections=MOST_IN_FLIGHT,
        keepalive_expiry=_KEEPALIVE_S,
    )
    return openai.DefaultAioHttpClient(limits=limits, **settings)


def _fault(error: httpx2.TransportError) -> WireError:
    """Tell a server that is not there from a connection that broke.

    The transport reports every broken connection as a connect time-out; its cause tells them apart.
    """
    below = error.__cause__ or error
    if isinstance(below, aiohttp.ConnectionTimeoutError):
        return UnreachableError(f"connection: not accepted within {_CONNECT_TIMEOUT_S:.0f} s")
    if isinstance(below, aiohttp.ClientConnectorError):
        return UnreachableError(_named(below))
    return BrokenConnectionError(_named(below))


def _named(error: BaseException) -> str:
    return f"connection: {one_line(str(error) or type(error).__name__)}"
