"""Turn one request into one outcome through the `openai` client; only this module imports it.

Invariant: every call ends in exactly one Turn, Refusal or Interruption. Only a whole chat
completion that ended with `stop` or `length` counts as an answer, whatever the status says. The
client never retries; the worker does.
"""

import asyncio
import json
import resource
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import monotonic
from typing import Any, TypeGuard, TypeVar

import anyio
import openai

from pipeline.engines.body import request_body
from pipeline.errors import EngineError
from pipeline.models.thinking import split_thinking
from schemas.completion import Interruption, Outcome, Refusal, Turn
from schemas.prompt import Request

# The server read the request and refused it for its contents. Other statuses do not blame the row.
_ROWS_OWN_FAULT = frozenset({400, 413, 422})
# Requests that one client keeps in flight. assumed: twice the most that the planner gives an engine
MOST_IN_FLIGHT = 4096
# openai/_constants.py: DEFAULT_CONNECTION_LIMITS, openai 1 to 3; further requests would wait.
_LANE_REQUESTS = 1000
# assumed: more than a worker opens besides its connections
_SPARE_FILES = 256
_CAUSE_LENGTH = 300
_PAGE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 10.0
# Counts and token ids are 32-bit integers in the output.
_LARGEST_COUNT = 2**31 - 1

T = TypeVar("T")


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
class _Lane:
    """A client of the library with its connections, and the requests that use them."""

    openai: openai.AsyncOpenAI
    in_flight: int = 0


@dataclass(slots=True)
class ChatClient:
    """Client of one chat-completions server.

    Requests are spread over lanes, each with as many connections as the library pools. Pages have a
    client of their own, so they never wait behind requests.

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
    _page_client: openai.AsyncOpenAI | None = None
    _lanes: list[_Lane] = field(default_factory=list)

    async def generate(self, request: Request) -> Outcome:
        """Send the request once. Errors of server and network become outcomes, never exceptions."""
        lane = self._lane()
        lane.in_flight += 1
        try:
            return await _closing_connections(self._generate(lane.openai, request))
        finally:
            lane.in_flight -= 1

    async def _generate(self, client: openai.AsyncOpenAI, request: Request) -> Outcome:
        sent_s = monotonic()
        try:
            raw = await client.chat.completions.with_raw_response.create(**self._arguments(request))
        except openai.APITimeoutError:
            cause = f"no answer within {self.timeout_s:.0f} s"
            return Interruption(cause=cause, connection_failed=True, kind="timeout")
        except openai.APIConnectionError as error:
            below = error.__cause__ or error
            text = str(below) or type(below).__name__
            return Interruption(cause=f"connection: {_short(text)}", connection_failed=True)
        except openai.APIStatusError as error:
            return _outcome_of_status(error)
        return _outcome_of_body(
            raw.text, duration_s=monotonic() - sent_s, opens_in_prompt=self.opens_in_prompt
        )

    async def context_length(self) -> int | None:
        """Read the context length from `/models`; None where the server does not report it.

        Raises EngineError when no server answers, or it refuses the key or is not ready.
        """
        try:
            raw = await _closing_connections(
                self._client().models.with_raw_response.list(timeout=_PAGE_TIMEOUT_S)
            )
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
            return await _closing_connections(
                self._client().get(url, cast_to=str, options={"timeout": _PAGE_TIMEOUT_S})
            )
        except openai.OpenAIError:
            # The caller decides whether that matters: an old release lacks some pages.
            return None

    async def close(self) -> None:
        clients = [lane.openai for lane in self._lanes]
        if self._page_client is not None:
            clients.append(self._page_client)
        self._lanes, self._page_client = [], None
        for client in clients:
            await client.close()

    def _lane(self) -> _Lane:
        for lane in self._lanes:
            if lane.in_flight < _LANE_REQUESTS:
                return lane
        # Created on first use, inside the event loop that will use it.
        self._lanes.append(_Lane(self._new_client()))
        return self._lanes[-1]

    def _client(self) -> openai.AsyncOpenAI:
        if self._page_client is None:
            self._page_client = self._new_client()
        return self._page_client

    def _new_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.api_key,
            max_retries=0,
            timeout=openai.Timeout(self.timeout_s, connect=_CONNECT_TIMEOUT_S),
        )

    def _arguments(self, request: Request) -> dict[str, Any]:
        body = request_body(
            request,
            model=self.model,
            template_kwargs=self.template_kwargs,
            return_token_ids=self.return_token_ids,
            further_fields=self.further_fields,
        )
        # The library sends fields that it does not know only from `extra_body`.
        return {"model": body.pop("model"), "messages": body.pop("messages"), "extra_body": body}


async def _closing_connections(call: Awaitable[T]) -> T:
    """Await a call of the library; on cancellation, let it finish closing its connections.

    The library shields that only with anyio's cancel scopes: an asyncio task cancelled midway
    would leave the other connections open for good.
    """
    scope, answers = anyio.CancelScope(), list[T]()

    async def call_in_scope() -> None:
        with scope:
            answers.append(await call)

    task = asyncio.create_task(call_in_scope())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        scope.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            # The caller has left: the result is discarded.
            task.exception()
        raise
    return answers[0]


# --- responses ----------------------------------------------------------------------------------


def _outcome_of_status(error: openai.APIStatusError) -> Outcome:
    text = f"HTTP {error.status_code}: {_short(_server_message(error.body) or error.message)}"
    if error.status_code in _ROWS_OWN_FAULT:
        return Refusal(kind="refused_by_engine", text=text)
    return Interruption(
        cause=text, retry_after_s=_retry_after_s(error.response.headers), kind="refusal"
    )


def _server_message(body: object) -> str | None:
    """Return the message of an OpenAI-style error body, with or without its `error` wrapper."""
    if not isinstance(body, dict):
        return None
    inner = body.get("error", body)
    message = inner.get("message") if isinstance(inner, dict) else inner
    return message if isinstance(message, str) else None


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


def _outcome_of_body(text: str, *, duration_s: float, opens_in_prompt: bool) -> Outcome:
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        message = choice["message"]
        finish = choice["finish_reason"]
        content, reasoning = _texts(message)
    except (json.JSONDecodeError, KeyError, IndexError, TypeError, RecursionError):
        return Interruption(cause=f"HTTP 200, but not a chat completion: {_short(text)}")
    if finish in ("tool_calls", "function_call", "content_filter"):
        return Refusal(kind="unusable_finish", text=f"the engine ended with {finish!r}")
    if finish not in ("stop", "length"):
        # SGLang ends with `abort` when the engine is going down or was told to.
        return Interruption(cause=f"the engine ended with {finish!r}")
    reasoning_text, answer_text = split_thinking(
        content, reasoning, opens_in_prompt=opens_in_prompt, was_cut=finish == "length"
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
    )


def _texts(message: Mapping[str, object]) -> tuple[str, str | None]:
    """Return content and reasoning, which vLLM calls `reasoning` and others `reasoning_content`.

    A null content is an empty answer: the model ended before it wrote one.
    """
    content = message["content"]
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


def _ids(
    choice: Mapping[str, object], body: Mapping[str, object], *names: str
) -> tuple[int, ...] | None:
    """Return token ids from the choice, the message (SGLang) or the top of the body (vLLM)."""
    message = choice["message"]
    for holder in (choice, message, body):
        for name in names:
            value = holder.get(name) if isinstance(holder, dict) else None
            if isinstance(value, list) and all(_is_count(token) for token in value):
                return tuple(value)
    return None


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


async def server_release(base_url: str, api_key: str) -> str | None:
    """Return the name and version of SGLang, vLLM or llama.cpp, or None for other servers."""
    root = base_url.removesuffix("/v1")
    probes = (("sglang", "/server_info"), ("vllm", "/version"), ("llama.cpp", "/props"))
    async with openai.AsyncOpenAI(
        base_url=root, api_key=api_key, max_retries=0, timeout=_PAGE_TIMEOUT_S
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
