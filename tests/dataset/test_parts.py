"""The output folder: a part is visible only when whole, a row in at most one part."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import GenericAlias
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.dataset import parts as run_parts
from pipeline.dataset import run_record
from pipeline.dataset.done_rows import DoneRows, RowsToRedo, take_back
from pipeline.dataset.recovery import Recovery, recover
from pipeline.errors import ResumeError
from pipeline.store.folder import Folder, LocalFolder
from pipeline.store.run_folder import DATA, MANIFEST_FILE, QUARANTINE, RUN_FILE, STAGING
from schemas.completion import COMPLETION_SCHEMA, Completion, Turn
from schemas.manifest import EngineRun, FailedRow, Part, RunIdentity, RunRecord, Session
from schemas.prompt import Message, SamplingParams

AnyFolder = TypeVar("AnyFolder", bound=Folder)
Build = Callable[..., Completion]

NO_COLUMNS = pa.schema([])
RECORD = RunRecord(
    run_id="run-1", created_at_s=1.0, identity=RunIdentity(settings={}), carried_schema=""
)
SESSION = Session(
    session_id="s1",
    started_at_s=1.0,
    rows_total=12,
    rows_done=0,
    rows_error=0,
    rows_outside_input=0,
)


def fresh(path: Path) -> LocalFolder:
    return begun(LocalFolder(path))


def begun(folder: AnyFolder) -> AnyFolder:
    folder.make()
    run_record.write_run(folder, RECORD)
    run_record.list_in_manifest(folder, SESSION)
    return folder


def staged(
    folder: Folder,
    name: str,
    rows: Sequence[Completion],
    *,
    run_id: str = RECORD.run_id,
    columns: pa.Schema = NO_COLUMNS,
) -> Part:
    return run_parts.stage_part(
        folder, f"{name}.parquet", rows, run_id=run_id, carried_schema=columns, worker_id="w0"
    )


def published(folder: Folder, name: str, rows: Sequence[Completion]) -> Part:
    return run_parts.publish(folder, staged(folder, name, rows), now_s=2.0)


def recovered(folder: Folder) -> Recovery:
    return recover(folder, RECORD, now_s=3.0)


def visible(folder: Folder) -> list[dict[str, object]]:
    """What a reader sees that globs `data/`, whatever the manifest says."""
    names = [name for name in folder.names(DATA) if name.endswith(".parquet")]
    return [row for name in names for row in table_of(folder, name).to_pylist()]


def table_of(folder: Folder, name: str) -> pa.Table:
    with folder.open_input(f"{DATA}/{name}") as file:
        return pq.read_table(file)


def visible_ids(folder: Folder) -> list[object]:
    return sorted(row["row_id"] for row in visible(folder))  # type: ignore[type-var]


def assert_in_order(folder: Folder) -> None:
    """`data/` holds whole, listed parts and nothing else; what is done is what can be read."""
    parts = run_record.read_manifest(folder).parts
    assert folder.names(DATA) == sorted(parts)
    for name, part in parts.items():
        table = table_of(folder, name)
        assert table["row_id"].to_pylist() == list(part.row_ids)
        assert table["sample_index"].to_pylist() == list(part.sample_indexes)
        assert table["content_hash"].to_pylist() == list(part.content_hashes)
        assert table["status"].to_pylist().count("error") == part.num_errors
        assert folder.size_bytes(f"{DATA}/{name}") == part.size_bytes
    keys = [(row["row_id"], row["sample_index"]) for row in visible(folder)]
    assert len(set(keys)) == len(keys)
    assert folder.names(STAGING) == []


# -- the schema


RECORDS = {"messages": Message, "turns": Turn, "sampling": SamplingParams}


def arrow_field(name: str, hint: object) -> pa.Field:
    """The column that a field of a record has to be, but for the width of its numbers."""
    choices = get_args(hint) if get_origin(hint) in (Union, type(int | None)) else (hint,)
    inner = next(choice for choice in choices if choice is not type(None))
    return pa.field(name, arrow_type(inner), nullable=type(None) in choices)


def arrow_type(hint: object) -> pa.DataType:
    if get_origin(hint) is tuple:
        return pa.list_(arrow_type(get_args(hint)[0]))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return pa.struct([arrow_field(name, hints[name]) for name in hints])
    plain: dict[object, pa.DataType] = {
        str: pa.string(),
        int: pa.int64(),
        float: pa.float64(),
        bool: pa.bool_(),
    }
    return pa.string() if get_origin(hint) is Literal else plain[hint]


def widened(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, widened(f.type), f.nullable) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(widened(kind.value_type))
    return pa.int64() if pa.types.is_integer(kind) else kind


def test_schema_is_the_completion_with_its_times_as_timestamps() -> None:
    hints = get_type_hints(Completion)
    assert hints.pop("carried") == GenericAlias(dict, (str, object))
    expected = []
    for name, hint in hints.items():
        if name.endswith("_at_s"):
            assert hint is float
            time = pa.timestamp("ms", tz="UTC")
            expected.append(pa.field(name.removesuffix("_s"), time, nullable=False))
        else:
            expected.append(arrow_field(name, hint))
    found = [pa.field(f.name, widened(f.type), f.nullable) for f in COMPLETION_SCHEMA]
    assert found == expected


def test_carried_columns_follow_the_completion(tmp_path: Path, completion: Build) -> None:
    columns = pa.schema([("category", pa.string()), ("level", pa.int32())])
    rows = [completion("a", carried={"level": 3, "category": "math", "other": 1}), completion("b")]
    table = run_parts.completion_table(rows, columns)
    assert table.column_names == [*COMPLETION_SCHEMA.names, "category", "level"]
    assert table.schema.field("level").type == pa.int32()
    assert table["category"].to_pylist() == ["math", None]
    assert table["level"].to_pylist() == [3, None]


def test_carried_value_that_is_no_text_is_kept_as_json_in_a_text_column(completion: Build) -> None:
    columns = pa.schema([("category", pa.string())])
    rows = [completion("a", carried={"category": {"größe": 3}})]
    assert run_parts.completion_table(rows, columns)["category"].to_pylist() == ['{"größe": 3}']


def test_carried_value_of_another_type_names_its_column(completion: Build) -> None:
    columns = pa.schema([("level", pa.int32())])
    with pytest.raises(ResumeError, match=r"prompts\.keep_columns: 'level' .* not int32"):
        run_parts.completion_table([completion("a", carried={"level": "high"})], columns)


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        (pa.int32(), "high", pa.ArrowInvalid),
        (pa.list_(pa.int32()), 3, pa.ArrowTypeError),
        (pa.int64(), 2**70, OverflowError),
    ],
)
def test_whatever_arrow_raises_for_a_carried_value_names_the_column(
    completion: Build, kind: pa.DataType, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        pa.array([value], kind)
    with pytest.raises(ResumeError, match=r"prompts\.keep_columns: 'level' has values that are"):
        run_parts.completion_table(
            [completion("a", carried={"level": value})], pa.schema([("level", kind)])
        )


# -- one part


FULL_TURN = Turn(
    reasoning_text="  was?\n\nλ → 🦜 \u0000 …",
    answer_text="Zürich, 東京, 🇨🇭\ttab",
    finish_reason="length",
    prompt_tokens=4,
    completion_tokens=3,
    reasoning_tokens=2,
    prompt_token_ids=(1, 2, 3, 4),
    completion_token_ids=(151_643, 0, 9),
    generation_boundary=4,
    duration_s=1.5,
)


def test_completion_comes_back_as_it_was(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    row = completion(
        "ид-1",
        sample_index=2,
        turns=(FULL_TURN, dataclasses.replace(FULL_TURN, prompt_token_ids=(), reasoning_text=None)),
        finish_reason="length",
        started_at_s=1_700_000_000.125,
        finished_at_s=1_700_000_002.5,
    )
    published(folder, "p1", [row, completion("b", error=True)])
    first, second = visible(folder)
    assert first["row_id"] == "ид-1"
    assert first["sample_index"] == 2
    assert first["started_at"] == datetime(2023, 11, 14, 22, 13, 20, 125_000, UTC)
    assert first["finished_at"] == datetime(2023, 11, 14, 22, 13, 22, 500_000, UTC)
    turns = [dataclasses.asdict(turn) for turn in row.turns]
    for turn in turns:
        turn["prompt_token_ids"] = list(turn["prompt_token_ids"])
        turn["completion_token_ids"] = list(turn["completion_token_ids"])
    assert first["turns"] == turns
    assert first["messages"] == [dataclasses.asdict(message) for message in row.messages]
    assert first["sampling"] == dataclasses.asdict(row.sampling)
    for name in ("status", "finish_reason", "model", "thinking", "engine", "attempt", "worker_id"):
        assert first[name] == getattr(row, name)
    assert (second["status"], second["error_kind"], second["turns"]) == ("error", "empty_text", [])


def test_staged_part_is_not_visible_and_tells_what_it_holds(
    tmp_path: Path, completion: Build
) -> None:
    folder = fresh(tmp_path)
    rows = [completion("a"), completion("b", turns=(FULL_TURN,)), completion("c", error=True)]
    part = staged(folder, "p1", rows)
    assert visible(folder) == []
    assert part.row_ids == ("a", "b", "c")
    assert (part.num_rows, part.num_errors) == (3, 1)
    assert (part.prompt_tokens, part.completion_tokens) == (5 + 4, 3 + 3)
    assert part.size_bytes == folder.size_bytes(f"{STAGING}/p1.parquet")


def test_published_part_is_listed_with_its_rows(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    part = published(folder, "p1", [completion("a"), completion("b", sample_index=1)])
    assert run_record.read_manifest(folder).parts == {"p1.parquet": part}
    assert part.published_at_s == 2.0
    assert_in_order(folder)


def test_discarded_part_is_gone(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    run_parts.discard(folder, staged(folder, "p1", [completion("a")]))
    assert folder.names(STAGING) == []
    assert recovered(folder).parts == ()


def test_example_is_an_ok_row_where_there_is_any(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    assert run_parts.example_completion(folder) is None
    published(folder, "p2", [completion("bad", error=True)])
    assert run_parts.example_completion(folder) is None
    published(folder, "p1", [completion("worse", error=True), completion("good")])
    example = run_parts.example_completion(folder)
    assert example is not None
    assert example["row_id"] == "good"


# -- the run record


def test_run_record_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    assert run_record.read_run(folder) is None
    record = dataclasses.replace(
        RECORD,
        identity=RunIdentity(settings={"model": "m", "sampling.seed": None, "kept": ["ä"]}),
        accepted_drift=("model: …",),
    )
    run_record.write_run(folder, record)
    assert run_record.read_run(folder) == record


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"identity": 1}', "\xff"])
def test_run_record_that_cannot_be_read_is_told(tmp_path: Path, text: str) -> None:
    folder = LocalFolder(tmp_path)
    folder.write_whole(RUN_FILE, text.encode("latin-1"))
    with pytest.raises(ResumeError, match="not a run record"):
        run_record.read_run(folder)


# -- putting in order


def test_clean_folder_is_left_as_it_is(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    parts = (published(folder, "p1", [completion("a")]), published(folder, "p2", [completion("b")]))
    before = folder.read(MANIFEST_FILE)
    assert recovered(folder) == Recovery(parts=parts, reports=())
    assert folder.read(MANIFEST_FILE) == before


def test_staged_part_of_a_dead_worker_is_published(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    staged(folder, "p1", [completion("a")])
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("a",)]
    assert recovery.reports == ()
    assert_in_order(folder)


def test_part_that_was_moved_and_not_listed_is_listed(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    part = staged(folder, "p1", [completion("a"), completion("b", sample_index=3)])
    folder.move(f"{STAGING}/p1.parquet", f"{DATA}/p1.parquet")
    assert recovered(folder).parts == (dataclasses.replace(part, published_at_s=3.0),)
    assert_in_order(folder)


def test_cut_off_manifest_line_is_reported_and_its_part_listed_again(
    tmp_path: Path, completion: Build
) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a")])
    published(folder, "p2", [completion("b")])
    folder.path(MANIFEST_FILE).write_bytes(folder.read(MANIFEST_FILE)[:-20])
    assert list(run_record.read_manifest(folder).parts) == ["p1.parquet"]
    recovery = recovered(folder)
    assert recovery.reports == ("manifest.jsonl line 3 cannot be read and is left out",)
    assert_in_order(folder)
    published(folder, "p3", [completion("c")])
    assert visible_ids(folder) == ["a", "b", "c"]
    assert_in_order(folder)


def test_manifest_cut_off_at_its_line_feed_loses_nothing(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    part = published(folder, "p1", [completion("a")])
    folder.path(MANIFEST_FILE).write_bytes(folder.read(MANIFEST_FILE)[:-1])
    assert recovered(folder) == Recovery(parts=(part,), reports=())


@pytest.mark.parametrize(
    "line",
    [b"\x00\x00\x00", b"[1]", b"7", b"{}", b'{"event": "dance"}', b'{"event": "part"}', b"\xff"],
)
def test_unreadable_line_in_the_middle_is_left_out(
    tmp_path: Path, completion: Build, line: bytes
) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a")])
    folder.append_line(MANIFEST_FILE, line + b"\n")
    published(folder, "p2", [completion("b")])
    recovery = recovered(folder)
    assert [part.name for part in recovery.parts] == ["p1.parquet", "p2.parquet"]
    assert recovery.reports == ("manifest.jsonl line 3 cannot be read and is left out",)


def test_lost_manifest_is_written_again_from_the_parts(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("b")])
    published(folder, "p2", [completion("c", error=True)])
    folder.remove(MANIFEST_FILE)
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("a", "b"), ("c",)]
    assert_in_order(folder)


def test_deleted_part_is_reported_and_its_rows_are_open(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("b")])
    published(folder, "p2", [completion("c")])
    folder.remove(f"{DATA}/p1.parquet")
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("c",)]
    assert recovery.reports == ("data/p1.parquet is listed but gone; its 2 rows are done again",)
    assert recovered(folder).reports == (), "it is told once"
    assert_in_order(folder)


@pytest.mark.parametrize("size", [0, 3, 100, -1])
def test_truncated_part_is_set_aside_and_its_rows_are_open(
    tmp_path: Path, completion: Build, size: int
) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("b")])
    published(folder, "p2", [completion("c")])
    data = folder.read(f"{DATA}/p1.parquet")
    folder.path(f"{DATA}/p1.parquet").write_bytes(data[:size])
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("c",)]
    report = "data/p1.parquet is truncated or not a parquet file; moved to quarantine/p1.parquet"
    assert recovery.reports == (f"{report}; its 2 rows are done again",)
    assert folder.read(f"{QUARANTINE}/p1.parquet") == data[:size]
    assert_in_order(folder)


def write_foreign(
    folder: LocalFolder, name: str, metadata: dict[bytes, bytes] | None = None
) -> None:
    table = pa.table({"x": [1]}).replace_schema_metadata(metadata)
    pq.write_table(table, folder.path(name))


@pytest.mark.parametrize(
    "footer",
    [b"{", b"[]", b"7", b"{}", b'{"run_id": "run-1"}', b'{"run_id": "run-1", "name": "x.parquet"}'],
)
def test_footer_that_is_none_of_ours_is_not_fatal(tmp_path: Path, footer: bytes) -> None:
    folder = fresh(tmp_path)
    write_foreign(folder, f"{DATA}/x.parquet", {b"regenerate.part": footer})
    write_foreign(folder, f"{STAGING}/x.parquet", {b"regenerate.part": footer})
    recovery = recovered(folder)
    assert recovery.parts == ()
    assert len(recovery.reports) == 2
    assert folder.names(QUARANTINE) == ["x.parquet", "x.parquet.1"]


def test_foreign_parquet_is_set_aside(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a")])
    write_foreign(folder, f"{DATA}/x.parquet")
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("a",)]
    assert recovery.reports == (
        "data/x.parquet is not a part of this run; moved to quarantine/x.parquet",
    )
    assert_in_order(folder)


def test_foreign_text_and_folder_are_set_aside(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a")])
    folder.path(f"{DATA}/README.md").write_text("hello")
    folder.make(f"{DATA}/.cache/inner")
    folder.path(f"{STAGING}/notes.txt").write_text("hello")
    assert len(recovered(folder).reports) == 3
    assert folder.names(QUARANTINE) == [".cache", "README.md", "notes.txt"]
    assert_in_order(folder)


def test_part_of_another_run_is_set_aside(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a")])
    staged(folder, "p2", [completion("b")], run_id="run-2")
    staged(folder, "p3", [completion("c")], run_id="run-2")
    folder.move(f"{STAGING}/p3.parquet", f"{DATA}/p3.parquet")
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("a",)]
    assert recovery.reports == (
        "data/p3.parquet belongs to another run; moved to quarantine/p3.parquet",
        "staging/p2.parquet belongs to another run; moved to quarantine/p2.parquet",
    )
    assert_in_order(folder)


@pytest.mark.parametrize("copy", ["a-copy.parquet", "p1 (1).parquet"])
def test_copy_under_another_name_is_set_aside(tmp_path: Path, completion: Build, copy: str) -> None:
    folder = fresh(tmp_path)
    part = published(folder, "p1", [completion("a")])
    shutil.copy(folder.path(f"{DATA}/p1.parquet"), folder.path(f"{DATA}/{copy}"))
    recovery = recovered(folder)
    assert recovery.parts == (part,)
    assert recovery.reports == (f"data/{copy} is a copy of p1.parquet; moved to quarantine/{copy}",)
    assert_in_order(folder)


def test_listed_part_stays_where_an_unlisted_one_has_its_rows(
    tmp_path: Path, completion: Build
) -> None:
    folder = fresh(tmp_path)
    part = published(folder, "p1", [completion("a"), completion("b")])
    staged(folder, "earlier-in-order", [completion("b"), completion("c")])
    folder.move(f"{STAGING}/earlier-in-order.parquet", f"{DATA}/earlier-in-order.parquet")
    recovery = recovered(folder)
    assert recovery.parts == (part,)
    assert "contains rows that another part has" in recovery.reports[0]
    assert_in_order(folder)


def test_things_set_aside_do_not_replace_each_other(tmp_path: Path) -> None:
    folder = fresh(tmp_path)
    for text in ("one", "two", "three"):
        folder.path(f"{DATA}/notes.txt").write_text(text)
        recovered(folder)
    texts = [folder.read(f"{QUARANTINE}/{name}") for name in folder.names(QUARANTINE)]
    assert texts == [b"one", b"two", b"three"]


def test_staged_leftovers_are_published_dropped_or_set_aside(
    tmp_path: Path, completion: Build
) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("b")])
    staged(folder, "p2", [completion("c"), completion("d")])
    staged(folder, "p3", [completion("e"), completion("b")])
    staged(folder, "p4", [completion("d"), completion("f")])
    staged(folder, "p5", [completion("g")])
    data = folder.read(f"{STAGING}/p5.parquet")
    folder.path(f"{STAGING}/p5.parquet").write_bytes(data[: len(data) // 2])
    folder.path(f"{STAGING}/.p6.parquet.0a1b2c3d.tmp").write_bytes(data[:10])
    recovery = recovered(folder)
    assert [part.row_ids for part in recovery.parts] == [("a", "b"), ("c", "d")]
    assert recovery.reports == (
        "staging/p5.parquet is truncated or not a parquet file; moved to quarantine/p5.parquet",
    )
    assert folder.names(QUARANTINE) == ["p5.parquet"]
    assert_in_order(folder)


def test_part_that_holds_a_row_twice_is_set_aside(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("a")])
    recovery = recovered(folder)
    assert recovery.parts == ()
    assert "contains rows that another part has" in recovery.reports[0]
    assert visible(folder) == []


def test_samples_of_one_prompt_are_rows_of_their_own(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("a", sample_index=1)])
    staged(folder, "p2", [completion("a", sample_index=2), completion("b", sample_index=2)])
    staged(folder, "p3", [completion("b", sample_index=2)])
    recovery = recovered(folder)
    assert [part.sample_indexes for part in recovery.parts] == [(0, 1), (2, 2)]
    assert recovery.reports == ()
    assert_in_order(folder)


# -- error rows taken back


def taken_back(folder: Folder) -> tuple[Part, ...]:
    parts = recovered(folder).parts
    row_ids = pa.array([row_id for part in parts for row_id in part.row_ids])
    return take_back(folder, RECORD, parts, RowsToRedo(row_ids=row_ids), now_s=4.0)


def test_error_rows_taken_back_leave_each_id_once(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("a"), completion("b", error=True), completion("c")])
    published(folder, "p2", [completion("d", error=True)])
    kept = published(folder, "p3", [completion("e")])
    parts = taken_back(folder)
    assert [part.row_ids for part in parts] == [("a", "c"), ("e",)]
    assert parts[1] == kept
    assert (parts[0].num_errors, parts[0].prompt_tokens, parts[0].completion_tokens) == (0, 10, 6)
    assert_in_order(folder)
    published(folder, "p4", [completion("b"), completion("d", error=True)])
    assert visible_ids(folder) == ["a", "b", "c", "d", "e"]
    assert [part.num_errors for part in recovered(folder).parts] == [0, 0, 1]
    assert_in_order(folder)


def test_rows_that_stay_are_not_changed_by_the_rewrite(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    columns = pa.schema([("level", pa.int8())])
    good = completion("a", turns=(FULL_TURN,), carried={"level": 3})
    bad = completion("b", error=True, carried={"level": 4})
    part = staged(folder, "p1", [good, bad], columns=columns)
    run_parts.publish(folder, part, now_s=2.0)
    schema = pq.read_schema(folder.path(f"{DATA}/p1.parquet"))
    before = visible(folder)
    taken_back(folder)
    assert visible(folder) == before[:1]
    assert pq.read_schema(folder.path(f"{DATA}/p1.parquet")) == schema


# -- what is done


def input_ids(
    *groups: list[tuple[str, str]],
) -> Iterator[tuple[pa.Array, pa.Array]]:
    for group in groups:
        ids, hashes = zip(*group, strict=True)
        yield pa.array(ids, pa.string()), pa.array(hashes, pa.string())


def done_rows(completion: Build, tmp_path: Path, *rows: tuple[str, int, str]) -> DoneRows:
    folder = fresh(tmp_path)
    for number, (row_id, sample, hashed) in enumerate(rows):
        row = completion(row_id, sample_index=sample, content_hash=hashed)
        published(folder, f"p{number}", [row])
    return DoneRows.of(recovered(folder).parts)


def test_published_rows_are_marked_by_id_and_sample(tmp_path: Path, completion: Build) -> None:
    done = done_rows(
        completion, tmp_path, ("a", 0, "A"), ("c", 1, "C"), ("d", 0, "D"), ("d", 2, "D")
    )
    states = bytearray(8)
    ids = input_ids([("b", "B"), ("a", "A"), ("c", "C")], [("d", "D")])
    assert done.mark(ids, states, samples=2, done=1) == (3, None)
    assert states == bytes([0, 0, 1, 0, 0, 1, 1, 0])


def test_first_row_with_other_content_is_told(tmp_path: Path, completion: Build) -> None:
    done = done_rows(completion, tmp_path, ("a", 0, "A"), ("b", 0, "B"), ("c", 1, "C"))
    states = bytearray(6)
    ids = input_ids([("a", "A")], [("b", "other"), ("c", "other")])
    assert done.mark(ids, states, samples=2, done=1) == (3, "b")
    assert done.mark(input_ids([("c", "x")]), bytearray(2), samples=2, done=1) == (1, "c")


def test_no_published_rows_mark_nothing(tmp_path: Path) -> None:
    states = bytearray(2)
    assert DoneRows.of([]).mark(input_ids([("a", "A")]), states, samples=2, done=1) == (0, None)
    assert states == bytes(2)


def test_input_without_the_published_rows_marks_nothing(tmp_path: Path, completion: Build) -> None:
    done = done_rows(completion, tmp_path, ("a", 0, "A"))
    assert done.mark(input_ids([("x", "A")]), bytearray(1), samples=1, done=1) == (0, None)


# -- crashes


class CrashError(Exception):
    """The machine stops here."""


When = Literal["before", "half", "after"]


@dataclass(frozen=True, slots=True)
class CrashingFolder(LocalFolder):
    """Stops at its `crash_at`th change of the disk: before it, after it, or half-way through."""

    crash_at: int = 0
    when: When = "after"
    changes: list[str] = field(default_factory=list)

    def make(self, name: str = ".") -> None:
        self._change(f"make {name}", lambda: LocalFolder.make(self, name), lambda: None)

    def write_whole(self, name: str, data: bytes) -> None:
        temporary = self.path(name).with_name(f".{Path(name).name}.0a1b2c3d.tmp")
        self._change(
            f"write {name}",
            lambda: LocalFolder.write_whole(self, name, data),
            lambda: temporary.write_bytes(data[: len(data) // 2]),
        )

    def append_line(self, name: str, line: bytes) -> None:
        self._change(
            f"append {name}",
            lambda: LocalFolder.append_line(self, name, line),
            lambda: LocalFolder.append_line(self, name, line[: len(line) // 2]),
        )

    def move(self, source: str, target: str) -> None:
        self._change(f"move {source}", lambda: LocalFolder.move(self, source, target), lambda: None)

    def remove(self, name: str) -> None:
        self._change(f"remove {name}", lambda: LocalFolder.remove(self, name), lambda: None)

    def _change(self, name: str, act: Callable[[], None], half: Callable[[], object]) -> None:
        self.changes.append(name)
        is_here = len(self.changes) == self.crash_at
        if is_here and self.when != "after":
            if self.when == "half":
                half()
            raise CrashError(name)
        act()
        if is_here:
            raise CrashError(name)


EXPECTED = [f"r{number:02d}" for number in range(12)]


def before_publishing(folder: Folder, build: Build) -> None:
    published(folder, "p1", [build("r00"), build("r01", error=True)])


def publishing(folder: Folder, build: Build) -> None:
    """A worker and the coordinator at work: stage, publish, list."""
    published(folder, "p2", [build("r02"), build("r03")])
    staged(folder, "p3", [build("r04"), build("r05", error=True)])
    late = staged(folder, "p4", [build("r02")])
    run_parts.discard(folder, late)
    part = staged(folder, "p5", [build("r06")])
    run_parts.publish(folder, part, now_s=2.0)
    failed = FailedRow(row_id="r07", sample_index=0, cause="?", attempts=6, failed_at_s=2.0)
    run_record.list_in_manifest(folder, failed)


def before_recovering(folder: LocalFolder, build: Build) -> None:
    """One of everything that a folder can hold after crashes and visitors."""
    before_publishing(folder, build)
    published(folder, "p2", [build("r02"), build("r03")])
    staged(folder, "p3", [build("r04"), build("r05", error=True)])
    folder.move(f"{STAGING}/p3.parquet", f"{DATA}/p3.parquet")
    staged(folder, "p4", [build("r06")])
    staged(folder, "p5", [build("r06"), build("r07")])
    staged(folder, "p6", [build("r08")])
    folder.path(f"{STAGING}/p6.parquet").write_bytes(b"PAR1")
    folder.path(f"{STAGING}/.p7.parquet.00000000.tmp").write_bytes(b"PAR1")
    published(folder, "p8", [build("r09")])
    folder.remove(f"{DATA}/p8.parquet")
    published(folder, "p9", [build("r10")])
    folder.path(f"{DATA}/p9.parquet").write_bytes(folder.read(f"{DATA}/p9.parquet")[:-9])
    shutil.copy(folder.path(f"{DATA}/p2.parquet"), folder.path(f"{DATA}/copy.parquet"))
    write_foreign(folder, f"{DATA}/foreign.parquet")
    folder.append_line(MANIFEST_FILE, b'{"event": "part", "name": "p')


def recovering(folder: Folder, build: Build) -> None:
    recovered(folder)


def before_taking_back(folder: Folder, build: Build) -> None:
    before_publishing(folder, build)
    published(folder, "p2", [build("r02", error=True), build("r03", error=True)])
    published(folder, "p3", [build("r04"), build("r05")])
    published(folder, "p4", [build("r06", error=True), build("r07"), build("r08")])


def taking_back(folder: Folder, build: Build) -> None:
    taken_back(folder)


Step = Callable[[LocalFolder, Build], None]
STEPS: dict[str, tuple[Step, Step, int]] = {
    "publish": (before_publishing, publishing, 10),
    "recover": (before_recovering, recovering, 16),
    "take back errors": (before_taking_back, taking_back, 10),
}
"""What stands before, what crashes, and how many times that changes the disk."""


@pytest.mark.parametrize("act", STEPS)
def test_every_step_that_changes_the_disk_is_crashed(
    tmp_path: Path, completion: Build, act: str
) -> None:
    prepare, work, num_steps = STEPS[act]
    prepare(fresh(tmp_path), completion)
    folder = CrashingFolder(tmp_path)
    work(folder, completion)
    assert len(folder.changes) == num_steps, folder.changes


@pytest.mark.parametrize("when", ["before", "half", "after"])
@pytest.mark.parametrize(
    ("act", "step"), [(act, step + 1) for act in STEPS for step in range(STEPS[act][2])]
)
def test_crash_loses_nothing_and_doubles_nothing(
    tmp_path: Path, completion: Build, act: str, step: int, when: When
) -> None:
    prepare, work, _ = STEPS[act]
    prepare(fresh(tmp_path), completion)
    crashing = CrashingFolder(tmp_path, crash_at=step, when=when)
    safe = safe_rows(crashing, is_messy=act == "recover")
    with pytest.raises(CrashError):
        work(crashing, completion)
    folder = LocalFolder(tmp_path)
    if act != "recover":
        # What `recover` is handed here is what readers see meanwhile: whole parts, each row once.
        ids = visible_ids(folder)
        assert len(set(ids)) == len(ids)
        assert safe <= {row["row_id"] for row in visible(folder) if row["status"] == "ok"}
    if act == "publish":
        assert set(run_record.read_manifest(folder).parts) <= set(folder.names(DATA))
    recovery = recovered(folder)
    assert_in_order(folder)
    assert sorted(row_id for part in recovery.parts for row_id in part.row_ids) == visible_ids(
        folder
    )
    assert safe <= {row["row_id"] for row in visible(folder) if row["status"] == "ok"}
    assert set(recovered(folder).parts) == set(recovery.parts), "a second look changes nothing"
    finish(folder, completion)
    assert_in_order(folder)
    assert visible_ids(folder) == EXPECTED
    assert {row["status"] for row in visible(folder)} == {"ok"}
    assert pq.read_table(folder.path(DATA)).num_rows == len(EXPECTED)


def safe_rows(folder: Folder, *, is_messy: bool) -> set[str]:
    """Rows with a completion that were published, or staged whole, before the crash."""
    if is_messy:
        return {"r00", "r02", "r03", "r04", "r06"}
    return {str(row["row_id"]) for row in visible(folder) if row["status"] == "ok"}


def finish(folder: Folder, build: Build) -> None:
    """Resume with `--retry-errors` and do all that is open."""
    done = {row_id for part in taken_back(folder) for row_id in part.row_ids}
    rows = [build(row_id) for row_id in EXPECTED if row_id not in done]
    published(folder, "last", rows)


def test_published_row_outlives_a_crash_that_follows(tmp_path: Path, completion: Build) -> None:
    """In `publishing` each part is published before the next step; those steps lose none."""
    for step in range(1, STEPS["publish"][2] + 1):
        path = tmp_path / str(step)
        before_publishing(fresh(path), completion)
        crashing = CrashingFolder(path, crash_at=step, when="before")
        with pytest.raises(CrashError):
            publishing(crashing, completion)
        expected = {"r00"} | ({"r02", "r03"} if step > 3 else set())
        expected |= {"r04"} if step > 4 else set()
        expected |= {"r06"} if step > 9 else set()
        recovered(LocalFolder(path))
        assert expected <= set(visible_ids(LocalFolder(path))), step


def test_readers_can_load_the_data_set_during_a_run(
    tmp_path: Path, completion: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the library tells its hub of each load, and waits for it where there is no network.
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", False)
    folder = fresh(tmp_path / "run")
    published(folder, "p1", [completion("a"), completion("b", error=True)])
    published(folder, "p2", [completion("c", turns=(FULL_TURN,))])
    staged(folder, "p3", [completion("d")])
    loaded = datasets.load_dataset(
        "parquet",
        data_dir=str(folder.path(DATA)),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert sorted(loaded["row_id"]) == ["a", "b", "c"]


def test_engines_that_ran_are_listed_in_the_manifest(tmp_path: Path) -> None:
    folder = fresh(tmp_path)
    ran = EngineRun(
        worker_id="w0",
        engine="sglang",
        release="sglang 0.5.23",
        plan="--mem-fraction-static 0.86",
        max_running_requests=31,
        ready_at_s=5.0,
    )
    run_record.list_in_manifest(folder, ran)
    manifest = run_record.read_manifest(folder)
    assert manifest.engines == [ran]
    assert not manifest.unreadable_lines
