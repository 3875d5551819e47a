"""Published rows: marked in the input, and taken back to be generated again."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.dataset import parts as run_parts
from pipeline.dataset.done_rows import DoneRows, RowsToRedo, take_back
from pipeline.store.run_folder import DATA
from tests.fakes.output_folder import (
    FULL_TURN,
    RECORD,
    Build,
    assert_in_order,
    fresh,
    published,
    recovered,
    staged,
    taken_back,
    visible,
    visible_ids,
)

# -- rows taken back


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


def test_only_flagged_rows_of_the_input_are_taken_back(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    turn = completion("a").turns[0]
    rows = [
        completion("a", flags=("looping", "too_short"), turns=(turn, turn)),
        completion("b", flags=("too_short",), turns=(turn, turn)),
        completion("c", error=True),
        completion("d", flags=("looping",)),
    ]
    published(folder, "p1", rows)
    untouched = published(folder, "p2", [completion("e", flags=("too_short",))])
    parts = recovered(folder).parts
    redo = RowsToRedo(
        row_ids=pa.array(["a", "b", "c", "e"]), errors=False, flags=frozenset({"looping"})
    )
    first, second = take_back(folder, RECORD, parts, redo, now_s=4.0)
    assert second == untouched
    # d is flagged and not in the input; c is an error row, and those were not asked for.
    assert first.row_ids == ("b", "c", "d")
    assert (first.num_errors, first.num_turns) == (1, 3)
    assert first.flag_counts == (("looping", 1), ("too_short", 1))
    # Each turn has 5 and 3 tokens.
    assert (first.prompt_tokens, first.completion_tokens) == (15, 9)
    assert (first.published_at_s, first.worker_id) == (4.0, "w0")
    assert_in_order(folder)


def test_flags_of_error_rows_are_not_counted(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    rows = [completion("a", flags=("looping",)), completion("b", error=True, flags=("looping",))]
    assert staged(folder, "p1", rows).flag_counts == (("looping", 1),)


def test_part_without_rows_to_redo_is_not_read(tmp_path: Path, completion: Build) -> None:
    folder = fresh(tmp_path)
    part = published(folder, "p1", [completion("a", flags=("too_short",))])
    folder.remove(f"{DATA}/p1.parquet")
    redo = RowsToRedo(row_ids=pa.array(["a"]), flags=frozenset({"looping"}))
    assert take_back(folder, RECORD, [part], redo, now_s=4.0) == (part,)


# -- rows that are done


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
