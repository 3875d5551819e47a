"""FrozenPrompts: the input, frozen in the run's folder, so that all workers read the same rows.

Invariant: a frozen set is complete or absent, and row number n is the same prompt as long as the
set exists. Workers read row groups of it from the shared folder, so no prompt passes through the
driver. A row has its conversation and its carried values as JSON; the index has the types of the
carried columns in the output.
"""

import base64
import io
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.dataset.prompts import InputColumns, PromptStream
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import PROMPTS
from pipeline.untrusted.parsing import UNREADABLE
from schemas.prompt import (
    Longest,
    Message,
    Problem,
    Prompt,
    PromptBounds,
    Role,
    RowBudgets,
    RowSettings,
    message_extras,
    message_of,
    most_prompt_tokens,
)
from schemas.units import MIB

# Rows of one file, which is in memory, compressed, while it is written.
_FILE_ROWS = 2_048
# A lease has a few dozen rows: with this group size a worker needs one small read.
_GROUP_ROWS = 512
# Text of one row group, less where a single row has more.
_GROUP_BYTES = 16 * MIB

_NO_EXTRAS: Mapping[str, Any] = {}
# `pa.array` would import pandas, which every command would wait for.
_NO_IDS = pa.nulls(0, pa.string())
_FROZEN_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("body", pa.string(), nullable=False),
    ]
)


@dataclass(slots=True, kw_only=True)
class FrozenPrompts:
    """The frozen rows of one input."""

    folder: Folder
    name: str
    num_rows: int
    num_problems: int
    columns: InputColumns
    carried_schema: str
    """Arrow schema of the carried columns, serialised, in base64."""
    has_tools: bool = False
    """Some rows have tools, or calls of them."""
    longest: Longest | None = None
    """Longest prompts by turns; None for a set frozen by a version that did not count them."""
    budgets: RowBudgets | None = None
    """Token budgets that rows set themselves; None where no row does."""
    files: tuple[tuple[int, int], ...] | None = None
    """Size in bytes and CRC-32 of each file; None for a set frozen by a version without them."""
    _group: tuple[int, pa.Table | None] = field(default=(0, None))
    """Number of the first row of a row group, and the group."""

    def prompt(self, number: int) -> Prompt:
        """Read row `number`; its row group stays in memory, since leases are ranges.

        Other workers have most rows of the group, so each row is parsed when it is needed.
        """
        start, rows = self._group
        if rows is None or not start <= number < start + rows.num_rows:
            self._group = start, rows = self._read_group(number)
        return _prompt_from_frozen(rows.slice(number - start, 1).to_pylist()[0])

    def ids(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Yield row ids and content hashes in order, one file at a time."""
        for file_number in range(-(-self.num_rows // _FILE_ROWS)):
            with opened_parquet(self.folder, _file_name(self.name, file_number)) as file:
                table = file.read(columns=["row_id", "content_hash"])
            yield table["row_id"].combine_chunks(), table["content_hash"].combine_chunks()

    def row_ids(self) -> pa.Array:
        """Row ids of the whole input, in order."""
        return pa.concat_arrays([*(row_ids for row_ids, _ in self.ids()), _NO_IDS])

    def numbers_of(self, row_ids: Collection[str]) -> Iterator[tuple[str, int]]:
        """Yield the row ids that the set has, in order, with their numbers."""
        wanted, start = pa.array(row_ids, pa.string()), 0
        for own_ids, _ in self.ids():
            for number in pc.indices_nonzero(pc.is_in(own_ids, wanted)).to_pylist():
                yield own_ids[number].as_py(), start + number
            start += len(own_ids)

    def _read_group(self, number: int) -> tuple[int, pa.Table]:
        """Read the row group that has row `number`; return the number of its first row as well."""
        file_number = number // _FILE_ROWS
        start = file_number * _FILE_ROWS
        with opened_parquet(self.folder, _file_name(self.name, file_number)) as file:
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if number < start + num_rows:
                    return start, file.read_row_group(group)
                start += num_rows
        raise IndexError(number)

    def damage(self) -> str | None:
        """Name the first file that is gone or is not what was frozen; None for a whole set.

        In a store, which keeps what it has taken whole, only sizes are compared.
        """
        sizes = self.folder.sizes(f"{PROMPTS}/{self.name}")
        for number in range(-(-self.num_rows // _FILE_ROWS)):
            path = _file_name(self.name, number)
            size_bytes = sizes.get(path.rpartition("/")[2])
            if size_bytes is None:
                return f"{path} is gone"
            if not self._is_whole(number, path, size_bytes):
                return f"{path} is damaged"
        return None

    def _is_whole(self, number: int, path: str, size_bytes: int) -> bool:
        if self.files is None:
            return _has_footer(self.folder, path)
        if number >= len(self.files):
            # The index itself is not of these files.
            return False
        frozen_bytes, frozen_crc = self.files[number]
        if size_bytes != frozen_bytes or self.folder.is_remote:
            return size_bytes == frozen_bytes
        try:
            return zlib.crc32(self.folder.read(path)) == frozen_crc
        except OSError:
            return False


def freeze(folder: Folder, name: str, stream: PromptStream) -> FrozenPrompts:
    """Write the stream's prompts under `prompts/<name>/` in one pass, the index last."""
    _remove_set(folder, name)
    folder.make(f"{PROMPTS}/{name}")
    tally, files = _Tally(carried=_known_schema(stream)), list[tuple[int, int]]()
    is_typed = stream.arrow_schema is not None
    while (first := next(groups := _groups(islice(stream.prompts, _FILE_ROWS)), None)) is not None:
        noted = tally.noting(chain([first], groups), is_typed=is_typed)
        files.append(_write_file(folder, _file_name(name, len(files)), noted))
    index = {
        "num_rows": tally.num_rows,
        "num_problems": tally.num_problems,
        "has_tools": tally.has_tools,
        **asdict(stream.columns),
        "carried_schema": schema_text(_as_written(tally.carried)),
        "longest": tally.bounds.longest,
        "budgets": None if tally.bounds.budgets is None else asdict(tally.bounds.budgets),
        "files": files,
    }
    folder.write_whole(_index_name(name), json.dumps(index).encode())
    return _from_index(folder, name, index)


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Counts of the prompts written so far, and the types of their carried columns."""

    carried: pa.Schema
    num_rows: int = 0
    num_problems: int = 0
    has_tools: bool = False
    bounds: PromptBounds = field(default_factory=PromptBounds)

    def noting(self, groups: Iterable[list[Prompt]], *, is_typed: bool) -> Iterator[list[Prompt]]:
        for group in groups:
            if not is_typed:
                self.carried = _widened(self.carried, group)
            self.num_rows += len(group)
            self.num_problems += sum(prompt.problem is not None for prompt in group)
            self.has_tools = self.has_tools or any(prompt.has_tools for prompt in group)
            for prompt in group:
                self.bounds.note(prompt)
            yield group


def _groups(prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    """Split prompts into row groups that fit into memory: a worker reads one at a time."""
    group: list[Prompt] = []
    num_bytes = 0
    for prompt in prompts:
        size = most_prompt_tokens(prompt)
        if group and (len(group) == _GROUP_ROWS or num_bytes + size > _GROUP_BYTES):
            yield group
            group, num_bytes = [], 0
        group.append(prompt)
        num_bytes += size
    if group:
        yield group


def frozen_prompts(folder: Folder, name: str) -> FrozenPrompts | None:
    """Open the set frozen under `name`; None when there is none with an index that can be read."""
    try:
        return _from_index(folder, name, json.loads(folder.read(_index_name(name))))
    except (FileNotFoundError, IsADirectoryError, *UNREADABLE):
        return None


def _from_index(folder: Folder, name: str, index: dict[str, Any]) -> FrozenPrompts:
    # Sets of earlier versions lack the newer fields.
    columns = {f.name: index[f.name] for f in fields(InputColumns) if f.name in index}
    longest, budgets, files = index.get("longest"), index.get("budgets"), index.get("files")
    return FrozenPrompts(
        folder=folder,
        name=name,
        num_rows=index["num_rows"],
        num_problems=index["num_problems"],
        columns=InputColumns(**columns),
        carried_schema=index["carried_schema"],
        has_tools=index.get("has_tools", False),
        longest=None if longest is None else tuple((turns, tokens) for turns, tokens in longest),
        budgets=None if budgets is None else RowBudgets(**budgets),
        files=None if files is None else tuple((size, crc) for size, crc in files),
    )


def frozen_in(folder: Folder) -> FrozenPrompts | None:
    """Find the run's frozen set; None when there is no complete one."""
    sets = (frozen_prompts(folder, name) for name in folder.names(PROMPTS))
    return next((frozen for frozen in sets if frozen is not None), None)


def remove_other_sets(folder: Folder, name: str) -> None:
    """Remove the sets of earlier inputs; other files in the folder stay."""
    for other in folder.folder_names(PROMPTS):
        if other != name:
            _remove_set(folder, other)


def _remove_set(folder: Folder, name: str) -> None:
    # The index first, so that an incomplete set is never taken for a complete one.
    if _index_name(name).rpartition("/")[2] not in folder.folder_names(f"{PROMPTS}/{name}"):
        folder.remove(_index_name(name))
    # Files that cannot be removed do no harm.
    folder.remove_folder(f"{PROMPTS}/{name}")


def schema_from_text(text: str) -> pa.Schema:
    """Parse the schema in `FrozenPrompts.carried_schema` and `run.json`."""
    return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(text)))


def schema_text(schema: pa.Schema) -> str:
    """Serialise a schema, for `schema_from_text`."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


# -- files


def _index_name(name: str) -> str:
    return f"{PROMPTS}/{name}/index.json"


def _file_name(name: str, file_number: int) -> str:
    return f"{PROMPTS}/{name}/rows-{file_number:05d}.parquet"


def _has_footer(folder: Folder, path: str) -> bool:
    try:
        with opened_parquet(folder, path):
            return True
    except (pa.ArrowException, OSError):
        return False


def _write_file(folder: Folder, file_name: str, groups: Iterable[list[Prompt]]) -> tuple[int, int]:
    """Write a file; return its size in bytes and its CRC-32."""
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, _FROZEN_SCHEMA, compression="zstd") as writer:
        for group in groups:
            writer.write_table(_table(group))
    data = buffer.getvalue()
    folder.write_whole(file_name, data)
    return len(data), zlib.crc32(data)


def _table(prompts: list[Prompt]) -> pa.Table:
    return pa.table(
        {
            "row_id": [prompt.row_id for prompt in prompts],
            "content_hash": [prompt.content_hash for prompt in prompts],
            "body": [_body(prompt) for prompt in prompts],
        },
        schema=_FROZEN_SCHEMA,
    )


def _body(prompt: Prompt) -> str:
    problem = prompt.problem
    values: dict[str, object] = {
        "messages": [_message_values(message) for message in prompt.messages],
        "carried": prompt.carried,
        "problem": [problem.kind, problem.text] if problem else None,
    }
    if settings := prompt.settings.given():
        values["settings"] = settings
    if prompt.tools:
        values["tools"] = prompt.tools
    if prompt.originals is not None:
        values["originals"] = prompt.originals
    return _json_text(values)


def _json_text(values: object) -> str:
    """Encode as JSON that is valid UTF-8: a lone surrogate becomes a question mark."""
    text = json.dumps(values, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()


def _prompt_from_frozen(row: dict[str, str]) -> Prompt:
    body = json.loads(row["body"])
    problem = body["problem"]
    return Prompt(
        row_id=row["row_id"],
        content_hash=row["content_hash"],
        messages=tuple(_message(*values) for values in body["messages"]),
        carried=body["carried"],
        problem=Problem(kind=problem[0], text=problem[1]) if problem else None,
        settings=RowSettings(**body.get("settings", {})),
        tools=tuple(body.get("tools", ())),
        originals=tuple(body["originals"]) if "originals" in body else None,
    )


def _message_values(message: Message) -> list[object]:
    more = message_extras(message)
    return [message.role, message.content, *([more] if more else ())]


def _message(role: Role, content: str, extras: Mapping[str, Any] = _NO_EXTRAS) -> Message:
    return message_of(role, content, extras)


# -- types of carried columns


def _known_schema(stream: PromptStream) -> pa.Schema:
    source: Any = stream.arrow_schema
    if source is None:
        return pa.schema([pa.field(name, pa.null()) for name in stream.carried])
    return pa.schema(
        [pa.field(name, _carried_type(source.field(name).type)) for name in stream.carried]
    )


_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def _carried_type(source: pa.DataType) -> pa.DataType:
    """Return the source's type where JSON keeps its values exactly, else text."""
    if _has_map(source):
        return pa.string()
    if pa.types.is_dictionary(source):
        return _carried_type(source.value_type)
    if pa.types.is_struct(source):
        return pa.struct([pa.field(f.name, _carried_type(f.type)) for f in source])
    if any(is_a_list(source) for is_a_list in _LISTS):
        return pa.list_(_carried_type(source.value_type))
    exact = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    return source if any(is_exact(source) for is_exact in exact) else pa.string()


def _has_map(source: pa.DataType) -> bool:
    # JSON turns a map into a list, so a column with a map in it is carried as text.
    if pa.types.is_map(source):
        return True
    return any(_has_map(source.field(number).type) for number in range(source.num_fields))


def _widened(known: pa.Schema, prompts: list[Prompt]) -> pa.Schema:
    """Widen each column's type to include these rows' values."""
    widened = []
    for column in known:
        values = json.loads(_json_text([prompt.carried[column.name] for prompt in prompts]))
        widened.append(pa.field(column.name, _common_type(column.type, values)))
    return pa.schema(widened)


def _common_type(known: pa.DataType, values: list[object]) -> pa.DataType:
    try:
        types = (known, pa.array(values).type)
        merged = pa.unify_schemas(
            [pa.schema([pa.field("", one)]) for one in types], promote_options="permissive"
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        # Values of several kinds have no common type: they are carried as JSON text.
        return pa.string()
    return merged.field(0).type


def _as_written(schema: pa.Schema) -> pa.Schema:
    """Make columns without any value text, so that a later part with values agrees with them.

    Objects without keys become text too: parquet has no type for them.
    """
    return pa.schema(
        [
            pa.field(f.name, pa.string())
            if pa.types.is_null(f.type) or _has_empty_struct(f.type)
            else f
            for f in schema
        ]
    )


def _has_empty_struct(carried: pa.DataType) -> bool:
    inner = [carried.field(number).type for number in range(carried.num_fields)]
    return (pa.types.is_struct(carried) and not inner) or any(map(_has_empty_struct, inner))
