"""Source rows become Prompts.

Invariant: every source row becomes exactly one Prompt, a bad row one with a Problem. A row id comes
from the id column or from the row's content, never from its position. Memory: a digest of each id.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from pipeline.dataset.sources import input_files, one_line_error, open_source
from pipeline.errors import ConfigError
from schemas.completion import COMPLETION_SCHEMA, Turn
from schemas.config.requests import PromptsConfig, PromptShape
from schemas.prompt import Message, Problem, Prompt, Role, content_hash, content_row_id

# Role names of chat messages and of ShareGPT conversations.
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

_SYSTEM_COLUMNS = ("system_prompt", "system")

# Incremented when a Prompt is derived in another way.
_FROZEN_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InputColumns:
    """The conversation's column and shape, and the column with system prompts."""

    column: str
    shape: PromptShape
    system_column: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStream:
    """An opened input: one pass over its rows as prompts, in order."""

    columns: InputColumns
    carried: tuple[str, ...]
    """Columns that are carried to the output."""
    arrow_schema: object | None
    """The source's column types (a pyarrow.Schema); None where only the rows show them."""
    prompts: Iterator[Prompt]


def input_fingerprint(config: PromptsConfig) -> str | None:
    """Hash that changes whenever the frozen prompts would; None for a hub name."""
    files = input_files(config)
    if not files:
        return None
    stats = [(file.where, file.size_bytes, file.modified_ns) for file in files]
    text = json.dumps([_FROZEN_FORMAT, stats, config.model_dump()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_prompts(config: PromptsConfig) -> PromptStream:
    """Open the input and recognise its columns.

    Raises ConfigError at once for an input that cannot be opened or lacks a column, and while
    iterating for a repeated id, a row without an id, or a truncated file.
    """
    source = open_source(config)
    columns = _input_columns(source.columns, config)
    _check_columns(source.columns, config)
    wanted = [columns.column, columns.system_column, config.id_column, *config.keep_columns]
    rows = source.rows(list(dict.fromkeys(name for name in wanted if name)))
    return PromptStream(
        columns=columns,
        carried=tuple(config.keep_columns),
        arrow_schema=source.arrow_schema,
        prompts=_prompts(rows, columns, config),
    )


def _input_columns(present: tuple[str, ...], config: PromptsConfig) -> InputColumns:
    """Choose the conversation's column: the one named, else the first of three known names."""
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


def _prompt(row: dict[str, object], columns: InputColumns, config: PromptsConfig) -> Prompt:
    """Convert one source row; the row id of equal rows is not unique yet."""
    carried = {name: row.get(name) for name in config.keep_columns}
    value = row.get(columns.column)
    parsed = _conversation(value, columns)
    if not isinstance(parsed, Problem):
        parsed = _with_system(parsed, row, columns, config)
    problem = parsed if isinstance(parsed, Problem) else None
    messages = () if isinstance(parsed, Problem) else parsed
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
    num_rows_by_id: dict[bytes, int] = {}
    for number, row in enumerate(islice(_readable(rows, config), config.limit), start=1):
        if config.id_column is not None and row.get(config.id_column) in (None, ""):
            raise ConfigError(
                f"prompts.id_column: row {number} of {config.path} has no {config.id_column!r}"
            )
        prompt = _prompt(row, columns, config)
        if not _is_unicode(prompt.row_id):
            raise ConfigError(
                f"prompts.id_column: the id {prompt.row_id!r} in row {number} of {config.path} "
                f"has a lone surrogate"
            )
        digest = hashlib.blake2b(prompt.row_id.encode(), digest_size=16).digest()
        occurrence = num_rows_by_id.get(digest, 0)
        if occurrence and config.id_column is not None:
            raise ConfigError(
                f"prompts.id_column: the id {prompt.row_id!r} is in more than one row of "
                f"{config.path} (again in row {number}); ids must be unique"
            )
        num_rows_by_id[digest] = occurrence + 1
        if config.id_column is None:
            prompt = replace(prompt, row_id=f"{prompt.row_id}-{occurrence}")
        yield prompt


def _readable(
    rows: Iterable[dict[str, object]], config: PromptsConfig
) -> Iterator[dict[str, object]]:
    """Yield the rows of a file that may be truncated."""
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
        message = _message(turn, f"{columns.column}[{position}]")
        if isinstance(message, Problem):
            return message
        messages.append(message)
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
    if value is None or (isinstance(value, str) and not value.strip()):
        return Problem(kind="empty_text", text=f"{where}: the text is empty")
    if not isinstance(value, str):
        found = type(value).__name__
        return Problem(kind="not_text", text=f"{where}: found a {found}; expected text")
    if not _is_unicode(value):
        return Problem(kind="not_text", text=f"{where}: has a lone surrogate")
    return value


def _is_unicode(text: str) -> bool:
    # JSON may contain a lone surrogate, which UTF-8 cannot encode.
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_open_places(messages: list[Message], column: str) -> tuple[Message, ...] | Problem:
    """Leave an empty assistant turn after each user turn that had one, and at the end.

    An assistant turn before any user turn is a greeting that answers nothing, and a second one in a
    row continues the first: neither can be generated.
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
    """Tell if the last turn is a user's, system messages aside."""
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
        return Problem(kind="not_text", text=f"{columns.system_column}: has a lone surrogate")
    return (Message(role="system", content=text), *messages) if text else messages


def history(
    messages: Sequence[Message], turns: Sequence[Turn], *, with_reasoning: bool = False
) -> tuple[Message, ...]:
    """Messages of the next request: those before the first open turn, with `turns` filled in."""
    filled: list[Message] = []
    generated = iter(turns)
    for message in messages:
        if message.role != "assistant":
            filled.append(message)
            continue
        turn = next(generated, None)
        if turn is None:
            break
        reasoning = turn.reasoning_text if with_reasoning else None
        filled.append(replace(message, content=turn.answer_text, reasoning_content=reasoning))
    return tuple(filled)


def conversation(messages: Sequence[Message], turns: Sequence[Turn]) -> tuple[Message, ...]:
    """The regenerated conversation with every turn's reasoning, up to the first open turn."""
    return history(messages, turns, with_reasoning=True)
