"""Turn one request into one outcome through the HTTP client of the `openai` library.

Completions use that client, `openai.DefaultAioHttpClient`, without its layers above.
measured: openai 3.57, answers of 7 KB, 256 in flight, CPU per request: `chat.completions.create`
3.6 ms over httpx and 1.7 ms over aiohttp, `AsyncOpenAI.post` 1.1 ms, the HTTP client 0.5 ms.

Invariant: every call ends in exactly one Turn, Refusal or Interruption, within the time limit. The
client never retries; the worker does.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import monotonic

import orjson

from pipeline.engines.wire.answers import outcome_of
from pipeline.engines.wire.body import request_body
from pipeline.engines.wire.continuing import Continuing
from pipeline.engines.wire.contract import Contract
from pipeline.engines.wire.pages import abort_all, context_length, server_release, text_of_page
from pipeline.engines.wire.peer import PeerCheck
from pipeline.engines.wire.transport import Transport, UnreachableError, WireError
from pipeline.models.thinking import THINK, row_template_kwargs
from schemas.chat_template import TemplateFacts
from schemas.completion import Interruption, Outcome, Turn
from schemas.prompt import Request, RowSettings

# assumed: parsing a larger body would hold up the event loop for a millisecond
_LARGE_BODY_BYTES = 256 * 1024
# The largest response to a request. assumed: a token is at most 32 characters that JSON escapes as
# six bytes each, and its id 10 bytes; a prompt has at most a token per byte, and its ids come back
_BYTES_PER_TOKEN = 256
_BYTES_PER_PROMPT_BYTE = 10
_BYTES_BESIDE_TOKENS = 2**20
# assumed: log probabilities of 20 alternatives, and whatever else `request` asks for
_BYTES_PER_TOKEN_WITH_FURTHER_FIELDS = 8192
# assumed: no model writes more without a limit
_MOST_TOKENS_WITHOUT_LIMIT = 262_144


@dataclass(slots=True)
class ChatClient:
    """Client of one chat-completions server.

    Pages have connections of their own, so they never wait behind requests.

    `opens_in_prompt` means that the model's template itself opens the thinking.
    """

    base_url: str
    api_key: str
    model: str
    template_kwargs: Mapping[str, object]
    opens_in_prompt: bool
    return_token_ids: bool
    timeout_s: float
    further_fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of every request's body beyond those of a prompt and its sampling."""
    template: TemplateFacts = field(default_factory=lambda: TemplateFacts(source="not known"))
    """Facts of the model's chat template: its tags, and the switch of a row's own thinking."""
    continuing: Continuing | None = None
    """Turns that go on after a planned stop; None for a server that does not continue any."""
    check_peer: PeerCheck | None = None
    """Check of each new connection to an engine of ours."""
    contract: Contract | None = None
    """Checks of the first answers; None for a server of ours, which has none to fail."""
    _completions: Transport = field(init=False)
    _pages: Transport = field(init=False)

    def __post_init__(self) -> None:
        self._completions, self._pages = self._new_transport(), self._new_transport()

    def _new_transport(self) -> Transport:
        return Transport(base_url=self.base_url, api_key=self.api_key, check_peer=self.check_peer)

    async def generate(self, request: Request) -> Outcome:
        """Send the request once. Errors of server and network become outcomes, never exceptions."""
        request = self.fitted(request)
        sent_s, content = monotonic(), self._content(request)
        try:
            response = await self._completions.post(
                f"{self.base_url}/chat/completions",
                content,
                most_bytes=self._most_bytes(request, content),
                timeout_s=self.timeout_s,
            )
        except TimeoutError:
            cause = f"no answer within {self.timeout_s:.0f} s"
            return Interruption(cause=cause, connection_failed=True, kind="timeout")
        except UnreachableError as error:
            return Interruption(cause=str(error), connection_failed=True, is_engines=True)
        except WireError as error:
            return Interruption(cause=str(error), connection_failed=True)
        duration_s = monotonic() - sent_s
        opens_in_prompt = self._opens_in_prompt(request.settings)

        continuing, contract = self.continuing, self.contract

        def outcome() -> Outcome | None:
            found = outcome_of(
                response,
                duration_s=duration_s,
                opens_in_prompt=opens_in_prompt,
                tags=self.template.tags or THINK,
            )
            if contract is not None and isinstance(found, Turn):
                found = contract.outcome(
                    request,
                    self._template_kwargs(request.settings),
                    response,
                    found,
                    opens_in_prompt=opens_in_prompt,
                )
            if continuing is None:
                return found
            return continuing.outcome(request, found, opens_in_prompt=opens_in_prompt)

        takes_long = contract is not None and not contract.is_settled
        takes_long |= continuing is not None and continuing.takes_long(request)
        if takes_long or len(response.content) > _LARGE_BODY_BYTES:
            found = await asyncio.to_thread(outcome)
        else:
            found = outcome()
        return found or await self.generate(replace(request, continues=None))

    def fitted(self, request: Request) -> Request:
        """Return the request, without its first part where this server cannot continue it."""
        if self.continuing is not None:
            return self.continuing.fitted(request)
        return request if request.continues is None else replace(request, continues=None)

    async def abort_all(self) -> bool:
        """Have the server end all requests with what they have. Return whether it will."""
        return self.continuing is not None and await abort_all(self._pages)

    async def context_length(self) -> int | None:
        """Read the context length from `/models`; None where the server does not report it.

        Raises EngineError when no server answers, or it refuses the key or is not ready.
        """
        return await context_length(self._pages)

    async def release(self) -> str | None:
        """Return the name and version of the server; None where it does not tell."""
        return await server_release(self._pages)

    async def page(self, path: str) -> str | None:
        """Return a page outside the API, such as `/metrics`; None where the request fails."""
        return await text_of_page(self._pages, path)

    async def close(self) -> None:
        await self._completions.close()
        await self._pages.close()

    def _most_bytes(self, request: Request, content: bytes) -> int:
        """Return the size that no answer to the request exceeds."""
        tokens = request.sampling.max_tokens or _MOST_TOKENS_WITHOUT_LIMIT
        further = _BYTES_PER_TOKEN_WITH_FURTHER_FIELDS if self.further_fields else 0
        return (
            _BYTES_BESIDE_TOKENS
            + tokens * max(_BYTES_PER_TOKEN, further)
            + len(content) * _BYTES_PER_PROMPT_BYTE
        )

    def _content(self, request: Request) -> bytes:
        body = request_body(
            request,
            model=self.model,
            template_kwargs=self._template_kwargs(request.settings),
            return_token_ids=self.return_token_ids,
            further_fields=self.further_fields,
        )
        try:
            return orjson.dumps(body)
        except TypeError:
            # An integer beyond 64 bits, as JSON may have it.
            return json.dumps(body).encode()

    def _template_kwargs(self, own: RowSettings) -> dict[str, object]:
        return row_template_kwargs(self.template_kwargs, self.template, own)

    def _opens_in_prompt(self, own: RowSettings) -> bool:
        if own.thinking is None:
            return self.opens_in_prompt
        return self.template.opens_thinking(thinking=own.thinking)
