"""Chats: a row's messages in the shapes that trainers read. Pure.

Invariant: a message keeps its text. Shapes for SpecForge and speculators have no null and the same
fields in every message, since `load_dataset("json")` takes the types from the first 10 MB and
refuses a later value where it saw only nulls.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.export import ExportFormat, ReasoningPlace

Row = dict[str, Any]
Message = dict[str, Any]

_SHAREGPT = {
    "system": "system",
    "developer": "system",
    "user": "human",
    "assistant": "gpt",
    "tool": "tool",
}
# Names of both trainers: SpecForge drops an unknown role before the first user turn, and
# speculators takes one for the assistant's.
_TRAINER_ROLES = {"developer": "system"}
_TOOL_TURN_FIELDS = ("tool_call_id", "name")
_CALL = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
    ]
)
# Content of SpecForge's system turn for gpt-oss, where the run sets no `reasoning_effort`: the
# default of gpt-oss's own template. SpecForge's is low.
_HARMONY_EFFORT = "medium"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """Shape of exported messages."""

    format: ExportFormat
    reasoning: ReasoningPlace
    has_samples: bool = False
    """True if the run has several samples per prompt, whose number becomes part of the id."""
    has_tools: bool = False
    """True if some rows have tools, tool calls or tool results."""
    harmony_effort: str | None = None
    """Reasoning effort of gpt-oss, which SpecForge reads in channels; null for other models."""

    @property
    def has_lists_of_calls(self) -> bool:
        """Tell if turns have calls as lists, which have a type only where one is not empty."""
        return self.format == "speculators" and self.has_tools

    @property
    def _is_for_trainer(self) -> bool:
        return self.format in ("specforge", "speculators")

    def row_name(self, row_id: str, sample_index: int) -> str:
        """Return the id of an exported row, unique in the data set."""
        return f"{row_id}#{sample_index}" if self.has_samples else row_id

    def columns(self, batch: pa.Table) -> tuple[list[tuple[str, pa.Array]], dict[int, str]]:
        """Convert a batch to columns, and map the places without exported form to their reason.

        Columns of left-out places are null.
        """
        rows, left_out = [], {}
        for place, row in enumerate(batch.to_pylist()):
            fault = self._fault(row)
            if fault is not None:
                left_out[place] = fault
            rows.append(None if fault else self._row(row))
        return [
            (name, pa.array([None if row is None else row[name] for row in rows], kind))
            for name, kind in self._types().items()
        ], left_out

    def _types(self) -> dict[str, pa.DataType]:
        if self.format == "conversations":
            return {"conversations": _listed_texts(["from", "value"])}
        if not self._is_for_trainer:
            return {"messages": self._turns_type()}
        types: dict[str, pa.DataType] = {"id": pa.string()}
        if self.format == "specforge" and self.harmony_effort is None:
            types["status"] = pa.string()
        return types | {"conversations": self._turns_type()} | self._tools_type()

    def _turns_type(self) -> pa.DataType:
        if self.harmony_effort is not None:
            return _listed_texts(["role", "content"])
        kinds = [(name, pa.string()) for name in ("role", "content")]
        if self._is_for_trainer and self.reasoning == "apart":
            kinds.append(("reasoning_content", pa.string()))
        if self.has_tools:
            is_text = self.format == "specforge"
            kinds.append(("tool_calls", pa.string() if is_text else pa.list_(_CALL)))
            kinds += [(name, pa.string()) for name in _TOOL_TURN_FIELDS]
        return pa.list_(pa.struct(kinds))

    def _tools_type(self) -> dict[str, pa.DataType]:
        is_given = self.has_tools and self.harmony_effort is None
        return {"tools": pa.string()} if is_given else {}

    def _fault(self, row: Row) -> str | None:
        # SpecForge stops at a role that it has no channel for.
        if self.harmony_effort is None or not _has_tool_turns(row):
            return None
        return "no_form_of_tool_turns_for_gpt_oss"

    def _row(self, row: Row) -> Row:
        messages = row["messages"]
        if self.format == "conversations":
            return {"conversations": [turn for m in messages for turn in self._sharegpt_turns(m)]}
        if not self._is_for_trainer:
            return {"messages": [self._turn(message) for message in messages]}
        return {
            "id": self.row_name(row["row_id"], row["sample_index"]),
            "status": "success",
            "conversations": self._turns(messages, row.get("tool_calls")),
            "tools": self._tools(row.get("tools")),
        }

    def _sharegpt_turns(self, message: Message) -> list[Row]:
        """Split a turn that calls into its text, if any, and the calls."""
        calls = [_call(one)["function"] for one in _listed(message.get("tool_calls"))]
        said = {"from": _SHAREGPT[message["role"]], "value": self._text(message)}
        if not calls:
            return [said]
        named = [{**call, "arguments": _arguments(call["arguments"])} for call in calls]
        value = json.dumps(named[0] if len(named) == 1 else named, ensure_ascii=False)
        return [*([said] if said["value"] else []), {"from": "function_call", "value": value}]

    def _text(self, message: Message) -> str:
        reasoning = message.get("reasoning_content")
        content = message["content"] or ""
        if self.reasoning != "inline" or not reasoning:
            return str(content)
        return f"<think>\n{reasoning}\n</think>\n\n{content}"

    def _turns(self, messages: Sequence[Message], last_calls: object) -> list[Message]:
        named = [{**m, "role": _TRAINER_ROLES.get(m["role"], m["role"])} for m in messages]
        if named and last_calls and not named[-1].get("tool_calls"):
            named[-1] = {**named[-1], "tool_calls": last_calls}
        if self.format == "specforge":
            named = _with_one_system_turn(named)
        if self.harmony_effort is not None:
            return self._channels(named)
        return [self._turn(message) for message in named]

    def _turn(self, message: Message) -> Message:
        turn = {
            "role": message["role"],
            "content": self._text(message),
            "reasoning_content": message.get("reasoning_content") or "",
        }
        if self.has_tools:
            calls = [_call(one) for one in _listed(message.get("tool_calls"))]
            turn["tool_calls"] = calls
            if self.format == "specforge":
                # Empty text and not an empty list: SpecForge then removes the field, which
                # templates that only test for it need.
                turn["tool_calls"] = json.dumps(calls, ensure_ascii=False) if calls else ""
            for name in _TOOL_TURN_FIELDS:
                turn[name] = message.get(name) or ""
        return turn

    def _tools(self, value: object) -> str:
        tools = _listed(value)
        if tools:
            return json.dumps(tools, ensure_ascii=False)
        # An empty list for SpecForge, which parses any text; nothing for speculators, which hands
        # a list, empty or not, to vLLM.
        return "[]" if self.format == "specforge" else ""

    def _channels(self, messages: Sequence[Message]) -> list[Message]:
        """Split gpt-oss's turns into the channels that SpecForge's parser knows by role."""
        turns: list[Message] = []
        if not messages or messages[0]["role"] != "system":
            turns.append({"role": "assistant_reasoning_effort", "content": self.harmony_effort})
        for message in messages:
            if message["role"] != "assistant":
                turns.append({"role": message["role"], "content": message["content"]})
                continue
            reasoning = message.get("reasoning_content")
            if reasoning and self.reasoning == "apart":
                turns.append({"role": "assistant_analysis", "content": reasoning})
            turns.append({"role": "assistant_final", "content": message["content"]})
        return turns


def harmony_effort(settings: dict[str, Any]) -> str | None:
    """Return the reasoning effort of a run with gpt-oss; None for other models."""
    if "gpt-oss" not in str(settings.get("model")).lower():
        return None
    words = settings.get("chat_template_kwargs")
    effort = words.get("reasoning_effort") if isinstance(words, dict) else None
    return str(effort or _HARMONY_EFFORT)


def _has_tool_turns(row: Row) -> bool:
    return bool(
        _listed(row.get("tool_calls"))
        or any(m["role"] == "tool" or _listed(m.get("tool_calls")) for m in row["messages"])
    )


def _with_one_system_turn(messages: Sequence[Message]) -> list[Message]:
    """Join the system turns before the first user turn: SpecForge keeps only one."""
    first = next((n for n, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if first < 2:
        return list(messages)
    text = "\n\n".join(message["content"] for message in messages[:first])
    return [{**messages[0], "content": text}, *messages[first:]]


def _listed(value: object) -> list[Any]:
    """List the tools or calls of a column that has them as JSON text or as a list."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return []
    return value if isinstance(value, list) else []


def _call(value: Row) -> Row:
    """Build a call as both trainers take it, with its arguments as JSON text."""
    function = value.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": value.get("id") or "",
        "type": value.get("type") or "function",
        "function": {"name": function.get("name") or "", "arguments": arguments},
    }


def _arguments(text: str) -> object:
    """Parse the arguments of a call; text that is not JSON stays text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def without_tool_fields(messages: pa.ChunkedArray) -> pa.Array:
    """Return messages without the fields of calls and results.

    Some templates test only if a message has such a field.
    """
    lists = messages.combine_chunks()
    turns = pc.list_flatten(lists)
    names = [f.name for f in turns.type if f.name not in ("tool_calls", *_TOOL_TURN_FIELDS)]
    plain = pa.StructArray.from_arrays(
        [pc.struct_field(turns, name) for name in names],
        fields=[turns.type.field(turns.type.get_field_index(name)) for name in names],
    )
    offsets = pc.subtract(lists.offsets, lists.offsets[0]) if len(lists) else lists.offsets
    return pa.ListArray.from_arrays(offsets, plain)


def _listed_texts(names: Iterable[str]) -> pa.DataType:
    return pa.list_(pa.struct([(name, pa.string()) for name in names]))
