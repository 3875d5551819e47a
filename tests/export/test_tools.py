"""Rows with tools in every format: definitions, calls and results go with the messages."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.export import main
from schemas.prompt import FunctionCall, Message, ToolCall
from tests.fakes.example_completion import COMPLETION, TURN
from tests.fakes.published_run import conversation_row, published_run

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = ToolCall(id="c1", function=FunctionCall(name="weather", arguments='{"city": "Kyiv"}'))
CALL_VALUES = {
    "id": "c1",
    "function": {"name": "weather", "arguments": '{"city": "Kyiv"}'},
    "type": "function",
}
QUESTION = Message(role="user", content="Weather?")
RESULT = Message(role="tool", content="3C", tool_call_id="c1")

PLAIN = conversation_row("plain", ("answer", "hm"))
WITH_RESULT = replace(
    COMPLETION,
    row_id="with-result",
    messages=(
        QUESTION,
        Message(role="assistant", content="I look.", tool_calls=(CALL,)),
        RESULT,
        Message(role="assistant", content="It is 3C."),
    ),
    turns=(replace(TURN, answer_text="It is 3C."),),
    tools=json.dumps(TOOLS),
)
CALLS = replace(
    COMPLETION,
    row_id="calls",
    messages=(QUESTION, Message(role="assistant", content="", tool_calls=(CALL,))),
    turns=(replace(TURN, answer_text="", tool_calls=(CALL,), finish_reason="tool_calls"),),
    finish_reason="tool_calls",
    tools=json.dumps(TOOLS),
    tool_calls=(CALL,),
)


def exported(tmp_path: Path, *options: str, plain: bool = False) -> pa.Table:
    rows = [PLAIN] if plain else [PLAIN, WITH_RESULT, CALLS]
    folder = published_run(tmp_path, rows)
    dest = tmp_path / "d"
    assert main([str(folder.root), "--to", str(dest), "--file-type", "parquet", *options]) == 0
    return pq.read_table(dest / "data")


def test_messages_have_their_calls_and_results(tmp_path: Path) -> None:
    plain, with_result, calls = exported(tmp_path).to_pylist()
    assert [message["tool_calls"] for message in plain["messages"]] == [None, None]
    assert with_result["messages"][1]["tool_calls"] == [CALL_VALUES]
    assert with_result["messages"][2]["tool_call_id"] == "c1"
    assert [json.loads(row["tools"]) for row in (with_result, calls)] == [TOOLS, TOOLS]
    found = [row["tool_calls"] for row in (plain, with_result, calls)]
    assert found == [None, None, [CALL_VALUES]]


def test_inline_messages_have_them_too(tmp_path: Path) -> None:
    _, with_result, _ = exported(tmp_path, "--reasoning", "inline").to_pylist()
    called, result = with_result["messages"][1:3]
    assert (called["content"], called["tool_calls"]) == ("I look.", [CALL_VALUES])
    assert (result["role"], result["tool_call_id"]) == ("tool", "c1")


def test_conversations_have_turns_of_their_own_for_calls(tmp_path: Path) -> None:
    _, with_result, calls = exported(tmp_path, "--format", "conversations").to_pylist()
    said = [(turn["from"], turn["value"]) for turn in with_result["conversations"]]
    value = '{"name": "weather", "arguments": {"city": "Kyiv"}}'
    assert said == [
        ("human", "Weather?"),
        ("gpt", "I look."),
        ("function_call", value),
        ("tool", "3C"),
        ("gpt", "It is 3C."),
    ]
    assert calls["conversations"][-1] == {"from": "function_call", "value": value}


def test_run_without_tools_has_no_field_for_them(tmp_path: Path) -> None:
    table = exported(tmp_path, plain=True)
    assert "tools" not in table.column_names
    assert "tool_calls" not in table.column_names
    fields = [f.name for f in table.schema.field("messages").type.value_type]
    assert fields == ["role", "content", "reasoning_content"]


def test_cut_row_loses_the_calls_of_the_turn_that_it_loses(tmp_path: Path) -> None:
    longer = replace(
        CALLS,
        messages=(
            QUESTION,
            Message(role="assistant", content="3C", reasoning_content="hm"),
            *CALLS.messages,
        ),
        turns=(replace(TURN, answer_text="3C", completion_tokens=3), *CALLS.turns),
    )
    turns = [replace(turn, prompt_tokens=5 * n) for n, turn in enumerate(longer.turns, start=1)]
    folder = published_run(tmp_path, [replace(longer, turns=tuple(turns))])
    dest = tmp_path / "d"
    assert main([str(folder.root), "--to", str(dest), "--max-tokens", "9", "--cut"]) == 0
    [row] = pq.read_table(dest / "data").to_pylist()
    assert (len(row["messages"]), row["tool_calls"]) == (2, None)
