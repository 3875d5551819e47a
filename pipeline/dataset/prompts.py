"""Source rows → Prompt. Pure, but for the reading that `sources` does underneath.

Invariant: every source row becomes exactly one Prompt, a bad one with its Problem; its row id
depends on the id column or on what the row says, never on where it stands. Nothing is held of the
rows that have passed except a digest of each id.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from pipeline.dataset.sources import input_files, one_line_error, open_source
from pipeline.errors import ConfigError
from schemas.completion import COMPLETION_SCHEMA, Turn
from schemas.config import PromptsConfig, PromptShape
from schemas.prompt import Message, Problem, Prompt, Role, content_hash, content_row_id

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
}
"""Role names of chat messages and of ShareGPT conversations."""

_SYSTEM_COLUMNS = ("system_prompt", "system")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputColumns:
    """Which column holds the conversation, how it is read, and which holds system prompts."""

    column: str
    shape: PromptShape
    system_column: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStream:
    """An opened input: one pass over its rows as prompts, in order."""

    columns: InputColumns
    arrow_schema: object | None
    """The source's own column types (a pyarrow.Schema); None where the rows alone tell them."""
    prompts: Iterator[Prompt]


def input_fingerprint(config: PromptsConfig) -> str | None:
    """Changes whenever the frozen prompts would; None for a hub name, which is always read."""
    files = input_files(config)
    if not files:
        return None
    stats = [(file.where, file.size_bytes, file.modified_ns) for file in files]
    text = json.dumps([_FROZEN_FORMAT, stats, config.model_dump()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_FROZEN_FORMAT = 1
"""Raised when a Prompt is derived in another way."""


def read_prompts(config: PromptsConfig) -> PromptStream:
    """The input's columns as recognised, and its rows as prompts.

    Raises ConfigError at once for an input that cannot be opened or lacks a column, and while
    iterating for an id that comes twice, a row without an id, or a file that breaks off.
    """
    source = open_source(config)
    columns = input_columns(source.columns, config)
    _check_columns(source.columns, config)
    wanted = [columns.column, columns.system_column, config.id_column, *config.keep_columns]
    rows = source.rows(list(dict.fromkeys(name for name in wanted if name)))
    return PromptStream(
        columns=columns,
        arrow_schema=source.arrow_schema,
        prompts=_prompts(rows, columns, config),
    )


def input_columns(present: tuple[str, ...], config: PromptsConfig) -> InputColumns:
    """The conversation's column: the one named, else the first of the three known names."""
    known: tuple[PromptShape, ...] = ("messages", "conversations", "prompt")
    column = config.column or next((name for name in known if name in present), None)
    if column is None:
        raise ConfigError(
            f"prompts.column: none of {', '.join(known)} is a column of {config.path}; "
            f"name one of: {', '.join(present)}"
        )
    by_name: PromptShape = next((name for name in known if name == column), "prompt")
    shape = config.shape or by_name
    system = config.system_column or next((c for c in _SYSTEM_COLUMNS if c in present), None)
    return InputColumns(column=column, shape=shape, system_column=system)


def prompt_from_row(row: dict[str, object], columns: InputColumns, config: PromptsConfig) -> Prompt:
    """One source row as a Prompt, without its occurrence number; bad rows carry their Problem."""
    carried = {name: row.get(name) for name in config.keep_columns}
    value = row.get(columns.column)
    read = _conversation(value, columns)
    if not isinstance(read, Problem):
        read = _with_system(read, row, columns, config)
    problem = read if isinstance(read, Problem) else None
    messages = () if isinstance(read, Problem) else read
    raw = value if problem else None
    row_id = (
        content_row_id(messages, carried, raw)
        if config.id_column is None
        else str(row.get(config.id_column))
    )
    hashed = content_hash(messages) if problem is None else content_row_id((), {}, raw)[:16]
    return Prompt(
        row_id=row_id,
        content_hash=hashed,
        messages=messages,
        carried=carried,
        problem=problem,
    )


def _check_columns(present: tuple[str, ...], config: PromptsConfig) -> None:
    wanted = {
        "prompts.column": [config.column] if config.column else [],
        "prompts.id_column": [config.id_column] if config.id_column else [],
        "prompts.system_column": [config.system_column] if config.system_column else [],
        "prompts.keep_columns": config.keep_columns,
    }
    for field, names in wanted.items():
        for name in names:
            if name not in present:
                raise ConfigError(
                    f"{field}: no column {name!r} in {config.path}; it has: {', '.join(present)}"
                )
    for name in config.keep_columns:
        if name in COMPLETION_SCHEMA.names:
            raise ConfigError(
                f"prompts.keep_columns: {name!r} is the name of a column of the output; "
                f"rename it in the input"
            )


# -- columns and rows


def _prompts(
    rows: Iterable[dict[str, object]], columns: InputColumns, config: PromptsConfig
) -> Iterator[Prompt]:
    seen: dict[bytes, int] = {}
    for number, row in enumerate(islice(_readable(rows, config), config.limit), start=1):
        if config.id_column is not None and row.get(config.id_column) in (None, ""):
            raise ConfigError(
                f"prompts.id_column: row {number} of {config.path} has no {config.id_column!r}"
            )
        prompt = prompt_from_row(row, columns, config)
        if not _is_unicode(prompt.row_id):
            raise ConfigError(
                f"prompts.id_column: the id {prompt.row_id!r} in row {number} of {config.path} "
                f"holds half of a surrogate pair"
            )
        digest = hashlib.blake2b(prompt.row_id.encode(), digest_size=16).digest()
        occurrence = seen.get(digest, 0)
        if occurrence and config.id_column is not None:
            raise ConfigError(
                f"prompts.id_column: the id {prompt.row_id!r} stands in more than one row of "
                f"{config.path} (again in row {number}); ids must be unique"
            )
        seen[digest] = occurrence + 1
        if config.id_column is None:
            prompt = replace(prompt, row_id=f"{prompt.row_id}-{occurrence}")
        yield prompt


def _readable(
    rows: Iterable[dict[str, object]], config: PromptsConfig
) -> Iterator[dict[str, object]]:
    """The rows of a file that may break off in the middle."""
    with one_line_error(f"cannot read {config.path}"):
        yield from rows


def _conversation(value: object, columns: InputColumns) -> tuple[Message, ...] | Problem:
    if columns.shape == "prompt" and not isinstance(value, list):
        return _single_turn(value, columns.column)
    if not isinstance(value, list):
        found = "nothing" if value is None else f"a {type(value).__name__}"
        return Problem(
            kind="not_a_list", text=f"{columns.column}: found {found}; expected a list of turns"
        )
    messages: list[Message] = []
    for position, turn in enumerate(value):
        read = _message(turn, f"{columns.column}[{position}]")
        if isinstance(read, Problem):
            return read
        messages.append(read)
    return _with_open_places(messages, columns.column)


def _single_turn(value: object, column: str) -> tuple[Message, ...] | Problem:
    text = _text(value, column)
    if isinstance(text, Problem):
        return text
    return (Message(role="user", content=text), Message(role="assistant", content=""))


def _message(turn: object, where: str) -> Message | Problem:
    if not isinstance(turn, dict):
        return Problem(
            kind="not_a_list",
            text=f"{where}: found a {type(turn).__name__}; expected a role and its text",
        )
    name = turn.get("role") if turn.get("role") is not None else turn.get("from")
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        known = ", ".join(_ROLES)
        return Problem(kind="unknown_role", text=f"{where}: role {name!r}; known are {known}")
    if role == "assistant":
        return Message(role="assistant", content="")
    value = turn.get("content") if turn.get("content") is not None else turn.get("value")
    content = _text(value, where)
    return content if isinstance(content, Problem) else Message(role=role, content=content)


def _text(value: object, where: str) -> str | Problem:
    """The text of a turn: a string, or a list of parts that are all text."""
    if isinstance(value, list):
        texts = []
        for part in value:
            text = part if isinstance(part, str) else None
            # In parquet a part without a type has the others' field, and null in it.
            if isinstance(part, dict) and part.get("type") in (None, "text"):
                text = part.get("text")
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                return Problem(kind="not_text", text=f"{where}: a part of type {kind!r}, not text")
            texts.append(text)
        value = "".join(texts)
    if value is None or (isinstance(value, str) and not value.strip()):
        return Problem(kind="empty_text", text=f"{where}: the text is empty")
    if not isinstance(value, str):
        found = type(value).__name__
        return Problem(kind="not_text", text=f"{where}: found a {found}; expected text")
    if not _is_unicode(value):
        return Problem(kind="not_text", text=f"{where}: holds half of a surrogate pair")
    return value


def _is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8; JSON can smuggle in half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_open_places(messages: list[Message], column: str) -> tuple[Message, ...] | Problem:
    """Open an assistant's place where one stood after a user turn, and at the end.

    An assistant turn before any user turn opens the conversation with a greeting that answers
    nothing, and a second one in a row continues the first: neither can be asked for.
    """
    opened: list[Message] = []
    for message in messages:
        if message.role == "assistant" and not _awaits_answer(opened):
            continue
        opened.append(message)
    if not any(message.role == "user" for message in opened):
        return Problem(kind="no_user_turn", text=f"{column}: no user turn among {len(messages)}")
    if _awaits_answer(opened):
        opened.append(Message(role="assistant", content=""))
    while opened[-1].role != "assistant":
        opened.pop()
    return tuple(opened)


def _awaits_answer(messages: list[Message]) -> bool:
    """Whether a user turn has come since the last assistant turn."""
    for message in reversed(messages):
        if message.role in ("user", "assistant"):
            return message.role == "user"
    return False


def _with_system(
    messages: tuple[Message, ...],
    row: dict[str, object],
    columns: InputColumns,
    config: PromptsConfig,
) -> tuple[Message, ...] | Problem:
    if any(message.role in ("system", "developer") for message in messages):
        return messages
    own = row.get(columns.system_column) if columns.system_column else None
    text = own if isinstance(own, str) and own.strip() else config.system_prompt
    if text and not _is_unicode(text):
        return Problem(
            kind="not_text", text=f"{columns.system_column}: holds half of a surrogate pair"
        )
    return (Message(role="system", content=text), *messages) if text else messages


def history(
    messages: Sequence[Message], turns: Sequence[Turn], *, with_reasoning: bool = False
) -> tuple[Message, ...]:
    """What is asked next: all up to the first open place, with the turns so far filled in."""
    asked: list[Message] = []
    generated = iter(turns)
    for message in messages:
        if message.role != "assistant":
            asked.append(message)
            continue
        turn = next(generated, None)
        if turn is None:
            break
        reasoning = turn.reasoning_text if with_reasoning else None
        asked.append(replace(message, content=turn.answer_text, reasoning_content=reasoning))
    return tuple(asked)


def conversation(messages: Sequence[Message], turns: Sequence[Turn]) -> tuple[Message, ...]:
    """The regenerated conversation, with every turn's reasoning; open places are left out."""
    return history(messages, turns, with_reasoning=True)
