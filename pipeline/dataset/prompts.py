"""Source rows become Prompts.

Invariant: every source row becomes exactly one Prompt, a bad row one with a Problem. A row id comes
from the id column or from the row's content, never from its position. Memory: a digest of each id.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pyarrow as pa

from pipeline.dataset.conversations import (
    Conversation,
    conversation_of,
    is_blank,
    is_unicode,
    single_turn,
    text_or_conversation,
    with_system_turn,
)
from pipeline.dataset.row_settings import row_settings
from pipeline.dataset.sources.files import list_input
from pipeline.dataset.sources.rows import BadRow, Row
from pipeline.dataset.sources.source import open_source
from pipeline.dataset.tools import tool_definitions
from pipeline.errors import ConfigError
from schemas.completion import COMPLETION_SCHEMA, OPTIONAL_COLUMNS, Turn
from schemas.config.prompt_template import template_columns, template_parts
from schemas.config.requests import PromptsConfig, PromptShape
from schemas.prompt import (
    Message,
    Problem,
    Prompt,
    RowSettings,
    content_hash,
    content_row_id,
)

# Names of columns with a conversation, the first that exists counts; and how each is read.
_KNOWN_COLUMNS: dict[str, PromptShape] = {
    "messages": "messages",
    "conversations": "conversations",
    "conversation": "conversations",
    "prompt": "prompt",
}
_SYSTEM_COLUMNS = ("system_prompt", "system")
_TOOLS_COLUMN = "tools"
_SETTINGS_COLUMN = "chat_template_kwargs"
_ALPACA_COLUMNS = {"instruction", "input"}

# Incremented when a Prompt is derived in another way.
_FROZEN_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class InputColumns:
    """The columns that prompts are read from."""

    column: str
    """The conversation's column; the columns of the template, if there is one."""
    shape: PromptShape
    system_column: str | None
    template: str | None = None
    row_settings: dict[str, str] | None = None
    """Setting of single rows → column with it; None without any."""
    tools_column: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStream:
    """An opened input: one pass over its rows as prompts, in order."""

    columns: InputColumns
    carried: tuple[str, ...]
    """Columns that are carried to the output."""
    arrow_schema: object | None
    """The source's column types (a pyarrow.Schema); None where only the rows show them."""
    prompts: Iterator[Prompt]
    left_out: tuple[str, ...] = ()
    """Files of the input that are not read, one line per reason."""
    unread_columns: tuple[str, ...] = ()
    """Columns of the input that no key of the run file uses."""


def input_fingerprint(config: PromptsConfig) -> str | None:
    """Hash that changes whenever the frozen prompts would; None for a hub name."""
    files = list_input(config).files
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
    named = _named_columns(config)
    source = open_source(config, [name for names in named.values() for name in names])
    columns = _input_columns(source.columns, config)
    _check_columns(source.columns, named, config)
    _check_no_binary(source.arrow_schema, config)
    required = _required_columns(columns, config)
    wanted = [
        *required,
        *([columns.system_column] if columns.system_column else []),
        *([columns.tools_column] if columns.tools_column else []),
        *config.keep_columns,
        *(columns.row_settings or {}).values(),
    ]
    rows = source.rows(list(dict.fromkeys(wanted)), required)
    return PromptStream(
        columns=columns,
        carried=tuple(config.keep_columns),
        arrow_schema=source.arrow_schema,
        prompts=_prompts(rows, columns, config, is_typed=source.arrow_schema is not None),
        left_out=source.left_out,
        unread_columns=tuple(name for name in source.columns if name not in {*wanted}),
    )


# -- columns


def _named_columns(config: PromptsConfig) -> dict[str, list[str]]:
    """Return the columns that the run file names, by its keys."""
    return {
        "prompts.column": [config.column] if config.column else [],
        "prompts.template": template_columns(config.template) if config.template else [],
        "prompts.id_column": [config.id_column] if config.id_column else [],
        "prompts.system_column": [config.system_column] if config.system_column else [],
        "prompts.tools_column": [config.tools_column] if config.tools_column else [],
        "prompts.keep_columns": config.keep_columns,
        "prompts.row_settings": list((config.row_settings or {}).values()),
    }


def _required_columns(columns: InputColumns, config: PromptsConfig) -> list[str]:
    """Return the columns that every file of the input must have."""
    own = template_columns(columns.template) if columns.template else [columns.column]
    return [*own, *([config.id_column] if config.id_column else [])]


def _input_columns(present: tuple[str, ...], config: PromptsConfig) -> InputColumns:
    """Choose the conversation's column: the one named, else the first of the known names."""
    settings = {str(setting): name for setting, name in (config.row_settings or {}).items()}
    if config.row_settings is None and _SETTINGS_COLUMN in present:
        settings = {_SETTINGS_COLUMN: _SETTINGS_COLUMN}
    system = config.system_column
    if system is None:
        system = next((name for name in _SYSTEM_COLUMNS if name in present), None)
    tools = config.tools_column
    if tools is None and _TOOLS_COLUMN in present:
        tools = _TOOLS_COLUMN
    shape: PromptShape = "prompt"
    if config.template is not None:
        column: str | None = ", ".join(template_columns(config.template))
    else:
        column = config.column or next((name for name in _KNOWN_COLUMNS if name in present), None)
        shape = config.shape or _KNOWN_COLUMNS.get(str(column), "prompt")
    if column is None:
        raise ConfigError(_no_column(present, config))
    return InputColumns(
        column=column,
        shape=shape,
        system_column=system or None,
        template=config.template,
        row_settings=settings or None,
        tools_column=tools or None,
    )


def _no_column(present: tuple[str, ...], config: PromptsConfig) -> str:
    *known, last = _KNOWN_COLUMNS
    text = (
        f"prompts.column: none of {', '.join(known)}, {last} is a column of {config.path}; "
        f"name one of: {', '.join(present)}"
    )
    if set(present) >= _ALPACA_COLUMNS:
        text += r'; or join them: prompts.template: "{instruction}\n\n{input}"'
    return text


def _check_columns(
    present: tuple[str, ...], named: dict[str, list[str]], config: PromptsConfig
) -> None:
    for field, names in named.items():
        for name in names:
            if name not in present:
                raise ConfigError(
                    f"{field}: no column {name!r} in {config.path}; it has: {', '.join(present)}"
                )
    for name in config.keep_columns:
        if name in COMPLETION_SCHEMA.names and name not in OPTIONAL_COLUMNS:
            raise ConfigError(
                f"prompts.keep_columns: {name!r} is the name of a column of the output; "
                f"rename it in the input"
            )


def _check_no_binary(schema: Any, config: PromptsConfig) -> None:  # noqa: ANN401 - pyarrow ships no types
    """Raise ConfigError for binary data where text is written."""
    if schema is None:
        return
    id_column = [config.id_column] if config.id_column else []
    for field, names in {
        "prompts.id_column": id_column,
        "prompts.keep_columns": config.keep_columns,
    }.items():
        for name in names:
            if _has_binary(schema.field(name).type):
                raise ConfigError(
                    f"{field}: {name!r} has binary data in {config.path}; expected text, numbers "
                    f"or lists of them"
                )


def _has_binary(kind: Any) -> bool:  # noqa: ANN401
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(is_binary(kind) for is_binary in binary) or any(map(_has_binary, inner))


# -- rows


def _prompts(
    rows: Iterable[Row], columns: InputColumns, config: PromptsConfig, *, is_typed: bool
) -> Iterator[Prompt]:
    num_rows_by_id: dict[bytes, int] = {}
    for number, row in enumerate(islice(rows, config.limit), start=1):
        own_id = _own_id(row, number, config)
        prompt = _prompt(row, columns, config, own_id, is_typed=is_typed)
        digest = hashlib.blake2b(prompt.row_id.encode(), digest_size=16).digest()
        occurrence = num_rows_by_id.get(digest, 0)
        if occurrence and own_id is not None:
            raise ConfigError(
                f"prompts.id_column: the id {prompt.row_id!r} is in more than one row of "
                f"{config.path} (again in row {number}); ids must be unique"
            )
        num_rows_by_id[digest] = occurrence + 1
        if own_id is None:
            prompt = replace(prompt, row_id=f"{prompt.row_id}-{occurrence}")
        yield prompt


def _own_id(row: Row, number: int, config: PromptsConfig) -> str | None:
    """Return the row's id in the id column; None where its content names it."""
    if config.id_column is None:
        return None
    value = (row.values if isinstance(row, BadRow) else row).get(config.id_column)
    if value in (None, ""):
        if isinstance(row, BadRow):
            return None
        raise ConfigError(
            f"prompts.id_column: row {number} of {config.path} has no {config.id_column!r}"
        )
    if not is_unicode(str(value)):
        raise ConfigError(
            f"prompts.id_column: the id {value!r} in row {number} of {config.path} "
            f"has a lone surrogate"
        )
    return str(value)


def _prompt(
    row: Row, columns: InputColumns, config: PromptsConfig, own_id: str | None, *, is_typed: bool
) -> Prompt:
    """Convert one source row; the row id of equal rows is not unique yet."""
    values = row.values if isinstance(row, BadRow) else row
    carried = {name: values.get(name) for name in config.keep_columns}
    read = row.problem if isinstance(row, BadRow) else _read(row, columns, config, is_typed)
    if isinstance(read, Problem):
        raw = row.content if isinstance(row, BadRow) else _raw(row, columns)
        return Prompt(
            row_id=own_id or content_row_id((), carried, raw),
            content_hash=content_row_id((), {}, raw)[:16],
            messages=(),
            carried=carried,
            problem=read,
        )
    identity = (read.messages, read.settings, read.tools, read.originals)
    return Prompt(
        row_id=own_id or content_row_id(identity[0], carried, None, *identity[1:]),
        content_hash=content_hash(*identity),
        messages=read.messages,
        carried=carried,
        settings=read.settings,
        tools=read.tools,
        originals=read.originals,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """Parts of a row's requests."""

    messages: tuple[Message, ...]
    settings: RowSettings
    tools: tuple[dict[str, object], ...]
    originals: tuple[str, ...] | None


def _read(
    row: dict[str, object], columns: InputColumns, config: PromptsConfig, is_typed: bool
) -> _Contents | Problem:
    parsed = _conversation(row, columns, config, is_typed=is_typed)
    if isinstance(parsed, Problem):
        return parsed
    settings = row_settings(row, columns.row_settings or {})
    if isinstance(settings, Problem):
        return settings
    column = columns.tools_column
    tools = tool_definitions(row.get(column), column, is_typed=is_typed) if column else ()
    if isinstance(tools, Problem):
        return tools
    return _Contents(
        messages=parsed.messages,
        settings=settings,
        tools=tools,
        originals=parsed.originals if _sees_originals(parsed, config) else None,
    )


def _sees_originals(parsed: Conversation, config: PromptsConfig) -> bool:
    """Tell if later turns see the source's own answers."""
    if config.history is not None:
        return config.history == "original"
    return any(message.role == "tool" for message in parsed.messages)


def _raw(row: dict[str, object], columns: InputColumns) -> object:
    """Return what stands for the conversation of a row that cannot be read."""
    if columns.template is None:
        return row.get(columns.column)
    return [row.get(name) for name in template_columns(columns.template)]


def _conversation(
    row: dict[str, object], columns: InputColumns, config: PromptsConfig, *, is_typed: bool
) -> Conversation | Problem:
    value = None if columns.template else row.get(columns.column)
    if columns.template is not None:
        parsed = _filled(columns.template, row)
    elif columns.shape == "prompt":
        is_text = config.shape == "prompt"
        parsed = text_or_conversation(value, columns.column, is_text=is_text, is_typed=is_typed)
    else:
        parsed = conversation_of(value, columns.column, is_typed=is_typed)
    if isinstance(parsed, Problem):
        return parsed
    own = row.get(columns.system_column) if columns.system_column else None
    messages = with_system_turn(parsed.messages, own, columns.system_column, config.system_prompt)
    return messages if isinstance(messages, Problem) else replace(parsed, messages=messages)


def _filled(template: str, row: dict[str, object]) -> Conversation | Problem:
    """Fill the columns into the template. Blank space goes with an empty column at an end."""
    texts: list[str] = []
    filled: list[bool] = []
    for text, column in template_parts(template):
        texts.append(text)
        if column is None:
            continue
        value = row.get(column)
        if not isinstance(value, str | int | float | None):
            found = "binary data" if isinstance(value, bytes) else f"a {type(value).__name__}"
            return Problem(kind="not_text", text=f"{column}: found {found}; expected text")
        filled.append(not is_blank(value))
        texts.append("" if is_blank(value) else str(value))
    if not any(filled):
        names = ", ".join(template_columns(template))
        return Problem(kind="empty_text", text=f"{names}: the text is empty")
    whole = "".join(texts)
    whole = whole if filled[0] else whole.lstrip()
    return single_turn(whole if filled[-1] else whole.rstrip(), "prompts.template")


# -- conversations of a run


def history(
    messages: Sequence[Message],
    turns: Sequence[Turn],
    *,
    with_reasoning: bool = False,
    originals: Sequence[str] | None = None,
) -> tuple[Message, ...]:
    """Messages of the next request: those before the first open turn, with `turns` filled in.

    `originals` are the source's own answers, which take the place of the generated ones.
    """
    filled: list[Message] = []
    generated = iter(turns)
    texts = iter(originals or ())
    for message in messages:
        if not message.is_open:
            filled.append(message)
            continue
        turn = next(generated, None)
        if turn is None:
            break
        if originals is not None:
            filled.append(replace(message, content=next(texts)))
            continue
        filled.append(
            replace(
                message,
                content=turn.answer_text,
                reasoning_content=turn.reasoning_text if with_reasoning else None,
                tool_calls=turn.tool_calls,
            )
        )
    return tuple(filled)


def conversation(messages: Sequence[Message], turns: Sequence[Turn]) -> tuple[Message, ...]:
    """The regenerated conversation with every turn's reasoning, up to the first open turn.

    What follows a last turn that calls a tool is left out: nothing in the source answers the call.
    """
    filled = history(messages, turns, with_reasoning=True)
    if turns and turns[-1].tool_calls:
        last = max(n for n, message in enumerate(filled) if message.role == "assistant")
        return filled[: last + 1]
    return filled
