"""Tools in the input: definitions, calls and results, of chat messages and of ShareGPT. Pure.

Calls are read in all usual forms and kept in one, that of chat messages with arguments as JSON
text: servers turn it into what the model's template needs.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from schemas.prompt import FunctionCall, Message, Problem, ToolCall

# Roles whose turn is a tool's result.
RESULT_ROLES = (
    "tool",
    "function",
    "observation",
    "tool_response",
    "tool_result",
    "function_response",
    "ipython",
)
# Roles whose turn is nothing but calls: ShareGPT, as LLaMA-Factory has it.
CALL_ROLES = ("function_call", "tool_call", "tool_calls")

# Hermes function calling, and the text that Qwen and others generate.
_CALL_TAGS = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESULT_TAGS = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)


class _FormError(Exception):
    """A value of another form; its text says what was found and expected."""


# -- definitions


def tool_definitions(
    value: object, where: str, *, is_typed: bool
) -> tuple[dict[str, object], ...] | Problem:
    """Read a list of tools, or its JSON text; bare functions get their wrapper.

    In a column with types (`is_typed`) a tool has the fields of all tools, with null in those that
    it lacks: these are left out.
    """
    try:
        # JSON text has no fields that its writer did not write.
        is_typed = is_typed and not isinstance(value, str)
        return tuple(_definitions(value, where, is_typed=is_typed))
    except _FormError as error:
        return Problem(kind="bad_tools", text=str(error))


def _definitions(value: object, where: str, *, is_typed: bool) -> Iterator[dict[str, object]]:
    read = _read_json(value, where) if isinstance(value, str) else value
    if read is None:
        return
    if isinstance(read, dict):
        read = [read]
    if not isinstance(read, list):
        raise _FormError(f"{where}: found a {type(read).__name__}; expected a list of tools")
    for position, entry in enumerate(read):
        place = f"{where}[{position}]"
        tool = _read_json(entry, place) if isinstance(entry, str) else entry
        if is_typed and not isinstance(entry, str):
            tool = _without_null_fields(tool)
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _FormError(f"{place}: found {_shown(entry)}; expected a function with a name")
        yield _as_json(
            tool if "function" in tool else {"type": "function", "function": tool}, place
        )


def _as_json(tool: dict[str, object], where: str) -> dict[str, object]:
    """Return what JSON keeps of the tool: a typed column may hold a date."""
    text = json.dumps(tool, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _FormError(f"{where}: has a lone surrogate") from None
    found: dict[str, object] = json.loads(text)
    return found


def _without_null_fields(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, list):
        return [_without_null_fields(item) for item in value]
    if isinstance(value, dict):
        return {
            name: _without_null_fields(item) for name, item in value.items() if item is not None
        }
    return value


# -- calls and results


def with_calls(
    message: Message, turn: Mapping[str, object], where: str, *, is_typed: bool
) -> Message | Problem:
    """Add an assistant turn's calls, which are in fields of its own, its text, or tags in it."""
    role = str(turn.get("role") or turn.get("from") or "").strip().lower()
    try:
        if role in CALL_ROLES:
            calls = _calls(message.content, where, is_typed=False)
            return replace(message, content="", tool_calls=calls)
        listed = turn.get("tool_calls") or turn.get("function_call")
        if calls := _calls(listed, where, is_typed=is_typed):
            return replace(message, tool_calls=calls)
    except _FormError as error:
        return Problem(kind="bad_tools", text=str(error))
    return _with_tagged_calls(message, where)


def tool_result(turn: Mapping[str, object], text: str) -> Message:
    """Build a tool's turn."""
    tagged = _RESULT_TAGS.fullmatch(text)
    is_one = tagged is not None and "<tool_response>" not in tagged.group(1)
    call_id, name = turn.get("tool_call_id"), turn.get("name")
    return Message(
        role="tool",
        content=tagged.group(1) if tagged and is_one else text,
        tool_call_id=call_id if isinstance(call_id, str) and call_id else None,
        name=name if isinstance(name, str) and name else None,
    )


def result_text(value: object) -> str:
    """Return a result's text: what is no text or list of texts is written as JSON."""
    if isinstance(value, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in value]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def _calls(value: object, where: str, *, is_typed: bool) -> tuple[ToolCall, ...] | None:
    is_typed = is_typed and not isinstance(value, str)
    read = _read_json(value, where) if isinstance(value, str) else value
    entries = [read] if isinstance(read, dict) else read
    if not entries:
        return None
    if not isinstance(entries, list):
        raise _FormError(f"{where}: found {_shown(value)}; expected calls of tools")
    found = [entry for entry in entries if entry is not None]
    return tuple(_call(entry, where, is_typed=is_typed) for entry in found) or None


def _call(entry: object, where: str, *, is_typed: bool) -> ToolCall:
    own = _read_json(entry, where) if isinstance(entry, str) else entry
    function = own.get("function") or own if isinstance(own, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(own, dict) or not isinstance(function, dict) or not isinstance(name, str):
        raise _FormError(
            f"{where}: found {_shown(entry)}; expected a call with the name of a function"
        )
    arguments = function.get("arguments", function.get("parameters"))
    if is_typed and not isinstance(arguments, str):
        arguments = _without_null_fields(arguments)
    call_id = own.get("id")
    return ToolCall(
        id=call_id if isinstance(call_id, str) else "",
        function=FunctionCall(name=name, arguments=_arguments_text(arguments)),
    )


def _arguments_text(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False, default=str)


def _with_tagged_calls(message: Message, where: str) -> Message:
    """Read calls between tags; text that has none, or other things in them, stays as it is."""
    bodies = _CALL_TAGS.findall(message.content)
    try:
        calls = [call for body in bodies for call in _calls(body, where, is_typed=False) or ()]
    except _FormError:
        return message
    if not calls:
        return message
    rest = _CALL_TAGS.sub("", message.content).strip()
    return replace(message, content=rest, tool_calls=tuple(calls))


# -- whole conversations


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Number calls without an id, and tie results without one to the calls in their order.

    Templates of Mistral's models accept ids of nine letters and digits only.
    """
    named: list[Message] = []
    unanswered: list[str] = []
    num_named = 0
    for message in messages:
        changed = message
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                calls.append(call if call.id else replace(call, id=f"call{num_named:05d}"))
                num_named += 1
            unanswered = [call.id for call in calls]
            changed = replace(message, tool_calls=tuple(calls))
        elif message.role == "tool":
            call_id = message.tool_call_id or (unanswered[0] if unanswered else None)
            unanswered = [other for other in unanswered if other != call_id]
            changed = replace(message, tool_call_id=call_id)
        named.append(changed)
    return named


def joined_calls(messages: Sequence[Message]) -> list[Message]:
    """Join assistant turns in a row that end in calls: the text before them and further calls."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or last.role != "assistant" or not message.tool_calls:
            joined.append(message)
            continue
        texts = [text for text in (last.content, message.content) if text]
        joined[-1] = replace(
            last,
            content="\n\n".join(texts),
            reasoning_content=last.reasoning_content or message.reasoning_content,
            tool_calls=(*(last.tool_calls or ()), *message.tool_calls),
        )
    return joined


def _read_json(text: str, where: str) -> Any:  # noqa: ANN401 - any JSON value
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _FormError(f"{where}: found {_shown(text)}; expected JSON") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
