"""Sums over rows: lengths, times, slowest rows and categories."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from pipeline.dataset.parts import publish
from pipeline.report.rows.figures import RowFigures
from pipeline.store.folder import LocalFolder
from schemas.completion import Completion
from tests.fakes.staged_part import stage_part


def test_error_rows_rows_without_counts_and_many_kinds_are_summed(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    uncounted = replace(
        completion("c").turns[0], completion_tokens=None, reasoning_tokens=None, prompt_tokens=None
    )
    rows = [
        completion("a", carried={"kind": "x"}),
        completion("b", error=True, carried={"kind": None}, flags=()),
        completion("c", turns=(uncounted,), carried={"kind": "y"}, flags=("looping",)),
    ]
    figures, carried = RowFigures(), pa.schema([("kind", pa.string())])
    figures.read(staged(tmp_path, "p.parquet", rows, carried), ["p.parquet", "gone.parquet"])
    assert (figures.num_rows, figures.num_turns, figures.num_unreadable) == (3, 2, 1)
    lengths = (figures.completion, figures.reasoning, figures.answer)
    assert [each.counts for each in lengths] == [{3: 1}, {1: 1}, {2: 1}]
    column, counts = figures.categories.shown() or ("", {})
    assert column == "kind"
    assert {name: count.num_rows for name, count in counts.items()} == {
        "x": 1, "(none)": 1, "y": 1
    }  # fmt: skip
    assert counts["y"].flags == {"looping": 1}
    # The engine counted no tokens of "c", and "b" has no turn.
    assert [counts[name].lengths.counts for name in ("x", "(none)", "y")] == [{3: 1}, {}, {}]
    many = [completion(f"m{n}", carried={"kind": f"k{n}"}) for n in range(20)]
    figures.read(staged(tmp_path, "q.parquet", many, carried), ["q.parquet"])
    assert (figures.categories.shown(), figures.num_rows) == (None, 23)


def staged(root: Path, name: str, rows: list[Completion], carried: pa.Schema) -> LocalFolder:
    folder = LocalFolder(root)
    for inner in ("staging", "data"):
        folder.make(inner)
    part = stage_part(folder, name, rows, run_id="r", carried_schema=carried, worker_id="w0")
    publish(folder, part, now_s=1.0)
    return folder


def test_lengths_of_a_category_are_those_of_whole_rows(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    turn = completion("a").turns[0]
    turns = tuple(replace(turn, completion_tokens=tokens) for tokens in (10, 20))
    rows = [
        completion("none", error=True, carried={"level": 1, "easy": True}),
        completion("two", turns=turns, carried={"level": 1, "easy": True}),
        completion("one", carried={"level": 2, "easy": False}),
    ]
    figures = RowFigures()
    kept = pa.schema([("level", pa.int64()), ("easy", pa.bool_())])
    figures.read(staged(tmp_path, "p.parquet", rows, kept), ["p.parquet"])
    column, counts = figures.categories.shown() or ("", {})
    assert column == "level"
    assert [counts[level].lengths.counts for level in ("1", "2")] == [{30: 1}, {3: 1}]


def test_retries_and_errors_are_counted_at_the_end_of_their_row(
    tmp_path: Path, completion: Callable[..., Completion]
) -> None:
    rows = [
        completion("a", attempt=3, quality_retries=1, finished_at_s=1003.0),
        completion("b", attempt=1, finished_at_s=1003.0),
        completion("c", error=True, attempt=0, finished_at_s=1012.0),
    ]
    figures = RowFigures()
    figures.read(staged(tmp_path, "p.parquet", rows, pa.schema([])), ["p.parquet"])
    assert figures.retries == {1000.0: 3}
    assert figures.errors == {1010.0: 1}
