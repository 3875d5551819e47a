"""Tools in the input: definitions, calls and results become one form; answers stay open."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.dataset.frozen import freeze, frozen_prompts
from pipeline.dataset.prompts import conversation, history, input_fingerprint, read_prompts
from pipeline.store.folder import LocalFolder
from schemas.config.requests import PromptsConfig
from schemas.prompt import FunctionCall, Message, Prompt, ToolCall
from tests.fakes.example_completion import TURN

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "default": None}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}

Row = dict[str, Any]


def read(path: Path, **keys: object) -> list[Prompt]:
    config = PromptsConfig.model_validate({"path": str(path), **keys})
    return list(read_prompts(config).prompts)


def read_lines(tmp_path: Path, *rows: Row, **keys: object) -> list[Prompt]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read(path, **keys)


def called(arguments: object, call_id: str | None = "c1") -> Row:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def call(arguments: str, call_id: str = "c1") -> ToolCall:
    return ToolCall(id=call_id, function=FunctionCall(name="weather", arguments=arguments))


QUESTION = {"role": "user", "content": "Weather?"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3C"}
ANSWER = {"role": "assistant", "content": "It is 3C."}
THANKS = {"role": "user", "content": "Thanks!"}


def roles(prompt: Prompt) -> list[str]:
    """Roles of the turns, with open ones as `open`, and calls as `call`."""
    return [
        "open" if m.is_open else "call" if m.role == "assistant" and m.tool_calls else m.role
        for m in prompt.messages
    ]


# -- turns


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([QUESTION, called("{}"), RESULT, ANSWER], ["user", "call", "tool", "open"]),
        ([QUESTION, called("{}"), RESULT], ["user", "call", "tool", "open"]),
        ([QUESTION, called("{}")], ["user", "open"]),
        ([QUESTION, ANSWER, THANKS, called("{}")], ["user", "open", "user", "open"]),
        ([QUESTION, called("{}"), THANKS, ANSWER], ["user", "call", "user", "open"]),
        (
            [QUESTION, called("{}"), RESULT, called("{}"), RESULT, ANSWER, THANKS],
            ["user", "call", "tool", "call", "tool", "open", "user", "open"],
        ),
        # Text before a call is part of the turn that calls, and so are further calls.
        ([QUESTION, ANSWER, called("{}"), RESULT, ANSWER], ["user", "call", "tool", "open"]),
        # A text that a result answers is a call in a form that is not known.
        ([QUESTION, ANSWER, RESULT, ANSWER], ["user", "assistant", "tool", "open"]),
        ([{"role": "system", "content": "s"}, QUESTION, called("{}")], ["system", "user", "open"]),
    ],
)
def test_calls_and_results_are_context_and_answers_are_open(
    tmp_path: Path, turns: list[Row], expected: list[str]
) -> None:
    [prompt] = read_lines(tmp_path, {"messages": turns})
    assert (prompt.problem, roles(prompt)) == (None, expected)


def test_context_is_unchanged(tmp_path: Path) -> None:
    turns = [QUESTION, {**called('{"city":  "Kyiv"}'), "content": "I look.",
             "reasoning_content": "Which city?"}, RESULT, ANSWER]  # fmt: skip
    [prompt] = read_lines(tmp_path, {"messages": turns, "tools": [TOOL]})
    assert prompt.tools == (TOOL,)
    assert prompt.messages[1:3] == (
        Message(
            role="assistant",
            content="I look.",
            reasoning_content="Which city?",
            tool_calls=(call('{"city":  "Kyiv"}'),),
        ),
        Message(role="tool", content="3C", tool_call_id="c1"),
    )


SHAREGPT_CALL = {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": 1}}'}


@pytest.mark.parametrize(
    ("turn", "result"),
    [
        (called({"city": 1}), RESULT),
        (called('{"city": 1}', None), {"role": "tool", "content": "3C"}),
        ({"role": "assistant", "function_call": {"name": "weather", "arguments": '{"city": 1}'}},
         {"role": "function", "name": "weather", "content": "3C"}),
        (SHAREGPT_CALL, {"from": "observation", "value": "3C"}),
        ({"from": "function_call", "value": f"[{SHAREGPT_CALL['value']}]"},
         {"from": "tool", "value": "3C"}),
        ({"from": "gpt", "value": f"<tool_call>\n{SHAREGPT_CALL['value']}\n</tool_call>"},
         {"from": "tool", "value": "<tool_response>\n3C\n</tool_response>"}),
        ({"role": "gpt", "tool_calls": json.dumps(called({"city": 1})["tool_calls"])}, RESULT),
    ],
)  # fmt: skip
def test_forms_of_a_call_are_read_as_one(tmp_path: Path, turn: Row, result: Row) -> None:
    first = {"from": "human", "value": "Weather?"}
    turns = [first, turn, result, {"from": "gpt", "value": "It is 3C."}]
    [prompt] = read_lines(tmp_path, {"conversations": turns})
    [_, calling, resulting, answer] = prompt.messages
    [found] = calling.tool_calls or ()
    assert (found.function, calling.content) == (call('{"city": 1}').function, "")
    assert (resulting.role, resulting.content, answer.is_open) == ("tool", "3C", True)
    assert found.id == resulting.tool_call_id
    assert found.id in ("c1", "call00000")


def test_results_without_an_id_belong_to_the_calls_in_their_order(tmp_path: Path) -> None:
    twice = [SHAREGPT_CALL, SHAREGPT_CALL]
    results = [{"from": "observation", "value": text} for text in ("1C", "2C")]
    turns = [{"from": "human", "value": "Weather?"}, *twice, *results]
    [prompt] = read_lines(tmp_path, {"conversations": turns})
    calls = prompt.messages[1].tool_calls or ()
    assert [entry.id for entry in calls] == ["call00000", "call00001"]
    assert [message.tool_call_id for message in prompt.messages[2:4]] == ["call00000", "call00001"]


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "function_call", "value": "weather in Kyiv"},
        {"from": "function_call", "value": '{"arguments": {}}'},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [3]},
    ],
)
def test_calls_that_cannot_be_read_name_their_turn(tmp_path: Path, turn: Row) -> None:
    [prompt] = read_lines(tmp_path, {"messages": [QUESTION, turn, RESULT]})
    assert prompt.problem is not None
    assert prompt.problem.kind == "bad_tools"
    assert prompt.problem.text.startswith("messages[1]: found ")


def test_tags_that_hold_no_call_stay_text(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "<tool_call>weather</tool_call>"}
    [prompt] = read_lines(tmp_path, {"messages": [QUESTION, answer, RESULT]})
    assert prompt.messages[1] == Message(role="assistant", content=answer["content"])


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, ""), ({"degrees": 3}, '{"degrees": 3}'), ([{"type": "text", "text": "3C"}], "3C")],
)
def test_result_may_be_empty_or_an_object(tmp_path: Path, content: object, text: str) -> None:
    turns = [QUESTION, called("{}"), {**RESULT, "content": content}]
    [prompt] = read_lines(tmp_path, {"messages": turns})
    assert prompt.messages[2].content == text


# -- definitions


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        json.dumps([TOOL]),
        TOOL,
        [TOOL["function"]],
        json.dumps([TOOL["function"]]),
        [json.dumps(TOOL)],
    ],
)
def test_forms_of_definitions_are_sent_as_one(tmp_path: Path, tools: object) -> None:
    [prompt] = read_lines(tmp_path, {"prompt": "Weather?", "tools": tools})
    assert prompt.tools == (TOOL,)


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_row_without_tools_has_the_id_that_it_always_had(tmp_path: Path, tools: object) -> None:
    [prompt] = read_lines(tmp_path, {"prompt": "Weather?", "tools": tools})
    [plain] = read_lines(tmp_path, {"prompt": "Weather?"})
    assert prompt == plain
    assert plain.row_id == "bec1202b6b1f59804dea2f731eb86c53-0"


def test_tools_are_part_of_the_id_and_the_hash(tmp_path: Path) -> None:
    rows = [{"prompt": "Weather?", "tools": tools} for tools in ([TOOL], [OTHER], None)]
    prompts = read_lines(tmp_path, *rows)
    assert len({prompt.row_id for prompt in prompts}) == 3
    assert len({prompt.content_hash for prompt in prompts}) == 3


SURROGATE = {"name": "weather", "description": "\ud800"}


@pytest.mark.parametrize(
    "tools", [3, "weather", [{"type": "function"}], ["weather"], [None], [SURROGATE]]
)
def test_tools_of_another_form_are_named(tmp_path: Path, tools: object) -> None:
    [prompt] = read_lines(tmp_path, {"prompt": "Weather?", "tools": tools})
    assert prompt.problem is not None
    assert prompt.problem.kind == "bad_tools"
    assert prompt.problem.text.startswith("tools")


def test_nulls_that_arrow_invents_are_left_out(tmp_path: Path) -> None:
    choice = {"name": "choose", "parameters": {"properties": {"unit": {"enum": ["C", None]}}}}
    tools = [TOOL, {"type": "function", "function": choice}]
    calls = [called({"city": "Kyiv"}), called({"unit": "C"})]
    rows = [
        {"messages": [QUESTION, calling, RESULT, ANSWER], "tools": [tool]}
        for calling, tool in zip(calls, tools, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    first, second = read(tmp_path / "prompts.parquet")
    plain = {"type": "object", "properties": {"city": {"type": "string"}}}
    assert first.tools == (
        {"type": "function", "function": {"name": "weather", "parameters": plain}},
    )
    assert second.tools == (tools[1],)
    arguments = [(p.messages[1].tool_calls or ())[0].function.arguments for p in (first, second)]
    assert arguments == ['{"city": "Kyiv"}', '{"unit": "C"}']
    assert first.messages[0] == Message(role="user", content="Weather?")


def test_nulls_of_json_are_kept(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["Weather?"], "tools": [json.dumps([TOOL])]})
    pq.write_table(table, tmp_path / "prompts.parquet")
    [prompt] = read(tmp_path / "prompts.parquet")
    assert prompt.tools == (TOOL,)


def test_column_is_chosen_by_name_or_turned_off(tmp_path: Path) -> None:
    row = {"prompt": "Weather?", "tools": [TOOL], "functions": [OTHER]}
    for column, tools in ((None, (TOOL,)), ("functions", (OTHER,)), (False, ())):
        [prompt] = read_lines(tmp_path, row, tools_column=column)
        assert prompt.tools == tools


# -- history


def test_later_turns_see_the_sources_answers_where_tools_answered(tmp_path: Path) -> None:
    plain = {"messages": [QUESTION, ANSWER, THANKS]}
    with_result = {"messages": [QUESTION, called("{}"), RESULT, ANSWER, THANKS]}
    default = read_lines(tmp_path, plain, with_result)
    original = read_lines(tmp_path, plain, with_result, history="original")
    generated = read_lines(tmp_path, plain, with_result, history="regenerated")
    texts = ("It is 3C.", "")
    assert [prompt.originals for prompt in default] == [None, texts]
    assert [prompt.originals for prompt in original] == [texts, texts]
    assert [prompt.originals for prompt in generated] == [None, None]
    # The source's answers are then part of what the model sees.
    assert default[0].content_hash == generated[0].content_hash != original[0].content_hash


def test_history_and_conversation_of_the_sources_answers(tmp_path: Path) -> None:
    [prompt] = read_lines(tmp_path, {"messages": [QUESTION, ANSWER, THANKS]}, history="original")
    seen = history(prompt.messages, [TURN], with_reasoning=True, originals=prompt.originals)
    assert [message.content for message in seen] == ["Weather?", "It is 3C.", "Thanks!"]
    assert seen[1].reasoning_content is None
    # The row is the generated conversation all the same.
    assert conversation(prompt.messages, [TURN])[1].content == "seven"


# -- frozen


def test_frozen_prompts_come_back_with_their_tools(tmp_path: Path) -> None:
    turns = [QUESTION, {**called("{}"), "reasoning_content": "hm"}, RESULT, ANSWER, THANKS]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": turns, "tools": [TOOL]}) + "\n")
    config = PromptsConfig(path=str(path))
    folder = LocalFolder(tmp_path / "out")
    folder.make()
    frozen = freeze(folder, "x", read_prompts(config))
    assert frozen.prompt(0) == read(path)[0]
    again = frozen_prompts(folder, "x")
    assert again is not None
    assert (again.has_tools, again.columns.tools_column) == (True, "tools")


def test_history_that_is_given_is_another_set_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "q"}\n')
    plain = PromptsConfig(path=str(path))
    given = PromptsConfig(path=str(path), history="original")
    assert input_fingerprint(plain) != input_fingerprint(given)
