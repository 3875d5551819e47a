"""The body of a request, as a server on loopback gets it."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.engines.client import ChatClient
from schemas.completion import Turn
from schemas.config.requests import SamplingConfig
from schemas.prompt import FunctionCall, Message, Request, SamplingParams, ToolCall
from tests.fakes.scripted_server import ScriptedServer, serving

QUESTION = Message(role="user", content="how many?")
ALL_NULL = {name: None for name in SamplingConfig.model_fields if name != "base"}


def sent_body(
    sampling: SamplingParams,
    *messages: Message,
    further: Mapping[str, object] | None = None,
    tools: tuple[dict[str, object], ...] = (),
) -> dict[str, Any]:
    """Send one request over HTTP and return its body."""
    request = Request(
        row_id="r",
        sample_index=0,
        turn_index=0,
        messages=messages or (QUESTION,),
        sampling=sampling,
        tools=tools,
    )

    async def once(url: str) -> None:
        client = ChatClient(
            base_url=url,
            api_key="k",
            model="m",
            template_kwargs={},
            opens_in_prompt=False,
            return_token_ids=False,
            timeout_s=5.0,
            further_fields=further or {},
        )
        try:
            assert isinstance(await client.generate(request), Turn)
        finally:
            await client.close()

    with serving(ScriptedServer()) as server:
        asyncio.run(once(server.url))
    [body] = server.requests
    return body


def test_null_leaves_every_value_to_the_server() -> None:
    body = sent_body(SamplingParams.of(SamplingConfig.model_validate(ALL_NULL)))
    assert body == {"model": "m", "messages": [{"role": "user", "content": "how many?"}]}


def test_every_value_that_is_given_is_sent() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "repetition_penalty": 1.1, "max_tokens": 9, "seed": 3,
        "stop": ["\n\n", "END"], "logit_bias": {"15": -100.0, "7": 1.5},
    }  # fmt: skip
    assert given.keys() == ALL_NULL.keys()
    body = sent_body(SamplingParams.of(SamplingConfig.model_validate(given)))
    assert {name: body[name] for name in given} == given


def test_further_fields_are_sent_as_they_are() -> None:
    further = {"custom_params": {"thinking_budget": 2048}, "separate_reasoning": False}
    sampling = SamplingParams.of(SamplingConfig.model_validate({**ALL_NULL, "seed": 1}))
    body = sent_body(sampling, further=further)
    assert {name: body[name] for name in further} == further
    assert body["seed"] == 1


def test_earlier_turns_are_sent_with_their_reasoning() -> None:
    sampling = SamplingParams.of(SamplingConfig())
    answer = Message(role="assistant", content="7", reasoning_content="3 + 4")
    body = sent_body(replace(sampling, seed=None), QUESTION, answer, QUESTION)
    assert body["messages"][1] == {
        "role": "assistant", "content": "7", "reasoning_content": "3 + 4",
    }  # fmt: skip
    assert "seed" not in body


def test_tools_calls_and_results_are_sent_as_chat_messages() -> None:
    function: dict[str, object] = {"name": "w", "parameters": {"default": None}}
    tool: dict[str, object] = {"type": "function", "function": function}
    call = ToolCall(id="c1", function=FunctionCall(name="w", arguments='{"city": "Kyiv"}'))
    calling = Message(role="assistant", content="", reasoning_content="hm", tool_calls=(call,))
    result = Message(role="tool", content="3C", tool_call_id="c1", name="w")
    sampling = SamplingParams.of(SamplingConfig())
    body = sent_body(sampling, QUESTION, calling, result, tools=(tool,))
    called = {"name": "w", "arguments": '{"city": "Kyiv"}'}
    assert body["tools"] == [tool]
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": called}],
        },
        {"role": "tool", "content": "3C", "tool_call_id": "c1", "name": "w"},
    ]
    assert body["messages"][0] == {"role": "user", "content": "how many?"}


def test_integers_of_any_size_are_sent() -> None:
    sampling = SamplingParams.of(SamplingConfig())
    assert sent_body(sampling, further={"limit": 10**30})["limit"] == 10**30
