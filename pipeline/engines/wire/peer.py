"""Connections to an engine of ours, each checked before anything is sent over it.

A port of loopback belongs to whoever listens first, so the engine's death gives its port to anybody
who waits for it.
"""

from collections.abc import Awaitable, Callable

import aiohttp
import httpx2
from aiohttp.client_proto import ResponseHandler
from openai._vendor.httpx_aiohttp.transport import AiohttpTransport

from pipeline.errors import EngineError

PeerCheck = Callable[[], Awaitable[None]]
"""Raises EngineError unless the engine itself has listened since before the call."""


class CheckedConnector(aiohttp.TCPConnector):
    """Connector that closes a connection to anybody but the engine."""

    def __init__(self, check_peer: PeerCheck, *, limit: int, keepalive_timeout: float) -> None:
        super().__init__(limit=limit, keepalive_timeout=keepalive_timeout)
        self._check_peer = check_peer

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[aiohttp.tracing.Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - the base class's name
    ) -> ResponseHandler:
        connection = await super()._create_connection(req, traces, timeout)
        is_checked = False
        try:
            await self._check_peer()
            is_checked = True
        except EngineError as error:
            raise aiohttp.ClientConnectorError(req.connection_key, OSError(str(error))) from None
        finally:
            if not is_checked:
                connection.close()
        return connection


def checked_transport(
    check_peer: PeerCheck, *, limit: int, keepalive_timeout: float
) -> httpx2.AsyncBaseTransport:
    """Return a transport for `openai.DefaultAioHttpClient`; no proxy is asked for loopback."""

    def session() -> aiohttp.ClientSession:
        connector = CheckedConnector(check_peer, limit=limit, keepalive_timeout=keepalive_timeout)
        return aiohttp.ClientSession(connector=connector)

    return AiohttpTransport(client=session)
