"""Turn one request into one outcome through the `openai` client; only this module imports it.

Completions use the library's HTTP client, `openai.DefaultAioHttpClient`, without its layers above.
measured: openai 3.57, answers of 7 KB, 256 in flight, CPU per request: `chat.completions.create`
3.6 ms over httpx and 1.7 ms over aiohttp, `AsyncOpenAI.post` 1.1 ms, the HTTP client 0.5 ms.

Invariant: every call ends in exactly one Turn, Refusal or Interruption. Only a whole chat
completion that ended with `stop` or `length` counts as an answer, whatever the status says. The
client never retries; the worker does.
"""

import asyncio
import json
import resource
import ssl
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import monotonic
from typing import Any, TypeGuard

import aiohttp
import httpx2
import openai
import orjson

from pipeline.engines.body import request_body
from pipeline.errors import EngineError
from pipeline.models.thinking import THINK, row_template_kwargs, split_thinking
from schemas.chat_template import TemplateFacts, ThinkingTags
from schemas.completion import Interruption, Outcome, Refusal, TokenIds, Turn
from schemas.prompt import FunctionCall, Request, RowSettings, ToolCall

# The server read the request and refused it for its contents. Other statuses do not blame the row.
_ROWS_OWN_FAULT = frozenset({400, 413, 422})
# Requests that one client keeps in flight. assumed: twice the most that the planner gives an engine
MOST_IN_FLIGHT = 4096
# assumed: more than a worker opens besides its connections
_SPARE_FILES = 256
_CAUSE_LENGTH = 300
_PAGE_TIMEOUT_S = 5.0
# assumed: a machine that is up accepts a connection within this, however busy it is
_CONNECT_TIMEOUT_S = 30.0
# Less than the 5 s after which uvicorn, and so SGLang and vLLM, closes an idle connection.
_KEEPALIVE_S = 3.0
# assumed: parsing a larger body would hold up the event loop for a millisecond
_LARGE_BODY_BYTES = 256 * 1024
# Counts and token ids are 32-bit integers in the output.
_LARGEST_COUNT = 2**31 - 1


def raise_file_limit() -> int:
    """Raise the limit of open files where needed; return the requests that it allows in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_IN_FLIGHT + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    unlimited = soft == resource.RLIM_INFINITY
    return MOST_IN_FLIGHT if unlimited else max(1, min(MOST_IN_FLIGHT, soft - _SPARE_FILES))


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
    _page_client: openai.AsyncOpenAI | None = None
    _http: httpx2.AsyncClient | None = None

    async def generate(self, request: Request) -> Outcome:
        """Send the request once. Errors of server and network become outcomes, never exceptions."""
        sent_s = monotonic()
        try:
            # Not the transport's time-out, which counts from byte to byte.
            async with asyncio.timeout(self.timeout_s):
                response = await self._completions().post(
                    "chat/completions", content=self._content(request)
                )
        except TimeoutError:
            cause = f"no answer within {self.timeout_s:.0f} s"
            return Interruption(cause=cause, connection_failed=True, kind="timeout")
        except httpx2.TransportError as error:
            return Interruption(cause=_connection_fault(error), connection_failed=True)
        if response.status_code != httpx2.codes.OK:
            return _outcome_of_status(response)
        duration_s = monotonic() - sent_s
        opens_in_prompt = self._opens_in_prompt(request.settings)

        def outcome() -> Outcome:
            return _outcome_of_body(
                response.content,
                duration_s=duration_s,
                opens_in_prompt=opens_in_prompt,
                tags=self.template.tags or THINK,
            )

        if len(response.content) > _LARGE_BODY_BYTES:
            return await asyncio.to_thread(outcome)
        return outcome()

    async def context_length(self) -> int | None:
        """Read the context length from `/models`; None where the server does not report it.

        Raises EngineError when no server answers, or it refuses the key or is not ready.
        """
        try:
            raw = await self._client().models.with_raw_response.list(timeout=_PAGE_TIMEOUT_S)
        except openai.APIStatusError as error:
            if error.status_code in (404, 405, 501):
                return None
            raise EngineError(
                f"{self.base_url}/models answers {error.status_code}"
                + (": the key is refused" if error.status_code in (401, 403) else "")
            ) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            text = str(cause) or type(cause).__name__
            raise EngineError(f"{self.base_url} does not answer: {_short(text)}") from None
        return _context_length(raw.text)

    async def page(self, path: str) -> str | None:
        """Return a page outside the API, such as `/metrics`; None where the request fails."""
        url = f"{self.base_url.removesuffix('/v1')}{path}"
        try:
            return await self._client().get(url, cast_to=str, options={"timeout": _PAGE_TIMEOUT_S})
        except openai.OpenAIError:
            # The caller decides whether that matters: an old release lacks some pages.
            return None

    async def close(self) -> None:
        http, pages = self._http, self._page_client
        self._http, self._page_client = None, None
        if http is not None:
            await http.aclose()
        if pages is not None:
            await pages.close()

    # Both clients are created on first use, inside the event loop that will use them.

    def _completions(self) -> httpx2.AsyncClient:
        if self._http is None:
            self._http = _http_client(
                self.base_url,
                base_url=f"{self.base_url}/",
                headers={
                    "authorization": f"Bearer {self.api_key}",
                    "content-type": "application/json",
                },
                timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            )
        return self._http

    def _client(self) -> openai.AsyncOpenAI:
        if self._page_client is None:
            self._page_client = openai.AsyncOpenAI(
                base_url=self.base_url,
                api_key=self.api_key,
                max_retries=0,
                timeout=_PAGE_TIMEOUT_S,
                http_client=_http_client(self.base_url),
            )
        return self._page_client

    def _content(self, request: Request) -> bytes:
        body = request_body(
            request,
            model=self.model,
            template_kwargs=row_template_kwargs(
                self.template_kwargs, self.template, request.settings
            ),
            return_token_ids=self.return_token_ids,
            further_fields=self.further_fields,
        )
        try:
            return orjson.dumps(body)
        except TypeError:
            # An integer beyond 64 bits, as JSON may have it.
            return json.dumps(body).encode()

    def _opens_in_prompt(self, own: RowSettings) -> bool:
        if own.thinking is None:
            return self.opens_in_prompt
        return self.template.opens_thinking(thinking=own.thinking)


def _http_client(url: str, **settings: Any) -> httpx2.AsyncClient:  # noqa: ANN401 - those of httpx2
    """Open a client with as many connections as there are requests in flight."""
    if url.startswith("http://"):
        # The system's certificates need 0.1 s to load; without them a redirection to https fails.
        settings["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    limits = httpx2.Limits(
        max_connections=MOST_IN_FLIGHT,
        max_keepalive_connections=MOST_IN_FLIGHT,
        keepalive_expiry=_KEEPALIVE_S,
    )
    return openai.DefaultAioHttpClient(limits=limits, **settings)


def _connection_fault(error: httpx2.TransportError) -> str:
    """Describe what broke, with the limit if one of ours was hit.

    The transport reports every broken connection as a connect time-out; its cause tells them apart.
    """
    below = error.__cause__ or error
    if isinstance(below, aiohttp.ConnectionTimeoutError):
        return f"connection: not accepted within {_CONNECT_TIMEOUT_S:.0f} s"
    return f"connection: {_short(str(below) or type(below).__name__)}"


# --- responses ----------------------------------------------------------------------------------


def _outcome_of_status(response: httpx2.Response) -> Outcome:
    status = response.status_code
    text = f"HTTP {status}: {_short(_server_message(response.text))}"
    if status in _ROWS_OWN_FAULT:
        return Refusal(kind="refused_by_engine", text=text)
    return Interruption(cause=text, retry_after_s=_retry_after_s(response.headers), kind="refusal")


def _server_message(text: str) -> str:
    """Return the message of an OpenAI-style error body, with or without its `error` wrapper."""
    try:
        body = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        body = None
    inner = body.get("error", body) if isinstance(body, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else inner
    return message if isinstance(message, str) else text


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Read Retry-After, a number or an HTTP date, as seconds from now."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        wait = parsedate_to_datetime(value) - datetime.now(UTC)
    except (TypeError, ValueError):
        # Neither a number nor a date.
        return None
    return max(0.0, wait.total_seconds())


def _outcome_of_body(
    data: bytes, *, duration_s: float, opens_in_prompt: bool, tags: ThinkingTags
) -> Outcome:
    try:
        body = _parsed(data)
        choice = body["choices"][0]
        message = choice["message"]
        finish = choice["finish_reason"]
        content, reasoning = _texts(message)
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        text = data.decode(errors="replace")
        return Interruption(cause=f"HTTP 200, but not a chat completion: {_short(text)}")
    calls = _tool_calls(message)
    is_unusable = finish in ("function_call", "content_filter")
    if is_unusable or (finish == "tool_calls" and not calls):
        return Refusal(kind="unusable_finish", text=f"the engine ended with {finish!r}")
    if finish not in ("stop", "length", "tool_calls"):
        # SGLang ends with `abort` when the engine is going down or was told to.
        return Interruption(cause=f"the engine ended with {finish!r}")
    reasoning_text, answer_text = split_thinking(
        content,
        reasoning,
        opens_in_prompt=opens_in_prompt,
        was_cut=finish == "length",
        tags=tags,
    )
    usage = body.get("usage") if isinstance(body.get("usage"), dict) else {}
    prompt_ids = _ids(choice, body, "prompt_token_ids")
    prompt_tokens = _count(usage, "prompt_tokens")
    return Turn(
        reasoning_text=reasoning_text,
        answer_text=answer_text,
        finish_reason=finish,
        prompt_tokens=prompt_tokens,
        completion_tokens=_count(usage, "completion_tokens"),
        reasoning_tokens=_reasoning_tokens(usage),
        prompt_token_ids=prompt_ids,
        completion_token_ids=_ids(choice, body, "response_token_ids", "token_ids"),
        generation_boundary=len(prompt_ids) if prompt_ids is not None else prompt_tokens,
        duration_s=duration_s,
        tool_calls=calls,
    )


def _tool_calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...] | None:
    """Return the calls of an answer; None where it has none, or some of another form."""
    try:
        calls = [_tool_call(n, call) for n, call in enumerate(message.get("tool_calls") or ())]
    except (KeyError, TypeError, AttributeError):
        return None
    return tuple(calls) or None


def _tool_call(number: int, call: Mapping[str, Any]) -> ToolCall:
    arguments = call["function"].get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = FunctionCall(name=_unicode(call["function"]["name"]), arguments=_unicode(arguments))
    return ToolCall(id=_unicode(call.get("id") or f"call{number:05d}"), function=function)


def _parsed(data: bytes) -> Any:  # noqa: ANN401 - any JSON
    """Parse JSON. Raises ValueError.

    orjson needs a fifth of the time, and refuses halves of surrogate pairs.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)


def _texts(message: Mapping[str, object]) -> tuple[str, str | None]:
    """Return content and reasoning, which vLLM calls `reasoning` and others `reasoning_content`.

    A null content is an empty answer: the model ended before it wrote one.
    """
    # Some servers leave the content of an answer out that only calls tools.
    content = message.get("content") if message.get("tool_calls") else message["content"]
    fields = [message.get("reasoning_content"), message.get("reasoning")]
    reasoning = next((text for text in fields if isinstance(text, str)), None)
    content = "" if content is None else content
    if not isinstance(content, str):
        raise TypeError("content is not text")
    # An empty reasoning with tags in the content comes from a parser that did not match.
    return _unicode(content), _unicode(reasoning) if reasoning else None


def _unicode(text: str) -> str:
    """Replace unpaired surrogates, which no file can hold, with question marks."""
    return text.encode("utf-8", "replace").decode()


def _count(usage: Mapping[str, object], name: str) -> int | None:
    value = usage.get(name)
    return value if _is_count(value) else None


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def _reasoning_tokens(usage: Mapping[str, object]) -> int | None:
    """Return the reasoning tokens: SGLang has them in `usage` itself, others in its details."""
    details = usage.get("completion_tokens_details")
    inner = _count(details, "reasoning_tokens") if isinstance(details, dict) else None
    own = _count(usage, "reasoning_tokens")
    return own if own is not None else inner


def _ids(choice: Mapping[str, object], body: Mapping[str, object], *names: str) -> TokenIds | None:
    """Return token ids from the choice, the message (SGLang) or the top of the body (vLLM)."""
    message = choice["message"]
    for holder in (choice, message, body):
        for name in names:
            value = holder.get(name) if isinstance(holder, dict) else None
            ids = _packed(value) if isinstance(value, list) else None
            if ids is not None:
                return ids
    return None


def _packed(values: list[Any]) -> TokenIds | None:
    """Pack token ids; None where a value is no id that a column can hold."""
    if not set(map(type, values)) <= {int}:
        return None
    try:
        ids = array("i", values)
    except OverflowError:
        return None
    return ids if min(ids, default=0) >= 0 else None


def _context_length(text: str) -> int | None:
    """Read the context length of a `/models` answer under the key of SGLang, vLLM or llama.cpp."""
    try:
        models = [model for model in json.loads(text)["data"] if isinstance(model, dict)]
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError):
        models = []
    lengths = [model.get("max_model_len") for model in models]
    lengths += [(model.get("meta") or {}).get("n_ctx") for model in models]
    known = [length for length in lengths if isinstance(length, int) and length > 0]
    return min(known, default=None)


def _short(text: str) -> str:
    line = _unicode(" ".join(text.split()))
    return line if len(line) <= _CAUSE_LENGTH else line[: _CAUSE_LENGTH - 3] + "..."


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
    client = ChatClient(
        base_url=base_url,
        api_key=api_key,
        model="",
        template_kwargs={},
        opens_in_prompt=False,
        return_token_ids=False,
        timeout_s=_PAGE_TIMEOUT_S,
    )
    try:
        models = client._client().models  # noqa: SLF001 - this module's own
        raw = await models.with_raw_response.list(timeout=_PAGE_TIMEOUT_S)
        info = await client.page("/server_info") or await client.page("/get_server_info")
        return Offer(base_url=base_url, status=200, models=_model_names(raw.text), server_info=info)
    except openai.APIStatusError as error:
        return Offer(base_url=base_url, status=error.status_code)
    except openai.OpenAIError as error:
        cause = error.__cause__ or error
        return Offer(base_url=base_url, silence=_short(str(cause) or type(cause).__name__))
    finally:
        await client.close()


def _model_names(text: str) -> tuple[str, ...]:
    try:
        return tuple(model["id"] for model in json.loads(text)["data"])
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError):
        return ()


async def server_release(base_url: str, api_key: str) -> str | None:
    """Return the name and version of SGLang, vLLM or llama.cpp, or None for other servers."""
    root = base_url.removesuffix("/v1")
    probes = (("sglang", "/server_info"), ("vllm", "/version"), ("llama.cpp", "/props"))
    async with openai.AsyncOpenAI(
        base_url=root,
        api_key=api_key,
        max_retries=0,
        timeout=_PAGE_TIMEOUT_S,
        http_client=_http_client(root),
    ) as client:
        for engine, page in probes:
            try:
                facts = await client.get(page, cast_to=object)
            except openai.OpenAIError:
                # That page belongs to another engine.
                continue
            version = (
                facts.get("version") or facts.get("build_info") if isinstance(facts, dict) else None
            )
            if isinstance(version, str):
                return f"{engine} {version}"
    return None
