"""Rows of a run with tools, as its parts have them."""

import pyarrow as pa

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def with_tools(*, calls: object, tools: object) -> pa.Table:
    """Build a row that calls a tool, and one without any."""
    said = {"reasoning_content": None, "tool_calls": None, "tool_call_id": None}
    asked = {**said, "role": "user", "content": "1 + 2?"}
    called = {**said, "role": "assistant", "content": "", "tool_calls": calls}
    result = {**said, "role": "tool", "content": "3", "tool_call_id": "c1"}
    answer = {**said, "role": "assistant", "content": "three", "reasoning_content": "so"}
    return pa.table(
        {
            "row_id": ["a", "b"],
            "sample_index": pa.array([0, 0], pa.int32()),
            "messages": [[asked, called, result, answer], [asked, answer]],
            "tools": [tools, None],
        }
    )
