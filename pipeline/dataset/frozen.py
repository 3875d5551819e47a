"""The prompts, frozen beside the output so that every worker reads the same rows by number.

Invariant: a frozen set is whole or absent; row number n is the same prompt for as long as the set
stands. Workers read row groups of it from the shared folder, so no prompt travels through the
driver. Beside the conversation it holds what a row carries, as JSON, and the types in which
carried columns go to the output.
"""

import base64
import io
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import PROMPTS
from schemas.prompt import Message, Problem, Prompt, most_tokens

_FILE_ROWS = 2_048
# A file's rows are held in memory while it is written.
_GROUP_ROWS = 512
# A lease is a few dozen rows: a group this size costs a worker one small read.

_NO_IDS = pa.array([], pa.string())
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
    column: str
    shape: str
    system_column: str | None
    carried_schema: str
    """Arrow schema of the carried columns, serialised, in base64."""
    longest: tuple[tuple[int, int], ...] | None = None
    """Turns to generate → the most tokens that a row of so many can ask with, its answers left out.

    None for a set that was frozen without.
    """
    _group: tuple[int, list[Prompt]] = field(default=(-1, []))

    def prompt(self, number: int) -> Prompt:
        """The prompt in row `number`; neighbours are kept, since leases are ranges."""
        group_number, within = divmod(number, _GROUP_ROWS)
        if self._group[0] != group_number:
            self._group = (group_number, self._read_group(group_number))
        return self._group[1][within]

    def ids(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Row ids and content hashes in order, a file's worth at a time."""
        for file_number in range(-(-self.num_rows // _FILE_ROWS)):
            with opened_parquet(self.folder, _file_name(self.name, file_number)) as file:
                table = file.read(columns=["row_id", "content_hash"])
            yield table["row_id"].combine_chunks(), table["content_hash"].combine_chunks()

    def row_ids(self) -> pa.Array:
        return pa.concat_arrays([*(row_ids for row_ids, _ in self.ids()), _NO_IDS])

    def numbers_of(self, row_ids: Collection[str]) -> Iterator[tuple[str, int]]:
        """Those of `row_ids` that the set has, with their numbers, in order."""
        wanted, start = pa.array(row_ids, pa.string()), 0
        for found, _ in self.ids():
            for number in pc.indices_nonzero(pc.is_in(found, wanted)).to_pylist():
                yield found[number].as_py(), start + number
            start += len(found)

    def _read_group(self, group_number: int) -> list[Prompt]:
        file_number, group = divmod(group_number, _FILE_ROWS // _GROUP_ROWS)
        with opened_parquet(self.folder, _file_name(self.name, file_number)) as file:
            return [_prompt_from_frozen(row) for row in file.read_row_group(group).to_pylist()]


def freeze(
    folder: Folder,
    name: str,
    prompts: Iterable[Prompt],
    *,
    columns: tuple[str, str, str | None],
    carried: list[str],
    arrow_schema: pa.Schema | None,
) -> FrozenPrompts:
    """Write `prompts` under `prompts/<name>/` in one pass, the index last.

    `columns` are the conversation's column, its shape and the system column, as recognised.
    """
    _remove_set(folder, name)
    folder.make(f"{PROMPTS}/{name}")
    known = _known_schema(carried, arrow_schema)
    num_rows = num_problems = 0
    longest: dict[int, int] = {}
    stream = iter(prompts)
    while batch := list(islice(stream, _FILE_ROWS)):
        if arrow_schema is None:
            known = _widened(known, carried, batch)
        _write_file(folder, _file_name(name, num_rows // _FILE_ROWS), batch)
        num_rows += len(batch)
        num_problems += sum(prompt.problem is not None for prompt in batch)
        for prompt in batch:
            note_longest(longest, prompt)
    index = {
        "num_rows": num_rows,
        "num_problems": num_problems,
        "column": columns[0],
        "shape": columns[1],
        "system_column": columns[2],
        "carried_schema": _schema_text(_as_written(known)),
        "longest": tuple(sorted(longest.items())),
    }
    folder.write_whole(f"{PROMPTS}/{name}/index.json", json.dumps(index).encode())
    return FrozenPrompts(folder=folder, name=name, **index)  # type: ignore[arg-type]


def frozen_prompts(folder: Folder, name: str) -> FrozenPrompts | None:
    """The set frozen under `name`, or None when there is no whole one."""
    index = f"{PROMPTS}/{name}/index.json"
    if not folder.exists(index):
        return None
    values = json.loads(folder.read(index))
    if "longest" in values:
        values["longest"] = tuple((turns, tokens) for turns, tokens in values["longest"])
    return FrozenPrompts(folder=folder, name=name, **values)


def frozen_in(folder: Folder) -> FrozenPrompts | None:
    """The run's frozen set, whatever its name; None when there is no whole one."""
    sets = (frozen_prompts(folder, name) for name in folder.names(PROMPTS))
    return next((frozen for frozen in sets if frozen is not None), None)


def note_longest(longest: dict[int, int], prompt: Prompt) -> None:
    """Turns to generate → the most tokens that a row of so many can ask with."""
    if prompt.problem is None:
        turns, tokens = prompt.num_turns, most_tokens(prompt.messages)
        longest[turns] = max(tokens, longest.get(turns, 0))


def remove_other_sets(folder: Folder, name: str) -> None:
    """Drop what earlier inputs left; a foreign file beside the sets stays."""
    for other in folder.folder_names(PROMPTS):
        if other != name:
            _remove_set(folder, other)


def _remove_set(folder: Folder, name: str) -> None:
    """The index first, so that a set is never taken for whole when it is not."""
    folder.remove(f"{PROMPTS}/{name}/index.json")
    # What stays of it harms nothing.
    folder.remove_folder(f"{PROMPTS}/{name}")


def schema_from_text(text: str) -> pa.Schema:
    """The schema that `FrozenPrompts.carried_schema` and `run.json` hold."""
    return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(text)))


def _schema_text(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


# -- files


def _file_name(name: str, file_number: int) -> str:
    return f"{PROMPTS}/{name}/rows-{file_number:05d}.parquet"


def _write_file(folder: Folder, file_name: str, prompts: list[Prompt]) -> None:
    table = pa.table(
        {
            "row_id": [prompt.row_id for prompt in prompts],
            "content_hash": [prompt.content_hash for prompt in prompts],
            "body": [_body(prompt) for prompt in prompts],
        },
        schema=_FROZEN_SCHEMA,
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", row_group_size=_GROUP_ROWS)
    folder.write_whole(file_name, buffer.getvalue())


def _body(prompt: Prompt) -> str:
    problem = prompt.problem
    values = {
        "messages": [[message.role, message.content] for message in prompt.messages],
        "carried": prompt.carried,
        "problem": [problem.kind, problem.text] if problem else None,
    }
    return _json_text(values)


def _json_text(values: object) -> str:
    """JSON that can be written as UTF-8: half a surrogate pair becomes a question mark."""
    text = json.dumps(values, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()


def _prompt_from_frozen(row: dict[str, str]) -> Prompt:
    body = json.loads(row["body"])
    problem = body["problem"]
    return Prompt(
        row_id=row["row_id"],
        content_hash=row["content_hash"],
        messages=tuple(Message(role=role, content=text) for role, text in body["messages"]),
        carried=body["carried"],
        problem=Problem(kind=problem[0], text=problem[1]) if problem else None,
    )


# -- types of carried columns


def _known_schema(carried: list[str], arrow_schema: pa.Schema | None) -> pa.Schema:
    if arrow_schema is None:
        return pa.schema([pa.field(name, pa.null()) for name in carried])
    return pa.schema(
        [pa.field(name, _carried_type(arrow_schema.field(name).type)) for name in carried]
    )


_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def _carried_type(source: pa.DataType) -> pa.DataType:
    """The source's type where JSON holds its values exactly, else text."""
    if _holds_map(source):
        return pa.string()
    if pa.types.is_dictionary(source):
        return _carried_type(source.value_type)
    if pa.types.is_struct(source):
        return pa.struct([pa.field(f.name, _carried_type(f.type)) for f in source])
    if any(is_a_list(source) for is_a_list in _LISTS):
        return pa.list_(_carried_type(source.value_type))
    exact = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    return source if any(is_exact(source) for is_exact in exact) else pa.string()


def _holds_map(source: pa.DataType) -> bool:
    """Whether a map stands anywhere inside: JSON knows it as a list, so it goes out as text."""
    if pa.types.is_map(source):
        return True
    return any(_holds_map(source.field(number).type) for number in range(source.num_fields))


def _widened(known: pa.Schema, carried: list[str], prompts: list[Prompt]) -> pa.Schema:
    """`known` with each column's type widened to hold these rows' values too."""
    fields = []
    for name in carried:
        values = json.loads(_json_text([prompt.carried[name] for prompt in prompts]))
        fields.append(pa.field(name, _common_type(known.field(name).type, values)))
    return pa.schema(fields)


def _common_type(known: pa.DataType, values: list[object]) -> pa.DataType:
    try:
        seen = pa.schema([pa.field("", pa.array(values).type)])
        merged = pa.unify_schemas(
            [pa.schema([pa.field("", known)]), seen], promote_options="permissive"
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        # Values of several kinds have no common type: they are carried as JSON text.
        return pa.string()
    return merged.field(0).type


def _as_written(schema: pa.Schema) -> pa.Schema:
    """A column that held nothing is text, so that a later part with values agrees with it.

    So is one with an object that has no keys: parquet has no type for it.
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
