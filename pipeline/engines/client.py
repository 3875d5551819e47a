"""One request → one outcome, through the `openai` client. The one door to it.

Invariant: every call ends in exactly one Turn, Refusal or Interruption. An answer is believed only
when it is a whole chat completion that ended with `stop` or `length`; whatever else comes back,
with whatever status, is not an answer. The client never retries: retries are the worker's.
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

from pipeline.errors import EngineError
from pipeline.models.thinking import split_thinking
from schemas.completion import Interruption, Outcome, Refusal, Turn
from schemas.prompt import Message, Request

_ROWS_OWN_FAULT = frozenset({400, 413, 422})
"""The request was read and refused for what it says. Any other status says nothing of the row."""

MOST_IN_FLIGHT = 4096
"""Requests that one client keeps in flight. assumed: twice what the planner asks of an engine."""

_LANE_REQUESTS = 1000
# openai/_constants.py: DEFAULT_CONNECTION_LIMITS, openai 1 to 3; more wait for a connection.
_FILES_KEPT_FREE = 256
# assumed: more than what a worker opens beside its connections
T = TypeVar("T")

_CAUSE_LENGTH = 300
_NOT_ANSWERED_S = 5.0
_CONNECT_S = 10.0
_LARGEST_COUNT = 2**31 - 1
# Counts and token ids are 32-bit integers in the output.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says of itself; None where it does not."""

    model_names: tuple[str, ...]
    context_length: int | None


def most_in_flight() -> int:
    """What this process may keep in flight, by the files that it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_IN_FLIGHT + _FILES_KEPT_FREE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    unlimited = soft == resource.RLIM_INFINITY
    return MOST_IN_FLIGHT if unlimited else max(1, min(MOST_IN_FLIGHT, soft - _FILES_KEPT_FREE))


@dataclass(slots=True)
class _Lane:
    """A client of the library's own, with its connections, and how many are taken."""

    openai: openai.AsyncOpenAI
    in_flight: int = 0


@dataclass(slots=True)
class ChatClient:
    """One server, asked for chat completions.

    Requests go out in lanes of so many connections as the library holds; what is asked beside
    them has a client of its own, so that it never waits behind them.

    `opens_in_prompt` says that the model's template itself opens the thinking.
    """

    base_url: str
    api_key: str
    model: str
    template_kwargs: Mapping[str, object]
    opens_in_prompt: bool
    return_token_ids: bool
    timeout_s: float
    _beside: openai.AsyncOpenAI | None = None
    _lanes: list[_Lane] = field(default_factory=list)

    async def generate(self, request: Request) -> Outcome:
        """Ask once. Never raises for what a server or a network does."""
        lane = self._lane()
        lane.in_flight += 1
        try:
            return await _to_its_end(self._generate(lane.openai, request))
        finally:
            lane.in_flight -= 1

    async def _generate(self, client: openai.AsyncOpenAI, request: Request) -> Outcome:
        asked_s = monotonic()
        try:
            raw = await client.chat.completions.with_raw_response.create(**self._arguments(request))
        except openai.APITimeoutError:
            cause = f"no answer within {self.timeout_s:.0f} s"
            return Interruption(cause=cause, connection_failed=True)
        except openai.APIConnectionError as error:
            below = error.__cause__ or error
            said = str(below) or type(below).__name__
            return Interruption(cause=f"connection: {_short(said)}", connection_failed=True)
        except openai.APIStatusError as error:
            return _outcome_of_status(error)
        return _outcome_of_body(
            raw.text, duration_s=monotonic() - asked_s, opens_in_prompt=self.opens_in_prompt
        )

    async def facts(self) -> ServerFacts:
        """`/models`, as far as the server has it.

        Raises EngineError when there is no server, or it refuses the key or is not ready.
        """
        try:
            raw = await _to_its_end(
                self._client().models.with_raw_response.list(timeout=_NOT_ANSWERED_S)
            )
        except openai.APIStatusError as error:
            if error.status_code in (404, 405, 501):
                return ServerFacts(model_names=(), context_length=None)
            raise EngineError(
                f"{self.base_url}/models answers {error.status_code}"
                + (": the key is refused" if error.status_code in (401, 403) else "")
            ) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            said = str(cause) or type(cause).__name__
            raise EngineError(f"{self.base_url} does not answer: {_short(said)}") from None
        return _facts(raw.text)

    async def page(self, path: str) -> str | None:
        """A page beside the API, `/metrics` for example; None where it does not answer well."""
        url = f"{self.base_url.removesuffix('/v1')}{path}"
        try:
            return await _to_its_end(
                self._client().get(url, cast_to=str, options={"timeout": _NOT_ANSWERED_S})
            )
        except openai.OpenAIError:
            # Whether that matters is the caller's to say: an old release lacks a page.
            return None

    async def close(self) -> None:
        clients = [lane.openai for lane in self._lanes]
        if self._beside is not None:
            clients.append(self._beside)
        self._lanes, self._beside = [], None
        for client in clients:
            await client.close()

    def _lane(self) -> _Lane:
        for lane in self._lanes:
            if lane.in_flight < _LANE_REQUESTS:
                return lane
        # Made on first use, inside the loop that will use it.
        self._lanes.append(_Lane(self._new_client()))
        return self._lanes[-1]

    def _client(self) -> openai.AsyncOpenAI:
        if self._beside is None:
            self._beside = self._new_client()
        return self._beside

    def _new_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.api_key,
            max_retries=0,
            timeout=openai.Timeout(self.timeout_s, connect=_CONNECT_S),
        )

    def _arguments(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        optional = {
            "seed": sampling.seed,
            "presence_penalty": sampling.presence_penalty,
        }
        beyond_openai = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "chat_template_kwargs": dict(self.template_kwargs) or None,
            "return_token_ids": self.return_token_ids or None,
        }
        return {
            "model": self.model,
            "messages": [_message(message) for message in request.messages],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **_given(optional),
            "extra_body": _given(beyond_openai),
        }


async def _to_its_end(call: Awaitable[T]) -> T:
    """Await a call of the library's; when this is cancelled, what the call has begun to close is.

    The library shields its closing of connections by scopes of anyio's alone: a task of asyncio's
    that is cancelled in the midst of it leaves the other connections open for good.
    """
    scope, answers = anyio.CancelScope(), list[T]()

    async def asked() -> None:
        with scope:
            answers.append(await call)

    task = asyncio.create_task(asked())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        scope.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # it was given up: how it ended is nobody's to hear
        raise
    return answers[0]


def _given(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _message(message: Message) -> dict[str, str]:
    sent = {"role": message.role, "content": message.content}
    if message.reasoning_content is not None:
        sent["reasoning_content"] = message.reasoning_content
    return sent


# -- what came back


def _outcome_of_status(error: openai.APIStatusError) -> Outcome:
    said = f"HTTP {error.status_code}: {_short(_server_message(error.body) or error.message)}"
    if error.status_code in _ROWS_OWN_FAULT:
        return Refusal(kind="refused_by_engine", text=said)
    return Interruption(cause=said, retry_after_s=_retry_after_s(error.response.headers))


def _server_message(body: object) -> str | None:
    """The message of an OpenAI-style error body, with or without its `error` wrapper."""
    if not isinstance(body, dict):
        return None
    inner = body.get("error", body)
    message = inner.get("message") if isinstance(inner, dict) else inner
    return message if isinstance(message, str) else None


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Retry-After as seconds from now, given as a number or as an HTTP date."""
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
        # The server's header is no date either: it asked for nothing that can be honoured.
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
    """Content and reasoning. SGLang and llama.cpp say `reasoning_content`, vLLM `reasoning`.

    A null content is an empty answer: the model ended before it wrote one.
    """
    content = message["content"]
    apart = [message.get("reasoning_content"), message.get("reasoning")]
    reasoning = next((text for text in apart if isinstance(text, str)), None)
    content = "" if content is None else content
    if not isinstance(content, str):
        raise TypeError("content is no text")
    # An empty string beside tags in the text is a parser that found nothing.
    return _unicode(content), _unicode(reasoning) if reasoning else None


def _unicode(text: str) -> str:
    """The text with halves of surrogate pairs, which no file can hold, as question marks."""
    return text.encode("utf-8", "replace").decode()


def _count(usage: Mapping[str, object], name: str) -> int | None:
    value = usage.get(name)
    return value if _is_count(value) else None


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


def _reasoning_tokens(usage: Mapping[str, object]) -> int | None:
    """SGLang counts them in `usage` itself, others in `completion_tokens_details`."""
    details = usage.get("completion_tokens_details")
    inner = _count(details, "reasoning_tokens") if isinstance(details, dict) else None
    found = _count(usage, "reasoning_tokens")
    return found if found is not None else inner


def _ids(
    choice: Mapping[str, object], body: Mapping[str, object], *names: str
) -> tuple[int, ...] | None:
    """Token ids beside the message (SGLang), in the choice or at the top (vLLM)."""
    message = choice["message"]
    for holder in (choice, message, body):
        for name in names:
            value = holder.get(name) if isinstance(holder, dict) else None
            if isinstance(value, list) and all(_is_count(token) for token in value):
                return tuple(value)
    return None


def _facts(text: str) -> ServerFacts:
    """Model names and context length of a `/models` answer; servers differ in what they add."""
    try:
        models = [model for model in json.loads(text)["data"] if isinstance(model, dict)]
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError):
        models = []
    names = tuple(model["id"] for model in models if isinstance(model.get("id"), str))
    lengths = [model.get("max_model_len") for model in models]
    lengths += [(model.get("meta") or {}).get("n_ctx") for model in models]
    known = [length for length in lengths if isinstance(length, int) and length > 0]
    return ServerFacts(model_names=names, context_length=min(known, default=None))


def _short(text: str) -> str:
    line = _unicode(" ".join(text.split()))
    return line if len(line) <= _CAUSE_LENGTH else line[: _CAUSE_LENGTH - 3] + "..."


async def server_release(base_url: str, api_key: str) -> str | None:
    """Engine and version as the server tells them, or None: SGLang, vLLM, llama.cpp."""
    root = base_url.removesuffix("/v1")
    probes = (("sglang", "/server_info"), ("vllm", "/version"), ("llama.cpp", "/props"))
    async with openai.AsyncOpenAI(
        base_url=root, api_key=api_key, max_retries=0, timeout=_NOT_ANSWERED_S
    ) as client:
        for engine, page in probes:
            try:
                facts = await client.get(page, cast_to=object)
            except openai.OpenAIError:
                # The page is another engine's; what release it is is told, never needed.
                continue
            version = (
                facts.get("version") or facts.get("build_info") if isinstance(facts, dict) else None
            )
            if isinstance(version, str):
                return f"{engine} {version}"
    return None
