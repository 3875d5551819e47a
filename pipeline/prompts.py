"""Data set rows → Prompt. The one door to `datasets`.

Invariant: every source row becomes exactly one Prompt, a bad one with its Problem; its row id
depends on the id column or on what the row says, never on where it stands. Nothing is held of the
rows that have passed except a digest of each id.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import datasets

from pipeline.errors import ConfigError
from schemas.completion import COMPLETION_SCHEMA
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
_PARQUET_ENDINGS = (".parquet", ".pq")
_JSON_LINES_ENDINGS = (".jsonl", ".ndjson", ".json")
_KNOWN_ENDINGS = _PARQUET_ENDINGS + _JSON_LINES_ENDINGS
_READ_BATCH_ROWS = 512


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    columns: tuple[str, ...]
    arrow_schema: object | None
    rows: Callable[[list[str]], Iterator[dict[str, object]]]
    """One pass over the named columns, a dict a row."""


def input_files(config: PromptsConfig) -> list[Path]:
    """The local files of the input in order; none for a hub name.

    Raises ConfigError for a path that is there but holds nothing that can be read.
    """
    path = Path(config.path)
    if path.is_file():
        if path.suffix not in _KNOWN_ENDINGS:
            raise ConfigError(
                f"prompts.path: {path} ends in {path.suffix or 'nothing'!r}; expected .parquet, "
                f".jsonl, .ndjson or .json"
            )
        return [path]
    if not path.is_dir():
        return []
    files = sorted(file for file in path.rglob("*") if file.is_file())
    if _is_saved_data_set(path):
        return files
    wanted = [file for file in files if not _is_hidden(file.relative_to(path))]
    for endings in (_PARQUET_ENDINGS, _JSON_LINES_ENDINGS):
        chosen = [file for file in wanted if file.suffix in endings]
        if chosen:
            return chosen
    raise ConfigError(f"prompts.path: folder {path} holds no .parquet or JSON-lines file")


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def input_fingerprint(config: PromptsConfig) -> str | None:
    """Changes whenever the frozen prompts would; None for a hub name, which is always read."""
    files = input_files(config)
    if not files:
        return None
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    text = json.dumps([_FROZEN_FORMAT, stats, config.model_dump()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_FROZEN_FORMAT = 1
"""Raised when a Prompt is derived in another way."""


def read_prompts(config: PromptsConfig) -> PromptStream:
    """The input's columns as recognised, and its rows as prompts.

    Raises ConfigError at once for an input that cannot be opened or lacks a column, and while
    iterating for an id that comes twice, a row without an id, or a file that breaks off.
    """
    source = _open_source(config)
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


# -- opening


def _open_source(config: PromptsConfig) -> _Source:
    datasets.disable_progress_bars()
    # Else the hub is told of every file that is opened, 5 s each on a machine without a network.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # What goes wrong is raised as well, and told once.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    path = Path(config.path)
    files = input_files(config)
    if not files and (path.suffix in _KNOWN_ENDINGS or path.is_absolute()):
        raise ConfigError(f"prompts.path: no file or folder {config.path}")
    unreadable = f"cannot read {config.path}"
    if not files:
        unreadable = (
            f"{config.path} is no file or folder here and could not be loaded as a hub data set"
        )
    with _one_line(unreadable):
        if not files:
            return _data_set_source(_loaded(config.path, name=config.name, split=config.split))
        if path.is_dir() and _is_saved_data_set(path):
            return _data_set_source(_saved_split(path, config))
        if files[0].suffix in _JSON_LINES_ENDINGS:
            return _json_lines_source(files, config)
        data_files = {"train": [str(file) for file in files]}
        # With a batch size of its own, so that the library does not take the first row group's,
        # which is 0 in a file without rows.
        return _data_set_source(
            _loaded("parquet", data_files=data_files, split="train", batch_size=_READ_BATCH_ROWS)
        )


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """An input that cannot be read is the user's to mend: ConfigError with the reason's first line.

    What the library raises differs by release and by the fault; a cast that fails is a TypeError.
    """
    try:
        yield
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"prompts.path: {what}: {said}") from None


def _is_saved_data_set(path: Path) -> bool:
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _saved_split(path: Path, config: PromptsConfig) -> datasets.Dataset:
    loaded = datasets.load_from_disk(str(path))
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if config.split not in loaded:
        raise ConfigError(
            f"prompts.split: {path} has no split {config.split!r}; it has {', '.join(loaded)}"
        )
    return loaded[config.split]


def _loaded(loader: str, **options: object) -> datasets.IterableDataset:
    return datasets.load_dataset(loader, streaming=True, **options)


def _data_set_source(data_set: datasets.Dataset | datasets.IterableDataset) -> _Source:
    names = data_set.column_names
    if names is None:
        data_set = data_set._resolve_features()  # noqa: SLF001 - the library's own way, unexported
        names = data_set.column_names or []
    schema = data_set.features.arrow_schema if data_set.features else None
    return _Source(columns=tuple(names), arrow_schema=schema, rows=partial(_batched, data_set))


def _batched(
    data_set: datasets.Dataset | datasets.IterableDataset, names: list[str]
) -> Iterator[dict[str, object]]:
    """Rows decoded a batch at a time, several times the speed of row by row."""
    for batch in data_set.select_columns(names).iter(batch_size=_READ_BATCH_ROWS):
        for values in zip(*(batch[name] for name in names), strict=True):
            yield dict(zip(names, values, strict=True))


def _json_lines_source(files: list[Path], config: PromptsConfig) -> _Source:
    """JSON lines are parsed here: a column may hold a list in one row and text in the next."""
    first_rows = list(islice(_json_rows(files), _READ_BATCH_ROWS))
    if not first_rows:
        raise ConfigError(f"prompts.path: {config.path} has no rows")
    columns = dict.fromkeys(name for row in first_rows for name in row)
    return _Source(columns=tuple(columns), arrow_schema=None, rows=lambda _: _json_rows(files))


def _json_rows(files: list[Path]) -> Iterator[dict[str, object]]:
    for file in files:
        data_files = {"train": [str(file)]}
        lines = datasets.load_dataset("text", data_files=data_files, split="train", streaming=True)
        texts = (
            text for batch in lines.iter(batch_size=_READ_BATCH_ROWS) for text in batch["text"]
        )
        with _one_line(f"cannot read {file}"):
            for number, text in enumerate(texts, start=1):
                line = text.removeprefix("\ufeff")
                if line.strip():
                    yield _json_object(line, file, number)


def _json_object(text: str, file: Path, number: int) -> dict[str, object]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"prompts.path: {file} line {number}: not JSON: {error.msg} at column {error.colno}; "
            f"expected one JSON object a line"
        ) from None
    except RecursionError:
        raise ConfigError(f"prompts.path: {file} line {number}: nested too deep") from None
    if not isinstance(row, dict):
        raise ConfigError(
            f"prompts.path: {file} line {number}: found a {type(row).__name__}; "
            f"expected one JSON object a line"
        )
    return row


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


# -- rows


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
    with _one_line(f"cannot read {config.path}"):
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
