"""Sums over rows: lengths, times, slowest rows and categories."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from pipeline.dataset.parts import publish, stage_part
from pipeline.report.rows import RowFigures, mean, quantile
from pipeline.store.folder import LocalFolder
from schemas.completion import Completion


def test_quantiles_and_mean_of_counts() -> None:
    counts = Counter({10: 5, 20: 4, 1000: 1})
    assert [quantile(counts, share) for share in (0.5, 0.9, 0.95, 1.0)] == [10, 20, 1000, 1000]
    assert mean(counts) == 113
    assert (quantile({}, 0.5), mean({})) == (0, 0.0)


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
    assert (figures.completion, figures.reasoning, figures.answer) == ({3: 1}, {1: 1}, {2: 1})
    assert {name: count.num_rows for name, count in figures.categories.items()} == {
        "x": 1, "(none)": 1, "y": 1
    }  # fmt: skip
    assert figures.categories["y"].flags == {"looping": 1}
    many = [completion(f"m{n}", carried={"kind": f"k{n}"}) for n in range(20)]
    figures.read(staged(tmp_path, "q.parquet", many, carried), ["q.parquet"])
    assert (figures.category_column, figures.categories, figures.num_rows) == (None, {}, 23)


def staged(root: Path, name: str, rows: list[Completion], carried: pa.Schema) -> LocalFolder:
    folder = LocalFolder(root)
    for inner in ("staging", "data"):
        folder.make(inner)
    part = stage_part(folder, name, rows, run_id="r", carried_schema=carried, worker_id="w0")
    publish(folder, part, now_s=1.0)
    return folder
