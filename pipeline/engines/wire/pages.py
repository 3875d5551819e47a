"""Pages of a server beside its completions: its models, its context length, its release.

Pages are small and come at once, so they have bounds of their own.
"""

from dataclasses import dataclass

from pipeline.engines.wire.text import one_line
from pipeline.engines.wire.transport import Response, Transport, WireError
from pipeline.errors import EngineError
from pipeline.untrusted.parsing import UNREADABLE, parsed

_PAGE_TIMEOUT_S = 5.0
# assumed: a server that works takes an order within this; a drain has two seconds for everything
_ABORT_TIMEOUT_S = 0.5
# assumed: /metrics of an SGLang server with 64 ranks has a tenth of it
_MOST_PAGE_BYTES = 8 * 2**20
# assumed: a release is a word or two; it is written into rows and the data set's card
_MOST_RELEASE_CHARACTERS = 80
_OK = 200
_HAS_NO_PAGE = (404, 405, 501)
_KEY_REFUSED = (401, 403)


async def get_page(transport: Transport, path: str) -> Response:
    """Return a page below the server's root. Raises EngineError when no whole page comes."""
    root = transport.base_url.removesuffix("/v1")
    return await _get(transport, f"{root}{path}")


async def context_length(transport: Transport) -> int | None:
    """Read the context length from `/models`; None where the server does not report it.

    Raises EngineError when no server answers, or it refuses the key or is not ready.
    """
    url = f"{transport.base_url}/models"
    response = await _get(transport, url)
    if response.status in _HAS_NO_PAGE:
        return None
    if response.status != _OK:
        hint = ": the key is refused" if response.status in _KEY_REFUSED else ""
        raise EngineError(f"{url} answers {response.status}{hint}")
    return _context_length(response.content)


def _context_length(content: bytes) -> int | None:
    """Read the context length under the key of SGLang, vLLM or llama.cpp."""
    try:
        models = [model for model in parsed(content)["data"] if isinstance(model, dict)]
        lengths = [model.get("max_model_len") for model in models]
        lengths += [(model.get("meta") or {}).get("n_ctx") for model in models]
    except UNREADABLE:
        return None
    known = [length for length in lengths if type(length) is int and length > 0]
    return min(known, default=None)


async def abort_all(transport: Transport) -> bool:
    """Have SGLang end all requests, each with the tokens that it has. Return whether it will."""
    url = f"{transport.base_url.removesuffix('/v1')}/abort_request"
    try:
        response = await transport.post(
            url, b'{"abort_all": true}', most_bytes=_MOST_PAGE_BYTES, timeout_s=_ABORT_TIMEOUT_S
        )
    except (TimeoutError, WireError):
        return False
    return response.status == _OK


async def _get(transport: Transport, url: str) -> Response:
    try:
        return await transport.get(url, most_bytes=_MOST_PAGE_BYTES, timeout_s=_PAGE_TIMEOUT_S)
    except TimeoutError:
        cause = f"no page within {_PAGE_TIMEOUT_S:.0f} s"
    except WireError as error:
        cause = str(error)
    raise EngineError(f"{transport.base_url} does not answer: {cause}")


async def text_of_page(transport: Transport, path: str) -> str | None:
    """Return a page's text; None where there is none: an old release lacks some pages."""
    try:
        response = await get_page(transport, path)
    except EngineError:
        return None
    return response.content.decode(errors="replace") if response.status == _OK else None


# --- what a server offers -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Answers of a server's pages before any request."""

    base_url: str
    status: int | None = None
    """HTTP status of `/models`; None without an answer."""
    models: tuple[str, ...] = ()
    """Names of its models; empty where it does not list them."""
    silence: str | None = None
    """Reason why it does not answer."""
    server_info: str | None = None
    """SGLang's page of that name."""


async def offer_of(base_url: str, api_key: str) -> Offer:
    """Request a server's models, and SGLang's own page. Its faults are in the result."""
    transport = Transport(base_url=base_url, api_key=api_key)
    try:
        response = await _get(transport, f"{base_url}/models")
        if response.status != _OK:
            return Offer(base_url=base_url, status=response.status)
        info = await text_of_page(transport, "/server_info")
        info = info or await text_of_page(transport, "/get_server_info")
        models = _model_names(response.content)
        return Offer(base_url=base_url, status=_OK, models=models, server_info=info)
    except EngineError as error:
        _, _, cause = str(error).partition("does not answer: ")
        return Offer(base_url=base_url, silence=cause)
    finally:
        await transport.close()


def _model_names(content: bytes) -> tuple[str, ...]:
    try:
        return tuple(one_line(str(model["id"])) for model in parsed(content)["data"])
    except UNREADABLE:
        return ()


async def server_release(transport: Transport) -> str | None:
    """Return the name and version of SGLang, vLLM or llama.cpp, or None for other servers."""
    probes = (("sglang", "/server_info"), ("vllm", "/version"), ("llama.cpp", "/props"))
    for engine, path in probes:
        # A page that is not there belongs to another engine.
        page = await text_of_page(transport, path)
        version = _version(page) if page is not None else None
        if version is not None:
            return f"{engine} {version}"
    return None


def _version(page: str) -> str | None:
    try:
        facts = parsed(page.encode())
        version = facts.get("version") or facts.get("build_info")
    except UNREADABLE:
        return None
    return one_line(version)[:_MOST_RELEASE_CHARACTERS] if isinstance(version, str) else None
