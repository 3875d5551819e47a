"""The frozen prompts: whole or absent, read back by number, carried columns in their types."""

import datetime as dt
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.dataset.columns import completion_table
from pipeline.dataset.frozen import (
    FrozenPrompts,
    freeze,
    frozen_prompts,
    remove_other_sets,
    schema_from_text,
)
from pipeline.dataset.prompts import InputColumns, PromptStream, read_prompts
from pipeline.store.folder import LocalFolder
from pipeline.store.run_folder import PROMPTS
from schemas.completion import COMPLETION_SCHEMA, Completion
from schemas.config.requests import PromptsConfig
from schemas.prompt import Message, Problem, Prompt

Build = Callable[..., Completion]

COLUMNS = InputColumns(column="prompt", shape="prompt", system_column=None)
INDEX = f"{PROMPTS}/set/index.json"


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    made = LocalFolder(tmp_path / "out")
    made.make()
    return made


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows a group, two groups a file."""
    monkeypatch.setattr("pipeline.dataset.frozen._GROUP_ROWS", 3)
    monkeypatch.setattr("pipeline.dataset.frozen._FILE_ROWS", 6)


def test_longest_rows_are_noted_by_their_turns(folder: LocalFolder) -> None:
    def of(texts: list[str], problem: Problem | None = None) -> Prompt:
        open_place = Message(role="assistant", content="")
        pairs = [(Message(role="user", content=text), open_place) for text in texts]
        messages = tuple(message for pair in pairs for message in pair)
        return replace(prompt(0), messages=messages, problem=problem)

    bad = of(["x" * 99], Problem(kind="empty_text", text="t"))
    rows = [of(["a" * 30]), of(["ä" * 20]), of(["b", "cc"]), bad]
    frozen = freeze(folder, "set", stream_of(rows))
    # A byte is a token at most, and each message takes 5 for the template.
    assert frozen.longest == ((1, 40 + 10), (2, 3 + 20))
    again = frozen_prompts(folder, "set")
    assert again is not None
    assert again.longest == frozen.longest
    index = json.loads(folder.read(INDEX))
    del index["longest"]
    folder.write_whole(INDEX, json.dumps(index).encode())
    older = frozen_prompts(folder, "set")
    assert older is not None
    assert older.longest is None


def prompt(number: int, **carried: object) -> Prompt:
    return Prompt(
        row_id=f"row-{number}",
        content_hash=f"{number:016x}",
        messages=(
            Message(role="user", content=f"q{number} ä\U0001f600"),
            Message(role="assistant", content=""),
        ),
        carried=carried,
    )


def prompts_of(frozen: FrozenPrompts) -> list[Prompt]:
    return [frozen.prompt(number) for number in range(frozen.num_rows)]


def stream_of(
    prompts: Iterable[Prompt],
    carried: tuple[str, ...] = (),
    arrow_schema: pa.Schema | None = None,
) -> PromptStream:
    return PromptStream(
        columns=COLUMNS, carried=carried, arrow_schema=arrow_schema, prompts=iter(prompts)
    )


def frozen(
    folder: LocalFolder,
    prompts: list[Prompt],
    *,
    carried: tuple[str, ...] = (),
    arrow_schema: pa.Schema | None = None,
    name: str = "set",
) -> FrozenPrompts:
    return freeze(folder, name, stream_of(prompts, carried, arrow_schema))


# -- round trip


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("num_rows", [1, 3, 6, 7, 12, 16])
def test_frozen_prompts_come_back_by_their_numbers(folder: LocalFolder, num_rows: int) -> None:
    prompts = [prompt(number, n=number) for number in range(num_rows)]
    frozen(folder, prompts, carried=("n",))
    standing = frozen_prompts(folder, "set")
    assert standing is not None
    assert standing.num_rows == num_rows
    assert prompts_of(standing) == prompts
    # Against the order too, so that no row group is found by luck.
    assert [standing.prompt(n) for n in reversed(range(num_rows))] == prompts[::-1]
    assert len(folder.names(f"{PROMPTS}/set")) == 1 + -(-num_rows // 6)


@pytest.mark.usefixtures("small_files")
def test_ids_come_in_order_a_file_at_a_time(folder: LocalFolder) -> None:
    prompts = [prompt(number) for number in range(13)]
    batches = list(frozen(folder, prompts).ids())
    assert [len(row_ids) for row_ids, _ in batches] == [6, 6, 1]
    assert [i for row_ids, _ in batches for i in row_ids.to_pylist()] == [p.row_id for p in prompts]
    assert [h for _, hashes in batches for h in hashes.to_pylist()] == [
        p.content_hash for p in prompts
    ]


def test_set_tells_what_it_was_frozen_from(folder: LocalFolder) -> None:
    bad = Prompt(
        row_id="bad",
        content_hash="0" * 16,
        messages=(),
        carried={},
        problem=Problem(kind="empty_text", text="prompt: the text is empty"),
    )
    columns = InputColumns(column="chat", shape="messages", system_column="system")
    stream = replace(stream_of(iter([bad, prompt(1), bad])), columns=columns)
    made = freeze(folder, "set", stream)
    for one in (made, frozen_prompts(folder, "set")):
        assert one is not None
        assert (one.num_rows, one.num_problems) == (3, 2)
        assert one.columns == columns
        assert one.prompt(0) == bad


def test_input_without_rows_is_frozen_empty(folder: LocalFolder) -> None:
    made = frozen(folder, [], carried=("x",))
    assert made.num_rows == 0
    assert list(made.ids()) == []
    assert schema_from_text(made.carried_schema) == pa.schema([pa.field("x", pa.string())])


def test_half_a_surrogate_pair_in_a_carried_column_is_written_as_a_question_mark(
    folder: LocalFolder, completion: Build
) -> None:
    prompts = [prompt(0, x="\ud800!", y={"z": ["\udfff"]})]
    made = frozen(folder, prompts, carried=("x", "y"))
    assert made.prompt(0).carried == {"x": "?!", "y": {"z": ["?"]}}
    assert written(made, completion) == [{"x": "?!", "y": {"z": ["?"]}}]


# -- whole or absent


def test_index_is_removed_before_the_rows(folder: LocalFolder) -> None:
    """A process that dies in between leaves rows without an index, which are no set."""
    frozen(folder, [prompt(0)])
    removed: list[str] = []

    class Watched(LocalFolder):
        __slots__ = ()

        def remove(self, name: str) -> None:
            removed.append(name)
            LocalFolder.remove(self, name)

        def remove_folder(self, name: str) -> None:
            assert not self.exists(INDEX)
            removed.append(name)
            LocalFolder.remove_folder(self, name)

    remove_other_sets(Watched(folder.root), "another")
    assert removed == [INDEX, f"{PROMPTS}/set"]


def test_set_that_was_never_frozen_is_absent(folder: LocalFolder) -> None:
    assert frozen_prompts(folder, "set") is None


@pytest.mark.usefixtures("small_files")
def test_interrupted_freeze_is_not_taken_for_a_whole_set(folder: LocalFolder) -> None:
    def breaking_off() -> Iterator[Prompt]:
        yield from (prompt(number) for number in range(8))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        freeze(folder, "set", stream_of(breaking_off()))
    assert folder.names(f"{PROMPTS}/set") == ["rows-00000.parquet"]
    assert frozen_prompts(folder, "set") is None


@pytest.mark.usefixtures("small_files")
def test_freeze_that_is_repeated_leaves_nothing_of_the_first(folder: LocalFolder) -> None:
    frozen(folder, [prompt(number) for number in range(20)])
    folder.write_whole(f"{PROMPTS}/set/.rows.tmp", b"cut off")
    made = frozen(folder, [prompt(99)])
    assert [p.row_id for p in prompts_of(made)] == ["row-99"]
    assert folder.names(f"{PROMPTS}/set") == ["index.json", "rows-00000.parquet"]


@pytest.mark.usefixtures("small_files")
def test_set_stops_being_whole_before_its_rows_go(folder: LocalFolder) -> None:
    frozen(folder, [prompt(number) for number in range(20)])

    def looking() -> Iterator[Prompt]:
        assert frozen_prompts(folder, "set") is None
        yield prompt(0)

    freeze(folder, "set", stream_of(looking()))
    assert folder.exists(INDEX)


def test_other_sets_are_removed_and_this_one_stays(folder: LocalFolder) -> None:
    made = frozen(folder, [prompt(1)])
    frozen(folder, [prompt(2)], name="older")
    frozen(folder, [prompt(3)], name="oldest")
    remove_other_sets(folder, "set")
    assert folder.names(PROMPTS) == ["set"]
    assert made.prompt(0) == prompt(1)


def test_foreign_file_beside_the_sets_is_left_alone(folder: LocalFolder) -> None:
    frozen(folder, [prompt(1)])
    frozen(folder, [prompt(2)], name="older")
    folder.make(f"{PROMPTS}/older/sub")
    folder.write_whole(f"{PROMPTS}/notes.txt", b"mine")
    remove_other_sets(folder, "set")
    assert folder.names(PROMPTS) == ["notes.txt", "set"]


def test_removal_in_a_folder_without_sets_does_nothing(folder: LocalFolder) -> None:
    remove_other_sets(folder, "set")
    assert folder.names() == []


# -- carried columns


@pytest.mark.parametrize(
    ("value", "source", "carried", "expected"),
    [
        (7, pa.int32(), pa.int32(), 7),
        (-7, pa.int8(), pa.int8(), -7),
        (2**64 - 1, pa.uint64(), pa.uint64(), 2**64 - 1),
        (1.5, pa.float32(), pa.float32(), 1.5),
        (True, pa.bool_(), pa.bool_(), True),
        ("ä", pa.string(), pa.string(), "ä"),
        ("ä", pa.large_string(), pa.string(), "ä"),
        (["a", None], pa.list_(pa.string()), pa.list_(pa.string()), ["a", None]),
        ([1], pa.large_list(pa.int16()), pa.list_(pa.int16()), [1]),
        ([1, 2], pa.list_(pa.int16(), 2), pa.list_(pa.int16()), [1, 2]),
        (
            {"a": 1, "b": ["x"]},
            pa.struct([("a", pa.int8()), ("b", pa.list_(pa.large_string()))]),
            pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))]),
            {"a": 1, "b": ["x"]},
        ),
        (
            [{"v": [1, 2]}],
            pa.list_(pa.struct([("v", pa.list_(pa.int64(), 2))])),
            pa.list_(pa.struct([("v", pa.list_(pa.int64()))])),
            [{"v": [1, 2]}],
        ),
        (
            dt.datetime(2026, 11, 30, 6, 5, 4, tzinfo=dt.UTC),
            pa.timestamp("us", tz="UTC"),
            pa.string(),
            "2026-11-30 06:05:04+00:00",
        ),
        (dt.date(2026, 11, 30), pa.date32(), pa.string(), "2026-11-30"),
        (
            {"at": dt.date(2026, 11, 30)},
            pa.struct([("at", pa.date32())]),
            pa.struct([("at", pa.string())]),
            {"at": "2026-11-30"},
        ),
        (Decimal("1.50"), pa.decimal128(5, 2), pa.string(), "1.50"),
        (None, pa.null(), pa.string(), None),
        (None, pa.int32(), pa.int32(), None),
    ],
)
def test_parquet_column_keeps_its_type_where_json_holds_it_exactly(
    tmp_path: Path,
    folder: LocalFolder,
    completion: Build,
    value: object,
    source: pa.DataType,
    carried: pa.DataType,
    expected: object,
) -> None:
    table = pa.table({"prompt": ["q", "r"], "x": pa.array([value, None], source)})
    pq.write_table(table, tmp_path / "p.parquet")
    made = frozen_from(folder, tmp_path / "p.parquet")
    assert schema_from_text(made.carried_schema).field("x").type == carried
    assert written(made, completion) == [{"x": expected}, {"x": None}]


@pytest.mark.parametrize(
    ("values", "carried", "expected"),
    [
        ([1, None, 2], pa.int64(), [1, None, 2]),
        ([1, 1.5], pa.float64(), [1.0, 1.5]),
        (["a", None], pa.string(), ["a", None]),
        ([[1], [], None], pa.list_(pa.int64()), [[1], [], None]),
        (
            [{"a": 1}, {"b": "x"}],
            pa.struct([("a", pa.int64()), ("b", pa.string())]),
            [{"a": 1, "b": None}, {"a": None, "b": "x"}],
        ),
        ([1, "a", [2], {"k": None}], pa.string(), ["1", "a", "[2]", '{"k": null}']),
        ([True, 1], pa.string(), ["true", "1"]),
        ([2**70, -1], pa.string(), [str(2**70), "-1"]),
        ([None, None], pa.string(), [None, None]),
        ([{}, None], pa.string(), ["{}", None]),
        ([[{"a": {}}], None], pa.string(), ['[{"a": {}}]', None]),
    ],
)
@pytest.mark.parametrize("rows_apart", [False, True])
def test_json_lines_column_takes_the_type_that_holds_all_its_values(
    tmp_path: Path,
    folder: LocalFolder,
    completion: Build,
    monkeypatch: pytest.MonkeyPatch,
    values: list[object],
    carried: pa.DataType,
    expected: list[object],
    rows_apart: bool,
) -> None:
    if rows_apart:
        monkeypatch.setattr("pipeline.dataset.frozen._GROUP_ROWS", 1)
        monkeypatch.setattr("pipeline.dataset.frozen._FILE_ROWS", 1)
    lines = [json.dumps({"prompt": "q", "x": value}) for value in values]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    made = frozen_from(folder, tmp_path / "p.jsonl")
    assert schema_from_text(made.carried_schema).field("x").type == carried
    assert [row["x"] for row in written(made, completion)] == expected


def test_carried_columns_stand_in_the_order_asked_for(folder: LocalFolder) -> None:
    made = frozen(folder, [prompt(0, a=1, b="x", c=None)], carried=("c", "a", "b"))
    assert schema_from_text(made.carried_schema).names == ["c", "a", "b"]


def frozen_from(folder: LocalFolder, path: Path) -> FrozenPrompts:
    """The input at `path`, read as a run reads it, with column `x` carried."""
    stream = read_prompts(PromptsConfig(path=str(path), keep_columns=["x"]))
    return freeze(folder, "set", stream)


def written(made: FrozenPrompts, completion: Build) -> list[dict[str, Any]]:
    """The carried columns after the trip through a part of the output."""
    rows = [completion(p.row_id, carried=p.carried) for p in prompts_of(made)]
    schema = schema_from_text(made.carried_schema)
    sink = pa.BufferOutputStream()
    pq.write_table(completion_table(rows, schema), sink)
    table = pq.read_table(pa.BufferReader(sink.getvalue()))
    assert table.column_names == [*COMPLETION_SCHEMA.names, *schema.names]
    back: list[dict[str, Any]] = table.select(schema.names).to_pylist()
    return back
