"""External sort of an export: rows are scattered over bucket files, which are then read in order.

A bucket is a range of ranks, small enough to be sorted in memory, in a file on the local disk.
Invariant: the marker of a group of buckets is written once all its rows are in their files, so an
interrupted export repeats a whole group or none of it.
"""

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import ConfigError
from pipeline.export.index import KEPT, ExportSource, Index
from pipeline.store.folder import replacing
from schemas.export import ExportOptions
from schemas.units import MIB

# Exported rows in one bucket; sorting it uses two or three times as much memory.
_BUCKET_BYTES = 32 * MIB
# Rows that are sorted and dealt out together, so that a bucket gets several at once; sorting uses
# three times as much memory.
_CHUNK_BYTES = 32 * MIB
# Parts, and rows of each, from which the size of a row is estimated.
_SAMPLED_PARTS, _SAMPLED_ROWS = 64, 64
# One open file per bucket; by default a process may have 1,024.
_MAX_OPEN_BUCKETS = 400
# Rows read at once: the smaller of the two.
_BATCH_ROWS, _BATCH_BYTES = 256, 32 * MIB
# Column of the rank in bucket files; carried columns may have any name.
_RANK = "__export_rank__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive ranks within one split."""

    number: int
    split: str
    first_rank: int
    stop_rank: int


def cut_buckets(index: Index, options: ExportOptions, bytes_per_row: int) -> list[Bucket]:
    """Cut each split's ranks into buckets of about `_BUCKET_BYTES`."""
    rows_per_bucket = max(
        1, min(_BUCKET_BYTES, options.file_bytes or _BUCKET_BYTES) // bytes_per_row
    )
    buckets: list[Bucket] = []
    for number, (split, _) in enumerate(options.splits):
        start, stop = index.split_starts[number], index.split_starts[number + 1]
        for first in range(start, stop, rows_per_bucket):
            last = min(first + rows_per_bucket, stop)
            buckets.append(
                Bucket(number=len(buckets), split=split, first_rank=first, stop_rank=last)
            )
    return buckets


def estimated_row_bytes(source: ExportSource, index: Index) -> int:
    """Mean size of exported rows, estimated from the first rows of some parts."""
    unchecked, first_row, num_bytes, num_rows = replace(source.form, decode=None), 0, 0, 0
    step = max(1, len(source.parts) // _SAMPLED_PARTS)
    for number, part in enumerate(source.parts):
        if number % step == 0:
            batch = next(source.batches_of(part, _SAMPLED_ROWS), None)
            places = range(batch.num_rows) if batch else ()
            kept = [place for place in places if index.reasons[first_row + place] == KEPT]
            if batch is not None and kept:
                num_bytes += unchecked.convert(batch.take(pa.array(kept, pa.int32())))[0].nbytes
                num_rows += len(kept)
        first_row += part.num_rows
    return max(1, num_bytes // max(1, num_rows))


def groups_of(buckets: Sequence[Bucket]) -> list[Sequence[Bucket]]:
    """Groups of buckets that may be open at once; each group is one pass over the parts."""
    starts = range(0, len(buckets), _MAX_OPEN_BUCKETS)
    return [buckets[start : start + _MAX_OPEN_BUCKETS] for start in starts]


# -- scatter


def scatter(
    source: ExportSource, index: Index, group: Sequence[Bucket], scratch: Path, bytes_per_row: int
) -> list[Bucket]:
    """Write the group's rows to its bucket files, unless that is done, and return those filled.

    Rows that have no exported form are dropped from the index.
    """
    marker = scratch / f"scattered-{group[0].number:06d}.json"
    if not marker.exists():
        batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // bytes_per_row))
        scattered = _scatter_rows(source, index, group, scratch, batch_rows)
        with replacing(marker) as file:
            file.write(json.dumps(scattered).encode())
    scattered = json.loads(marker.read_text())
    for row, reason in scattered["left_out"]:
        index.drop(row, reason)
    return [bucket for bucket in group if bucket.number in scattered["filled"]]


def _scatter_rows(
    source: ExportSource, index: Index, group: Sequence[Bucket], scratch: Path, batch_rows: int
) -> dict[str, object]:
    left_out: list[tuple[int, str]] = []
    writers: dict[int, Any] = {}
    with ExitStack() as stack:
        for chunk in _sorted_chunks(_converted(source, index, group, batch_rows, left_out)):
            for number, rows in _by_bucket(chunk, group):
                if number not in writers:
                    opened = _bucket_writer(_bucket_file(scratch, number), rows.schema)
                    writers[number] = stack.enter_context(opened)
                writers[number].write_table(rows)
    return {"left_out": left_out, "filled": sorted(writers)}


@contextmanager
def _bucket_writer(path: Path, schema: pa.Schema) -> Iterator[Any]:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, schema, options=options) as writer,
    ):
        yield writer


def _converted(
    source: ExportSource,
    index: Index,
    group: Sequence[Bucket],
    batch_rows: int,
    left_out: list[tuple[int, str]],
) -> Iterator[pa.Table]:
    """Yield the group's rows in exported form with their ranks; the others go to `left_out`."""
    first_rank, stop_rank = group[0].first_rank, group[-1].stop_rank
    for first_row, batch in source.batches(batch_rows):
        chosen = [
            place
            for place in range(batch.num_rows)
            if index.reasons[first_row + place] == KEPT
            and first_rank <= index.rank[first_row + place] < stop_rank
        ]
        if not chosen:
            continue
        if len(chosen) < batch.num_rows:
            batch = batch.take(pa.array(chosen, pa.int32()))
        turns_kept = [index.turns_kept[first_row + place] for place in chosen]
        converted, places, faults = source.form.convert(batch, turns_kept)
        left_out += [(first_row + chosen[place], reason) for place, reason in faults]
        ranks = [index.rank[first_row + chosen[place]] for place in places.to_pylist()]
        yield converted.append_column(_RANK, pa.array(ranks, pa.int64()))


def _sorted_chunks(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Concatenate tables to chunks of about `_CHUNK_BYTES`, each sorted by rank."""
    waiting: list[pa.Table] = []
    num_bytes = 0
    for table in tables:
        waiting.append(table)
        num_bytes += table.nbytes
        if num_bytes >= _CHUNK_BYTES:
            chunk = _by_rank(pa.concat_tables(waiting))
            waiting, num_bytes = [], 0
            yield chunk
    if waiting:
        yield _by_rank(pa.concat_tables(waiting))


def _by_rank(table: pa.Table) -> pa.Table:
    # A stable sort: the turns of a row have the same rank and keep their order.
    order = pc.sort_indices(table[_RANK])
    return table.combine_chunks().take(order)


def _by_bucket(chunk: pa.Table, group: Sequence[Bucket]) -> Iterator[tuple[int, pa.Table]]:
    """Cut a sorted chunk into bucket numbers and their rows."""
    ranks = array("q", chunk[_RANK].to_pylist())
    for bucket in group:
        start, stop = bisect_left(ranks, bucket.first_rank), bisect_left(ranks, bucket.stop_rank)
        if start < stop:
            yield bucket.number, chunk.slice(start, stop - start)


# -- bucket files


def bucket_schema(scratch: Path, number: int) -> pa.Schema:
    """Schema of the exported rows."""
    with _opened_bucket(scratch, number) as reader:
        schema = reader.schema
    return schema.remove(schema.get_field_index(_RANK))


def sorted_bucket(scratch: Path, number: int) -> pa.Table:
    """Read a bucket's rows in their order."""
    with _opened_bucket(scratch, number) as reader:
        table = reader.read_all()
    return _by_rank(table).drop_columns([_RANK])


def remove_bucket(scratch: Path, number: int) -> None:
    _bucket_file(scratch, number).unlink(missing_ok=True)


@contextmanager
def _opened_bucket(scratch: Path, number: int) -> Iterator[Any]:
    path = _bucket_file(scratch, number)
    try:
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as reader:
            yield reader
    except (pa.ArrowInvalid, OSError) as error:
        # A killed process leaves complete buckets next to their marker; a machine that crashes may
        # not.
        raise ConfigError(
            f"{path}: cannot be read: {error}; remove {scratch} and the files in the destination "
            f"to begin again"
        ) from None


def _bucket_file(scratch: Path, number: int) -> Path:
    return scratch / f"bucket-{number:06d}.arrow"
