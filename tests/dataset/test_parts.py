"""Parts: a staged part is complete and invisible, a published one is listed with its rows."""

import dataclasses
from array import array
from datetime import UTC, datetime
from pathlib import Path
from types import GenericAlias
from typing import Literal, Union, get_args, get_origin, get_type_hints

import datasets
import pyarrow as pa
import pytest

from pipeline.dataset import parts as run_parts
from pipeline.dataset import run_record
from pipeline.dataset.columns import completion_table
from pipeline.dataset.frozen import schema_text
from pipeline.errors import ResumeError
from pipeline.store.run_folder import DATA, STAGING
from schemas.completion import COMPLETION_SCHEMA, Completion, Turn
from schemas.manifest import RunIdentity, RunRecord
from schemas.partial import Continuation
from schemas.prompt import Message, SamplingParams
from tests.fakes.example_completion import COMPLETION
from tests.fakes.output_folder import (
    FULL_TURN,
    Build,
    assert_in_order,
    fresh,
    published,
    recovered,
    staged,
    visible,
)
from tests.fakes.staged_part import stage_part

RECORDS = {"messages": Message, "turns": Turn, "sampling": SamplingParams}


def arrow_field(name: str, hint: object) -> pa.Field:
    """The column that a field of a record has to be, but for the width of its numbers."""
    choices = get_args(hint) if get_origin(hint) in (Union, type(int | None)) else (hint,)
    inner = next(choice for choice in choices if choice is not type(None))
    return pa.field(name, arrow_type(inner), nullable=type(None) in choices)


def arrow_type(hint: object) -> pa.DataType:
    if hint is array:
        return pa.list_(pa.int64())
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
    table = completion_table(rows, columns)
    assert table.column_names == [*COMPLETION_SCHEMA.names, "category", "level"]
    assert table.schema.field("level").type == pa.int32()
    assert table["category"].to_pylist() == ["math", None]
    assert table["level"].to_pylist() == [3, None]


def test_carried_value_that_is_no_text_is_kept_as_json_in_a_text_column(completion: Build) -> None:
    columns = pa.schema([("category", pa.string())])
    rows = [completion("a", carried={"category": {"größe": 3}})]
    assert completion_table(rows, columns)["category"].to_pylist() == ['{"größe": 3}']


def test_carried_value_of_another_type_names_its_column(completion: Build) -> None:
    columns = pa.schema([("level", pa.int32())])
    with pytest.raises(ResumeError, match=r"prompts\.keep_columns: 'level' .* not int32"):
        completion_table([completion("a", carried={"level": "high"})], columns)


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
        completion_table([completion("a", carried={"level": value})], pa.schema([("level", kind)]))


def test_parts_of_one_run_keep_the_columns_of_its_first_release(
    tmp_path: Path, completion: Build
) -> None:
    folder = fresh(tmp_path)
    fewer = pa.schema([f for f in COMPLETION_SCHEMA if f.name not in ("plan", "messages")])
    stage_part(
        folder, "p1.parquet", [completion("a")], run_id="r", carried_schema=pa.schema([]),
        worker_id="w0", own_schema=fewer,
    )  # fmt: skip
    record = RunRecord(
        run_id="r", created_at_s=0, identity=RunIdentity(settings={}), carried_schema="",
        columns=tuple(fewer.names),
    )  # fmt: skip
    found = run_parts.own_schema_of(folder, record)
    assert found == fewer
    recorded = dataclasses.replace(record, own_schema=schema_text(found), run_id="another")
    assert run_parts.own_schema_of(folder, recorded) == fewer
    assert completion_table([completion("b")], pa.schema([]), found).schema == fewer


def test_run_without_parts_gets_the_columns_of_this_release(
    tmp_path: Path, completion: Build
) -> None:
    folder = fresh(tmp_path)
    kept = schema_text(pa.schema([("tools", pa.string()), ("level", pa.int32())]))
    record = RunRecord(
        run_id="r", created_at_s=0, identity=RunIdentity(settings={}), carried_schema=kept
    )
    published(folder, "of-another-run", [completion("a")])
    # A kept column takes the place of an optional one.
    expected = [name for name in COMPLETION_SCHEMA.names if name != "tools"]
    assert run_parts.own_schema_of(folder, record).names == expected


# -- one part


def test_completion_comes_back_as_it_was(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    row = completion(
        "ид-1",
        sample_index=2,
        turns=(
            FULL_TURN,
            dataclasses.replace(FULL_TURN, prompt_token_ids=array("i"), reasoning_text=None),
        ),
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


def test_example_has_no_flag_where_a_row_has_none(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    published(folder, "p1", [completion("flagged", flags=("looping",)), completion("clean")])
    published(folder, "p2", [completion("latest", flags=("looping",))])
    example = run_parts.example_completion(folder)
    assert example is not None
    assert example["row_id"] == "clean"


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


def test_run_of_an_earlier_release_goes_on_without_the_places_of_continuation() -> None:
    turns = COMPLETION_SCHEMA.field("turns").type.value_type
    older = pa.struct([field for field in turns if field.name != "continued"])
    index = COMPLETION_SCHEMA.get_field_index("turns")
    schema = COMPLETION_SCHEMA.set(index, pa.field("turns", pa.list_(older), nullable=False))
    turn = dataclasses.replace(FULL_TURN, continued=(Continuation(at_token=3, worker_id="w"),))
    row = dataclasses.replace(COMPLETION, turns=(turn,))
    table = completion_table([row], pa.schema([]), schema)
    assert table.schema == schema
    counts = run_parts._Counts()
    counts.add(table)
    assert (counts.num_turns, counts.tokens_saved) == (1, 0)
    counts.add(completion_table([row], pa.schema([])))
    assert counts.tokens_saved == 3
