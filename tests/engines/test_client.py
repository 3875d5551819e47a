"""The client against a real server on loopback: every answer becomes exactly one outcome."""

import asyncio
import gc
import gzip
import json
import resource
import threading
import warnings
from array import array
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from time import monotonic

import pytest

from pipeline.engines.client import ChatClient
from pipeline.engines.wire.pages import offer_of
from pipeline.engines.wire.transport import MOST_IN_FLIGHT, raise_file_limit
from pipeline.errors import EngineError
from schemas.completion import Interruption, Outcome, Refusal, Turn
from schemas.prompt import FunctionCall, Message, Request, ToolCall
from tests.fakes import example_completion
from tests.fakes.scripted_server import Reply, ScriptedServer, completion_body, serving

SAMPLING = replace(example_completion.SAMPLING, seed=11)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving(ScriptedServer()) as running:
        yield running


def ask(
    url: str, *, opens_in_prompt: bool = False, timeout_s: float = 5.0, key: str = "k"
) -> Outcome:
    """Send one request with a client of its own."""

    async def once() -> Outcome:
        client = client_for(url, opens_in_prompt=opens_in_prompt, timeout_s=timeout_s, key=key)
        try:
            return await client.generate(request())
        finally:
            await client.close()

    return asyncio.run(once())


def client_for(
    url: str, *, opens_in_prompt: bool = False, timeout_s: float = 5.0, key: str = "k"
) -> ChatClient:
    return ChatClient(
        base_url=url,
        api_key=key,
        model="m",
        template_kwargs={"enable_thinking": True},
        opens_in_prompt=opens_in_prompt,
        return_token_ids=True,
        timeout_s=timeout_s,
    )


def context_of(url: str) -> int | None:
    async def once() -> int | None:
        client = client_for(url)
        try:
            return await client.context_length()
        finally:
            await client.close()

    return asyncio.run(once())


def request() -> Request:
    return Request(
        row_id="r",
        sample_index=0,
        turn_index=0,
        messages=(Message(role="user", content="how many?"),),
        sampling=SAMPLING,
    )


def turn(outcome: Outcome) -> Turn:
    assert isinstance(outcome, Turn), outcome
    return outcome


def interruption(outcome: Outcome) -> Interruption:
    assert isinstance(outcome, Interruption), outcome
    return outcome


def reply_with(server: ScriptedServer, reply: Reply) -> None:
    server.script = lambda _request, _number: reply


def answered(server: ScriptedServer, text: str, finish: str = "stop", **message: object) -> None:
    reply_with(server, Reply(body=completion_body(text, finish, **message)))


def test_request_carries_sampling_thinking_and_the_key(server: ScriptedServer) -> None:
    ask(server.url, key="secret-key")
    sent = server.requests[0]
    assert sent["model"] == "m"
    assert sent["messages"] == [{"role": "user", "content": "how many?"}]
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.6, 0.95, 20)
    assert (sent["max_tokens"], sent["seed"]) == (64, 11)
    assert sent["chat_template_kwargs"] == {"enable_thinking": True}
    assert sent["return_token_ids"] is True
    assert "min_p" not in sent
    assert not sent.get("stream")
    assert server.headers[0]["authorization"] == "Bearer secret-key"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_sent_apart_is_kept_apart(server: ScriptedServer, name: str) -> None:
    answered(server, "\n\nseven", **{name: "let me count\n"})
    got = turn(ask(server.url))
    assert (got.reasoning_text, got.answer_text) == ("let me count", "seven")


def test_tags_left_in_the_text_are_split(server: ScriptedServer) -> None:
    answered(server, "<think>\nlet me count\n</think>\n\nseven")
    got = turn(ask(server.url))
    assert (got.reasoning_text, got.answer_text) == ("let me count", "seven")


def test_text_cut_inside_the_thinking_has_no_answer(server: ScriptedServer) -> None:
    answered(server, "<think>\nlet me", "length")
    got = turn(ask(server.url))
    assert (got.reasoning_text, got.answer_text, got.finish_reason) == ("let me", "", "length")


def test_closing_tag_alone_ends_the_thinking(server: ScriptedServer) -> None:
    answered(server, "let me count\n</think>\n\nseven")
    got = turn(ask(server.url))
    assert (got.reasoning_text, got.answer_text) == ("let me count", "seven")


def test_cut_text_of_a_template_that_opens_the_thinking_is_thinking(
    server: ScriptedServer,
) -> None:
    answered(server, "let me count", "length")
    assert turn(ask(server.url, opens_in_prompt=True)).reasoning_text == "let me count"
    assert turn(ask(server.url, opens_in_prompt=False)).answer_text == "let me count"


def test_engine_without_thinking_has_no_reasoning(server: ScriptedServer) -> None:
    answered(server, "seven")
    got = turn(ask(server.url, opens_in_prompt=True))
    assert (got.reasoning_text, got.answer_text) == (None, "seven")


def test_cut_inside_the_thinking_as_sglang_sends_it(server: ScriptedServer) -> None:
    answered(server, "", "length", reasoning_content="let me")
    got = turn(ask(server.url))
    assert (got.reasoning_text, got.answer_text) == ("let me", "")


def test_null_content_is_an_empty_answer(server: ScriptedServer) -> None:
    body = json.loads(completion_body("x"))
    body["choices"][0]["message"]["content"] = None
    reply_with(server, Reply(body=json.dumps(body).encode()))
    assert turn(ask(server.url)).answer_text == ""


def test_token_ids_and_usage_of_sglang_are_stored(server: ScriptedServer) -> None:
    body = json.loads(completion_body("seven", reasoning_content="hm"))
    body["choices"][0] |= {"prompt_token_ids": [1, 2, 3, 4], "response_token_ids": [9, 8]}
    body["usage"] = {"prompt_tokens": 4, "completion_tokens": 2, "reasoning_tokens": 1}
    reply_with(server, Reply(body=json.dumps(body).encode()))
    got = turn(ask(server.url))
    assert got.prompt_token_ids == array("i", [1, 2, 3, 4])
    assert got.completion_token_ids == array("i", [9, 8])
    assert got.generation_boundary == 4
    assert (got.prompt_tokens, got.completion_tokens, got.reasoning_tokens) == (4, 2, 1)


def test_token_ids_of_vllm_are_stored(server: ScriptedServer) -> None:
    body = json.loads(completion_body("seven", reasoning="hm"))
    body["prompt_token_ids"] = [1, 2]
    body["choices"][0]["token_ids"] = [9]
    body["usage"]["completion_tokens_details"] = {"reasoning_tokens": 1}
    reply_with(server, Reply(body=json.dumps(body).encode()))
    got = turn(ask(server.url))
    assert got.prompt_token_ids == array("i", [1, 2])
    assert got.completion_token_ids == array("i", [9])
    assert (got.generation_boundary, got.reasoning_tokens) == (2, 1)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_refused_request_is_the_rows_own_fault(server: ScriptedServer, status: int) -> None:
    body = b'{"object": "error", "message": "prompt is longer than the context", "code": 400}'
    reply_with(server, Reply(status=status, body=body))
    got = ask(server.url)
    assert isinstance(got, Refusal)
    assert got.text == f"HTTP {status}: prompt is longer than the context"


@pytest.mark.parametrize("status", [401, 404, 408, 409, 429, 500, 502, 503, 529])
def test_other_statuses_say_nothing_of_the_row(server: ScriptedServer, status: int) -> None:
    reply_with(server, Reply(status=status, body=b'{"error": {"message": "not now"}}'))
    got = interruption(ask(server.url))
    assert got.cause == f"HTTP {status}: not now"
    assert not got.connection_failed


def test_http_500_with_a_completion_in_its_body_is_no_answer(server: ScriptedServer) -> None:
    reply_with(server, Reply(status=500, body=completion_body("seven")))
    assert isinstance(ask(server.url), Interruption)


def test_retry_after_in_seconds_and_as_a_date_is_told(server: ScriptedServer) -> None:
    reply_with(server, Reply(status=429, headers=(("retry-after", "7"),)))
    refused = interruption(ask(server.url))
    assert (refused.retry_after_s, refused.kind) == (7.0, "refusal")
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    reply_with(server, Reply(status=503, headers=(("retry-after", later),)))
    waits_s = interruption(ask(server.url)).retry_after_s
    assert waits_s is not None
    assert 60 < waits_s < 120
    reply_with(server, Reply(status=503, headers=(("retry-after", "soon"),)))
    assert interruption(ask(server.url)).retry_after_s is None


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"error": "busy"}', "application/json"),
        (b'{"choices": []}', "application/json"),
        (b'{"choices": [{"message": {"role": "assistant"}}]}', "application/json"),
        (
            b'{"choices": [{"finish_reason": "stop", "message": {"content": 7}}]}',
            "application/json",
        ),
        (b'{"choices": [', "application/json"),
        (b"<html>a proxy says hello</html>", "text/html"),
        (b"", "application/json"),
        (b"[" * 200_000, "application/json"),
    ],
)
def test_body_that_is_no_completion_is_no_answer(
    server: ScriptedServer, body: bytes, content_type: str
) -> None:
    reply_with(server, Reply(body=body, content_type=content_type))
    assert "not a chat completion" in interruption(ask(server.url)).cause


@pytest.mark.parametrize("finish", ["abort", None, "error"])
def test_generation_that_the_engine_broke_off_is_no_answer(
    server: ScriptedServer, finish: str | None
) -> None:
    reply_with(server, Reply(body=completion_body("sev", finish)))
    assert "the engine ended with" in interruption(ask(server.url)).cause


CALL = {"id": "c7", "type": "function", "function": {"name": "w", "arguments": '{"city": 1}'}}


@pytest.mark.parametrize("content", ["I look.", "", None])
def test_answer_that_calls_a_tool_is_a_turn(server: ScriptedServer, content: str | None) -> None:
    reply_with(server, Reply(body=completion_body(content, "tool_calls", tool_calls=[CALL])))  # type: ignore[arg-type]
    called = turn(ask(server.url))
    assert (called.answer_text, called.finish_reason) == (content or "", "tool_calls")
    function = FunctionCall(name="w", arguments='{"city": 1}')
    assert called.tool_calls == (ToolCall(id="c7", function=function),)


def test_arguments_of_a_call_may_be_an_object_and_its_id_missing(server: ScriptedServer) -> None:
    function = {"name": "w", "arguments": {"city": "Kyiv"}}
    answered(server, "", "tool_calls", tool_calls=[{"function": function}, CALL])
    calls = turn(ask(server.url)).tool_calls or ()
    assert [call.id for call in calls] == ["call00000", "c7"]
    assert calls[0].function.arguments == '{"city": "Kyiv"}'


@pytest.mark.parametrize("calls", [[{"id": "1"}], [3], "w", [], [{"function": {"arguments": ""}}]])
def test_call_that_cannot_be_read_is_no_completion(server: ScriptedServer, calls: object) -> None:
    answered(server, "", "tool_calls", tool_calls=calls)
    assert isinstance(ask(server.url), Refusal)


def test_ended_without_a_call_is_no_completion_of_this_row(server: ScriptedServer) -> None:
    answered(server, "", "tool_calls", tool_calls=[{"id": "1"}])
    assert isinstance(ask(server.url), Refusal)


def test_cut_connection_is_an_interruption(server: ScriptedServer) -> None:
    reply_with(server, Reply(body=completion_body("seven"), cut=True))
    assert interruption(ask(server.url)).connection_failed


def test_nobody_listening_is_an_interruption() -> None:
    got = interruption(ask("http://127.0.0.1:9/v1"))
    assert got.connection_failed
    assert got.cause.startswith("connection: ")


def test_deadline_ends_a_request_that_is_never_answered(server: ScriptedServer) -> None:
    reply_with(server, Reply(body=completion_body("seven"), delay_s=3.0))
    late = interruption(ask(server.url, timeout_s=0.2))
    assert "no answer within" in late.cause
    assert late.kind == "timeout"


def test_deadline_leaves_open_whether_the_engine_lives(server: ScriptedServer) -> None:
    reply_with(server, Reply(body=completion_body("seven"), delay_s=3.0))
    assert interruption(ask(server.url, timeout_s=0.2)).connection_failed


def test_deadline_holds_for_a_server_that_sends_a_byte_now_and_then(
    server: ScriptedServer,
) -> None:
    reply_with(server, Reply(body=completion_body("seven"), drip_s=0.05))
    began_s = monotonic()
    assert interruption(ask(server.url, timeout_s=0.4)).kind == "timeout"
    assert monotonic() - began_s < 2.0


def test_body_without_an_end_is_cut_off_at_the_size_of_the_largest_answer(
    server: ScriptedServer,
) -> None:
    reply_with(server, Reply(body=b" " * 65536, endless=True))
    late = interruption(ask(server.url, timeout_s=30.0))
    assert "more than" in late.cause
    assert late.kind == "other"


def test_answer_as_long_as_its_token_budget_allows_is_read(server: ScriptedServer) -> None:
    # Every token as the longest one that JSON escapes.
    text = "\U0001f600" * 16 * SAMPLING.max_tokens if SAMPLING.max_tokens else ""
    answered(server, text)
    assert turn(ask(server.url)).answer_text == text


def test_nothing_compressed_is_requested_or_unpacked(server: ScriptedServer) -> None:
    body = gzip.compress(completion_body("x" * 10_000_000))
    reply_with(server, Reply(body=body, headers=(("content-encoding", "gzip"),)))
    assert "compressed" in interruption(ask(server.url)).cause
    assert server.headers[0]["accept-encoding"] == "identity"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_prompts_and_key_follow_no_redirect(server: ScriptedServer, status: int) -> None:
    with serving(ScriptedServer()) as other:
        to = f"{other.url}/chat/completions"
        reply_with(server, Reply(status=status, headers=(("location", to),)))
        refused = interruption(ask(server.url))
        server.models = Reply(status=status, headers=(("location", f"{other.url}/models"),))
        with pytest.raises(EngineError, match=str(status)):
            context_of(server.url)
        assert other.num_connections == 0
    assert refused.kind == "denial"
    assert to in refused.cause


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_server_that_is_busy_or_away_says_nothing_about_the_row(
    server: ScriptedServer, status: int
) -> None:
    reply_with(server, Reply(status=status))
    busy = interruption(ask(server.url))
    assert (busy.is_engines, busy.kind) == (True, "refusal")


def test_refused_connection_is_the_engines_and_a_broken_one_may_be_the_rows(
    server: ScriptedServer,
) -> None:
    assert interruption(ask("http://127.0.0.1:9/v1")).is_engines
    reply_with(server, Reply(body=completion_body("seven"), cut=True))
    assert not interruption(ask(server.url)).is_engines


HOSTILE = {
    "a number of 100,000 digits": completion_body("x").replace(b"3,", b"9" * 100_000 + b","),
    "lists in lists": b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a message that is a text": b'{"choices": [{"message": "x", "finish_reason": "stop"}]}',
    "a choice that is a list": b'{"choices": [[]]}',
    "a finish that is an object": b'{"choices": [{"message": {"content": "x"}, '
    b'"finish_reason": {"a": "' + b"x" * 5000 + b'"}}]}',
    "no text at all": bytes(range(256)) * 100,
    "not a number": completion_body("x").replace(b"3,", b"NaN,"),
}


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_body_is_an_outcome_of_its_request(
    server: ScriptedServer, body: bytes, status: int
) -> None:
    reply_with(server, Reply(status=status, body=body))
    outcome = ask(server.url)
    assert isinstance(outcome, Turn | Refusal | Interruption)
    if isinstance(outcome, Interruption):
        assert len(outcome.cause) < 400


def test_arguments_of_a_call_may_be_nested_beyond_what_json_writes(server: ScriptedServer) -> None:
    arguments: object = 1
    for _ in range(900):
        arguments = [arguments]
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    answered(server, "", "tool_calls", tool_calls=[call])
    assert isinstance(ask(server.url), Turn | Refusal)


@pytest.mark.parametrize("body", [*HOSTILE.values(), b'{"data": [{"max_model_len": 1e999}]}'])
def test_hostile_page_is_no_page(server: ScriptedServer, body: bytes) -> None:
    server.models = Reply(body=body)
    assert context_of(server.url) is None
    assert asyncio.run(offer_of(server.url, "k")).models == ()


def test_half_a_surrogate_pair_is_a_question_mark(server: ScriptedServer) -> None:
    body = completion_body("X", reasoning_content="Y").replace(b'"X"', b'"cut \\ud83d"')
    reply_with(server, Reply(body=body.replace(b'"Y"', b'"so \\ud83d"')))
    got = turn(ask(server.url))
    assert (got.reasoning_text, got.answer_text) == ("so ?", "cut ?")


def test_least_and_largest_counts_of_a_column_are_stored(server: ScriptedServer) -> None:
    body = json.loads(completion_body("seven"))
    body["usage"] = {"prompt_tokens": 0, "completion_tokens": 2**31 - 1}
    reply_with(server, Reply(body=json.dumps(body).encode()))
    got = turn(ask(server.url))
    assert (got.prompt_tokens, got.completion_tokens) == (0, 2**31 - 1)


def test_counts_and_ids_that_no_column_holds_are_left_out(server: ScriptedServer) -> None:
    body = json.loads(completion_body("seven"))
    body["usage"] = {"prompt_tokens": -1, "completion_tokens": 2**31}
    body["choices"][0] |= {"prompt_token_ids": [1], "response_token_ids": [2**31]}
    reply_with(server, Reply(body=json.dumps(body).encode()))
    got = turn(ask(server.url))
    assert (got.prompt_tokens, got.completion_tokens) == (None, None)
    assert (got.prompt_token_ids, got.completion_token_ids) == (array("i", [1]), None)


def test_more_requests_than_the_library_holds_connections_are_in_flight_at_once(
    server: ScriptedServer,
) -> None:
    # The limit of aiohttp is 100 connections unless it is told another.
    num_requests = 150
    all_are_there = threading.Event()

    def slow(_: object, number: int) -> Reply:
        if number == num_requests:
            all_are_there.set()
        return Reply(body=completion_body("well"), delay_s=1.0)

    server.script = slow

    async def all_at_once() -> tuple[int | None, list[Outcome]]:
        client = client_for(server.url)
        asked = [asyncio.create_task(client.generate(request())) for _ in range(num_requests)]
        await asyncio.to_thread(all_are_there.wait, 20.0)
        # What is asked beside them waits for none of them.
        context = await client.context_length()
        assert not any(task.done() for task in asked)
        outcomes = await asyncio.gather(*asked)
        await client.close()
        return context, outcomes

    context, outcomes = asyncio.run(asyncio.wait_for(all_at_once(), 30.0))
    assert context == 8192
    assert server.peak_in_flight == num_requests
    assert all(isinstance(outcome, Turn) for outcome in outcomes)


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_request_that_is_given_up_while_dead_connections_are_closed_leaves_none_open(
    steps: int,
) -> None:
    slow = Reply(body=completion_body("well"), delay_s=0.05)

    async def life() -> None:
        with serving(ScriptedServer(script=lambda asked, number: slow)) as server:
            client = client_for(server.url)
            await asyncio.gather(*(client.generate(request()) for _ in range(8)))
        # The server is gone: whoever asks next closes its eight connections first.
        asked = asyncio.create_task(client.generate(request()))
        for _ in range(steps):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert asked.done()
        await client.close()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        asyncio.run(life())
        gc.collect()
    assert [str(warning.message) for warning in told] == []


def test_requests_in_flight_are_bounded_by_the_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []

    def most_with(soft: int, hard: int) -> int:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
        return raise_file_limit()

    assert most_with(20_000, 20_000) == MOST_IN_FLIGHT
    assert most_with(resource.RLIM_INFINITY, resource.RLIM_INFINITY) == MOST_IN_FLIGHT
    assert not asked
    assert most_with(1024, 65_536) == MOST_IN_FLIGHT
    assert most_with(1024, 2048) == 2048 - 256
    assert asked == [(MOST_IN_FLIGHT + 256, 65_536), (2048, 2048)]


def test_client_asks_once(server: ScriptedServer) -> None:
    reply_with(server, Reply(status=500))
    ask(server.url)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("models", "context"),
    [
        ([{"id": "m", "max_model_len": 8192}], 8192),
        ([{"id": "m", "meta": {"n_ctx": 2048}}], 2048),
        ([{"id": "a", "max_model_len": 8192}, {"id": "b", "max_model_len": 4096}], 4096),
        ([{"id": "m", "max_model_len": 0}, {"id": "n", "meta": None}, "no model"], None),
        (None, None),
    ],
)
def test_context_length_is_read_under_each_servers_key(
    server: ScriptedServer, models: object, context: int | None
) -> None:
    server.models = Reply(body=json.dumps({"data": models}).encode())
    assert context_of(server.url) == context


@pytest.mark.parametrize("status", [404, 405, 501])
def test_server_without_a_models_page_reports_no_context(
    server: ScriptedServer, status: int
) -> None:
    server.models = Reply(status=status)
    assert context_of(server.url) is None


def test_refused_key_and_absent_server_are_told(server: ScriptedServer) -> None:
    server.models = Reply(status=401)
    with pytest.raises(EngineError, match="the key is refused"):
        context_of(server.url)
    with pytest.raises(EngineError, match="does not answer"):
        context_of("http://127.0.0.1:9/v1")


def test_release_of_a_server_that_does_not_tell_is_unknown(server: ScriptedServer) -> None:
    async def once() -> str | None:
        client = client_for(server.url)
        try:
            return await client.release()
        finally:
            await client.close()

    assert asyncio.run(once()) is None
