"""Output folders of a run with parts of a few rows, and what a reader sees in them."""

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.dataset import parts as run_parts
from pipeline.dataset import run_record
from pipeline.dataset.done_rows import RowsToRedo, take_back
from pipeline.dataset.recovery import Recovery, recover
from pipeline.store.folder import Folder, LocalFolder
from pipeline.store.run_folder import DATA, STAGING
from schemas.completion import Completion, Turn
from schemas.manifest import Part, RunIdentity, RunRecord, Session
from tests.fakes.staged_part import stage_part

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
    return stage_part(
        folder, f"{name}.parquet", rows, run_id=run_id, carried_schema=columns, worker_id="w0"
    )


def published(folder: Folder, name: str, rows: Sequence[Completion]) -> Part:
    return run_parts.publish(folder, staged(folder, name, rows), now_s=2.0)


def recovered(folder: Folder) -> Recovery:
    return recover(folder, RECORD, now_s=3.0)


def visible(folder: Folder) -> list[dict[str, object]]:
    """Rows that a reader sees who globs `data/`, whatever the manifest says."""
    names = [name for name in folder.names(DATA) if name.endswith(".parquet")]
    return [row for name in names for row in table_of(folder, name).to_pylist()]


def table_of(folder: Folder, name: str, columns: list[str] | None = None) -> pa.Table:
    with folder.open_input(f"{DATA}/{name}") as file:
        return pq.ParquetFile(file).read(columns, use_threads=False)


def visible_ids(folder: Folder) -> list[object]:
    names = [name for name in folder.names(DATA) if name.endswith(".parquet")]
    tables = (table_of(folder, name, ["row_id"]) for name in names)
    return sorted(row_id for table in tables for row_id in table["row_id"].to_pylist())


def assert_in_order(folder: Folder) -> None:
    """`data/` holds whole, listed parts and nothing else; what is done is what can be read."""
    parts = run_record.read_manifest(folder).parts
    assert folder.names(DATA) == sorted(parts)
    keys: list[tuple[object, object]] = []
    for name, part in parts.items():
        table = table_of(folder, name, ["row_id", "sample_index", "content_hash", "status"])
        keys += zip(table["row_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
        assert table["row_id"].to_pylist() == list(part.row_ids)
        assert table["sample_index"].to_pylist() == list(part.sample_indexes)
        assert table["content_hash"].to_pylist() == list(part.content_hashes)
        assert table["status"].to_pylist().count("error") == part.num_errors
        assert folder.size_bytes(f"{DATA}/{name}") == part.size_bytes
    assert len(set(keys)) == len(keys)
    assert folder.names(STAGING) == []


FULL_TURN = Turn(
    reasoning_text="  was?\n\nλ → 🦜 \u0000 …",
    answer_text="Zürich, 東京, 🇨🇭\ttab",
    finish_reason="length",
    prompt_tokens=4,
    completion_tokens=3,
    reasoning_tokens=2,
    prompt_token_ids=array("i", [1, 2, 3, 4]),
    completion_token_ids=array("i", [151_643, 0, 9]),
    generation_boundary=4,
    duration_s=1.5,
)


def write_foreign(
    folder: LocalFolder, name: str, metadata: dict[bytes, bytes] | None = None
) -> None:
    table = pa.table({"x": [1]}).replace_schema_metadata(metadata)
    pq.write_table(table, folder.path(name))


def taken_back(folder: Folder) -> tuple[Part, ...]:
    parts = recovered(folder).parts
    row_ids = pa.array([row_id for part in parts for row_id in part.row_ids])
    return take_back(folder, RECORD, parts, RowsToRedo(row_ids=row_ids), now_s=4.0)
