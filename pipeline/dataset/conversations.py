"""Conversations: what a column of the input says, as messages with open assistant turns. Pure."""

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.dataset.tools import (
    CALL_ROLES,
    RESULT_ROLES,
    joined_calls,
    result_text,
    tool_result,
    with_call_ids,
    with_calls,
)
from schemas.prompt import Message, Problem, Role

# Role names of chat messages, of ShareGPT conversations and of Open Assistant's.
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    **dict.fromkeys(RESULT_ROLES, "tool"),
    **dict.fromkeys(CALL_ROLES, "assistant"),
}
# Names that speak after a user turn and are neither an answer nor a question.
_NO_SPEAKERS = frozenset({"tools", "environment", "context", "document", "documents", "critic"})
_OPEN = Message(role="assistant", content="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation of the source with open turns in place of its answers."""

    messages: tuple[Message, ...]
    originals: tuple[str, ...]
    """The source's own answers, one for each open turn."""


def conversation_of(
    value: object, column: str, *, is_typed: bool = False
) -> Conversation | Problem:
    """Read a list of turns, also as JSON text or as a struct of lists.

    In a column with types (`is_typed`) a call's arguments have the fields of all calls, with null
    in those that it lacks.
    """
    is_typed, turns = is_typed and not isinstance(value, str), _turns(value)
    if turns is None:
        found = "nothing" if value is None else f"a {type(value).__name__}"
        return Problem(kind="not_a_list", text=f"{column}: found {found}; expected a list of turns")
    messages: list[Message] = []
    answerers: set[str] = set()
    for position, turn in enumerate(turns):
        where = f"{column}[{position}]"
        role = _role(turn, where, answerers, after_user=_awaits_answer(messages))
        if isinstance(role, Problem):
            return role
        message = _message(turn, role, where, is_typed=is_typed)
        if isinstance(message, Problem):
            return message
        if message is not None:
            messages.append(message)
    return _with_open_places(with_call_ids(joined_calls(messages)), column)


def text_or_conversation(
    value: object, column: str, *, is_text: bool, is_typed: bool = False
) -> Conversation | Problem:
    """Read a column that is a user's text or a list of turns; with `is_text`, text is no list."""
    is_turns = isinstance(value, list) or _as_struct_of_lists(value) is not None
    if isinstance(value, str) and not is_text:
        is_turns = _is_list_of_turns(value)
    if is_turns:
        return conversation_of(value, column, is_typed=is_typed)
    return single_turn(value, column)


def single_turn(value: object, column: str) -> Conversation | Problem:
    """Return a user's text and an open answer."""
    text = text_of(value, column)
    if isinstance(text, Problem):
        return text
    return Conversation(messages=(Message(role="user", content=text), _OPEN), originals=("",))


def with_system_turn(
    messages: tuple[Message, ...], own: object, column: str | None, default: str | None
) -> tuple[Message, ...] | Problem:
    """Put the row's own system prompt in front, else the run's, unless the row has such a turn."""
    if any(message.role in ("system", "developer") for message in messages):
        return messages
    if not is_blank(own):
        text = text_of(own, str(column))
    elif default:
        text = text_of(default, "prompts.system_prompt")
    else:
        return messages
    if isinstance(text, Problem):
        return text
    return (Message(role="system", content=text), *messages)


def text_of(value: object, where: str) -> str | Problem:
    """Read the text of a turn: a string, or a list of text parts."""
    if isinstance(value, list):
        texts = []
        for part in value:
            text = part if isinstance(part, str) else None
            # In parquet a part without a type has the field of the others, with null in it.
            if isinstance(part, dict) and part.get("type") in (None, "text"):
                text = part.get("text")
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                return Problem(kind="not_text", text=f"{where}: a part of type {kind!r}, not text")
            texts.append(text)
        value = "".join(texts)
    if is_blank(value):
        return Problem(kind="empty_text", text=f"{where}: the text is empty")
    if not isinstance(value, str):
        found = "binary data" if isinstance(value, bytes) else f"a {type(value).__name__}"
        return Problem(kind="not_text", text=f"{where}: found {found}; expected text")
    if not is_unicode(value):
        return Problem(kind="not_text", text=f"{where}: has a lone surrogate")
    return value


def is_blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def is_unicode(text: str) -> bool:
    # JSON may contain a lone surrogate, which UTF-8 cannot encode.
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def value_in_text(text: str) -> object:
    """Parse text that is a JSON or Python value, as CSV files have it; None where it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


# -- turns


def _turns(value: object) -> list[object] | None:
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        value = value_in_text(value)
    if isinstance(value, list):
        return value
    return _as_struct_of_lists(value)


def _is_list_of_turns(text: str) -> bool:
    """Tell whether a text is a whole conversation in JSON, rather than a question about one."""
    if not text.lstrip().startswith(("[", "{")):
        return False
    turns = _turns(text)
    return bool(turns) and all(isinstance(turn, dict) and _name(turn) for turn in turns or ())


def _as_struct_of_lists(value: object) -> list[object] | None:
    """Turn lists under the names of a turn's fields into turns.

    A feature that is written with `sequence:` is stored in this way.
    """
    if not isinstance(value, dict) or not value.keys() & {"role", "from"}:
        return None
    lists = {name: items for name, items in value.items() if items is not None}
    if not all(isinstance(items, list) for items in lists.values()):
        return None
    if len({len(items) for items in lists.values()}) != 1:
        return None
    return [dict(zip(lists, items, strict=True)) for items in zip(*lists.values(), strict=True)]


def _name(turn: dict[str, object]) -> object:
    return turn.get("role") if turn.get("role") is not None else turn.get("from")


def _role(turn: object, where: str, answerers: set[str], *, after_user: bool) -> Role | Problem:
    """Return the role of a turn. A name that answers a user is an assistant from there on."""
    if not isinstance(turn, dict):
        return Problem(
            kind="not_a_list",
            text=f"{where}: found a {type(turn).__name__}; expected a role and its text",
        )
    name = _name(turn)
    spoken = name.strip().lower() if isinstance(name, str) else ""
    role = _ROLES.get(spoken)
    if role is None and spoken and spoken not in _NO_SPEAKERS:
        if after_user:
            answerers.add(spoken)
        role = "assistant" if spoken in answerers else None
    if role is None:
        known = ", ".join(_ROLES)
        return Problem(
            kind="unknown_role",
            text=f"{where}: role {name!r}; known are {known}, and any name that answers a user",
        )
    return role


def _message(turn: object, role: Role, where: str, *, is_typed: bool) -> Message | Problem | None:
    """Read a turn; None for a system turn without text, which says nothing."""
    assert isinstance(turn, dict), "has a role"
    value = next(
        (turn[key] for key in ("content", "value", "text") if turn.get(key) is not None), None
    )
    if role == "assistant":
        return _answer(turn, value, where, is_typed=is_typed)
    if role == "tool":
        return _in_unicode(tool_result(turn, result_text(value)), where)
    if role in ("system", "developer") and (is_blank(value) or value == []):
        return None
    content = text_of(value, where)
    return content if isinstance(content, Problem) else Message(role=role, content=content)


def _answer(
    turn: dict[str, object], value: object, where: str, *, is_typed: bool
) -> Message | Problem:
    """Read an assistant's turn, whose text may be anything: mostly it is thrown away."""
    text = value if isinstance(value, str) else text_of(value, where)
    reasoning = turn.get("reasoning_content")
    answer = Message(
        role="assistant",
        content="" if isinstance(text, Problem) else text,
        reasoning_content=reasoning if isinstance(reasoning, str) and reasoning else None,
    )
    called = with_calls(answer, turn, where, is_typed=is_typed)
    return called if isinstance(called, Problem) else _in_unicode(called, where)


def _in_unicode(message: Message, where: str) -> Message | Problem:
    ids = [call.id for call in message.tool_calls or ()]
    others = (message.reasoning_content, message.tool_call_id, message.name, *ids)
    if all(is_unicode(text or "") for text in (*message.texts, *others)):
        return message
    return Problem(kind="not_text", text=f"{where}: has a lone surrogate")


def _with_open_places(messages: list[Message], column: str) -> Conversation | Problem:
    """Leave an open assistant turn for each answer of the source, and at the end.

    An assistant turn that a tool's result answers is context and stays, as does one that calls
    before a later question. A turn before any user turn is a greeting that answers nothing, and a
    second one in a row continues the first: neither can be generated.
    """
    opened: list[Message] = []
    originals: list[str] = []
    for position, message in enumerate(messages):
        if message.role != "assistant" or _is_context(messages, position):
            opened.append(message)
        elif _awaits_answer(opened):
            opened.append(_OPEN)
            originals.append(message.content)
    if not any(message.role == "user" for message in opened):
        return Problem(kind="no_user_turn", text=f"{column}: no user turn among {len(messages)}")
    if _awaits_answer(opened):
        opened.append(_OPEN)
        originals.append("")
    while not opened[-1].is_open:
        opened.pop()
    return Conversation(messages=tuple(opened), originals=tuple(originals))


def _is_context(messages: Sequence[Message], position: int) -> bool:
    """Tell if an assistant turn of the source is one that later turns build on."""
    message = messages[position]
    following = [later.role for later in messages[position + 1 :]]
    if following and following[0] == "tool":
        return bool(message.content or message.tool_calls)
    return bool(message.tool_calls) and bool({"user", "tool"} & set(following))


def _awaits_answer(messages: Sequence[Message]) -> bool:
    """Tell if the last turn is a user's or a tool's result, system messages aside."""
    for message in reversed(messages):
        if message.role in ("user", "assistant", "tool"):
            return message.role != "assistant"
    return False
