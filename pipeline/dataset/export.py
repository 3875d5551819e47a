"""Published parts → the final data set: sorted, split, in files of one size. Bounded in memory.

Invariant: every published row is in exactly one file or is dropped for a reason, and the files are
read back to make sure. Rows are sorted by scattering them over buckets on the local disk, each
small enough to be sorted in memory, and gathering the buckets in order. A broken-off export goes on
where it was: scattered buckets and finished files stay, and `export.json` comes last.

Memory holds an index of some 150 bytes a row, one bucket or one heap of rows, and a batch.
"""

import hashlib
import json
import os
import re
import shutil
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.dataset.export_index import KEPT, Index, index_rows
from pipeline.dataset.export_rows import KEY_COLUMNS, RowForm
from pipeline.errors import ConfigError
from pipeline.store.folder import Folder
from pipeline.store.object_store import Store
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA
from schemas.export import ExportedFile, ExportOptions, ExportRecord
from schemas.manifest import Part

RECORD_FILE, DROPPED_FILE = "export.json", "dropped.jsonl"

_TEMPORARY = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{8}\.tmp")
# What a store leaves behind of a file whose writer was killed.

_BUCKET_BYTES = 32 * 2**20
# Of rows as they go out; sorting holds a bucket two or three times.
_HEAP_BYTES = 32 * 2**20
# Of rows that are dealt out to the buckets together, so that each gets a few at once; held three
# times while they are sorted.
_SAMPLED_PARTS, _SAMPLED_ROWS = 64, 64
# Parts, and rows of each, that tell how many bytes a row takes.
_MOST_OPEN_BUCKETS = 400
# A writer each; of the 1,024 files that a process may have open by default.
_BATCH_ROWS, _BATCH_BYTES = 256, 32 * 2**20
# Read at once, whichever is less.
_READ_BUFFER_BYTES = 2**20
_SCRATCH_FORMAT = 2
# What another release has begun is not gone on with.
_RANK = "__export_rank__"
# Beside kept columns, which bear any name; not in the files.


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Neighbours in the order of the output, of one split."""

    number: int
    split: str
    first_rank: int
    stop_rank: int


def export(
    folder: Folder,
    parts: Sequence[Part],
    input_ids: Iterable[pa.Array],
    *,
    run_id: str,
    form: RowForm,
    options: ExportOptions,
    store: Store,
    scratch: Path,
    log: Callable[[str], None],
) -> ExportRecord:
    """`input_ids` are the input's row ids in order; rows that the input lacks come after them.

    Raises ConfigError when the destination holds something else, or when what was written is not
    what was published.
    """
    fingerprint = _fingerprint(run_id, parts, options)
    standing = _standing_record(store, fingerprint)
    if standing is not None:
        # An end between the record and this leaves it behind.
        shutil.rmtree(scratch, ignore_errors=True)
        log("event=nothing_to_do this export is whole already")
        return standing
    _prepare(scratch, store, fingerprint)
    index = index_rows(folder, parts, input_ids, options)
    log(f"event=indexed rows={index.num_rows} dropped={json.dumps(index.dropped())}")
    bytes_per_row = _bytes_per_row(index, folder, form)
    buckets = _buckets(index, options, bytes_per_row)
    batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // bytes_per_row))
    files = _read_journal(scratch, store)
    for group in _groups(buckets):
        filled = _scatter(folder, index, group, form, batch_rows, scratch)
        log(f"event=scattered buckets={group[-1].number + 1} of={len(buckets)}")
        files = _gather(filled, files, store, scratch, options, log)
    if not files:
        shutil.rmtree(scratch, ignore_errors=True)
        reasons = ", ".join(f"{count:,} {why}" for why, count in sorted(index.dropped().items()))
        raise ConfigError(f"{folder.where}: no row is left to export; dropped: {reasons or 'none'}")
    _check_written(index, files, store, form, scratch)
    record = ExportRecord(
        fingerprint=fingerprint,
        run_id=run_id,
        format=options.format,
        rows_published=index.num_rows,
        rows_exported=index.num_rows - sum(index.dropped().values()),
        dropped=index.dropped(),
        files=tuple(files),
    )
    store.write_whole(DROPPED_FILE, b"".join(_dropped_lines(index)))
    return record


def commit(store: Store, record: ExportRecord, card: str, scratch: Path) -> None:
    """The card, then the record that makes the folder whole; the scratch goes."""
    store.write_whole("README.md", card.encode())
    store.write_whole(RECORD_FILE, record.to_json().encode())
    shutil.rmtree(scratch, ignore_errors=True)


def _fingerprint(run_id: str, parts: Sequence[Part], options: ExportOptions) -> str:
    listed = [(part.name, part.size_bytes) for part in parts]
    text = json.dumps([run_id, listed, asdict(options)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _standing_record(store: Store, fingerprint: str) -> ExportRecord | None:
    """The record of this very export, if it is whole. Raises ConfigError for another's."""
    if store.size_bytes(RECORD_FILE) is None:
        return None
    try:
        record = ExportRecord.from_json(store.read(RECORD_FILE).decode())
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{store.where}: {RECORD_FILE} is no record of an export") from None
    if record.fingerprint != fingerprint:
        raise ConfigError(
            f"{store.where}: holds another export, of run {record.run_id} as "
            f"{record.format!r}; give --to a folder of its own"
        )
    return record


def _prepare(scratch: Path, store: Store, fingerprint: str) -> None:
    """Go on where this export was broken off, or begin in an empty destination.

    Raises ConfigError for a destination that holds files which this export has not written.
    """
    name, found = scratch / "fingerprint", store.names()
    begun = f"{fingerprint} {_SCRATCH_FORMAT}"
    if name.exists() and name.read_text() == begun:
        written = {file.name for file in _read_journal(scratch, store)}
        for half in found:
            is_file_of_rows = half.startswith("data/") and half not in written
            if is_file_of_rows or _TEMPORARY.fullmatch(half):
                store.remove(half)
        return
    if found:
        raise ConfigError(
            f"{store.where}: found {found[0]} there; expected an empty folder, or the same export "
            f"broken off"
        )
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    _write_synced(name, begun)


# -- buckets


def _buckets(index: Index, options: ExportOptions, bytes_per_row: int) -> list[Bucket]:
    """Cut each split's ranks into runs of about `_BUCKET_BYTES`."""
    rows_per_bucket = max(1, min(_BUCKET_BYTES, options.file_bytes) // bytes_per_row)
    buckets: list[Bucket] = []
    for number, (split, _) in enumerate(options.splits):
        start, stop = index.split_starts[number], index.split_starts[number + 1]
        for first in range(start, stop, rows_per_bucket):
            last = min(first + rows_per_bucket, stop)
            buckets.append(
                Bucket(number=len(buckets), split=split, first_rank=first, stop_rank=last)
            )
    return buckets


def _bytes_per_row(index: Index, folder: Folder, form: RowForm) -> int:
    """Of kept rows in the form in which they go out, by the first rows of some parts."""
    unchecked, first_row, num_bytes, num_rows = replace(form, decode=None), 0, 0, 0
    step = max(1, len(index.parts) // _SAMPLED_PARTS)
    for number, part in enumerate(index.parts):
        if number % step == 0:
            batch = next(_part_batches(folder, part, form, _SAMPLED_ROWS), None)
            places = range(batch.num_rows) if batch else ()
            kept = [place for place in places if index.reasons[first_row + place] == KEPT]
            if batch is not None and kept:
                num_bytes += unchecked.convert(batch.take(pa.array(kept, pa.int32())))[0].nbytes
                num_rows += len(kept)
        first_row += part.num_rows
    return max(1, num_bytes // max(1, num_rows))


def _groups(buckets: list[Bucket]) -> list[list[Bucket]]:
    """As many buckets at once as may be open; each group is one pass over the parts."""
    starts = range(0, len(buckets), _MOST_OPEN_BUCKETS)
    return [buckets[start : start + _MOST_OPEN_BUCKETS] for start in starts]


def _scatter(
    folder: Folder,
    index: Index,
    group: list[Bucket],
    form: RowForm,
    batch_rows: int,
    scratch: Path,
) -> list[Bucket]:
    """Write the group's rows to its buckets, once, and return those that got any.

    A marker says that they are all there; it holds the rows that could not be put in form.
    """
    marker = scratch / f"scattered-{group[0].number:06d}.json"
    if marker.exists():
        kept = json.loads(marker.read_text())
        for row, reason in kept["left_out"]:
            index.drop(row, reason)
        return [bucket for bucket in group if bucket.number in kept["filled"]]
    left_out: list[tuple[int, str]] = []
    with ExitStack() as stack:
        writers: dict[int, Any] = {}

        def writer(number: int, schema: pa.Schema) -> Any:  # noqa: ANN401 - pyarrow ships no types
            if number not in writers:
                options = pa.ipc.IpcWriteOptions(compression="lz4")
                opened = pa.OSFile(str(_bucket_file(scratch, number)), "wb")
                stack.callback(opened.close)
                writers[number] = stack.enter_context(
                    pa.ipc.new_stream(opened, schema, options=options)
                )
            return writers[number]

        for heap in _heaps(_converted(folder, index, group, form, batch_rows, left_out)):
            for number, rows in _by_bucket(heap, group):
                writer(number, rows.schema).write_table(rows)
    for row, reason in left_out:
        index.drop(row, reason)
    _write_synced(marker, json.dumps({"left_out": left_out, "filled": sorted(writers)}))
    return [bucket for bucket in group if bucket.number in writers]


def _converted(
    folder: Folder,
    index: Index,
    group: list[Bucket],
    form: RowForm,
    batch_rows: int,
    left_out: list[tuple[int, str]],
) -> Iterator[pa.Table]:
    """The group's rows as they go out, with their ranks; those that do not are noted."""
    first_rank, stop_rank = group[0].first_rank, group[-1].stop_rank
    for first_row, batch in _batches(folder, index.parts, form, batch_rows):
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
        converted, places, faults = form.convert(batch)
        left_out += [(first_row + chosen[place], reason) for place, reason in faults]
        ranks = [index.rank[first_row + chosen[place]] for place in places.to_pylist()]
        yield converted.append_column(_RANK, pa.array(ranks, pa.int64()))


def _heaps(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The tables' rows in heaps of about `_HEAP_BYTES`, by rank."""
    held: list[pa.Table] = []
    num_bytes = 0
    for table in tables:
        held.append(table)
        num_bytes += table.nbytes
        if num_bytes >= _HEAP_BYTES:
            heap = _by_rank(pa.concat_tables(held))
            held, num_bytes = [], 0
            yield heap
    if held:
        yield _by_rank(pa.concat_tables(held))


def _by_rank(table: pa.Table) -> pa.Table:
    """The rows in the order in which they go out, the turns of a row in theirs."""
    # A stable sort: the turns of a row have its rank, and come as they are.
    order = pc.sort_indices(table[_RANK])
    return table.combine_chunks().take(order)


def _by_bucket(heap: pa.Table, group: list[Bucket]) -> Iterator[tuple[int, pa.Table]]:
    """Bucket numbers with their rows of the heap."""
    ranks = array("q", heap[_RANK].to_pylist())
    for bucket in group:
        start, stop = bisect_left(ranks, bucket.first_rank), bisect_left(ranks, bucket.stop_rank)
        if start < stop:
            yield bucket.number, heap.slice(start, stop - start)


def _batches(
    folder: Folder, parts: Sequence[Part], form: RowForm, batch_rows: int
) -> Iterator[tuple[int, pa.Table]]:
    """Every row of the parts in order, a few at a time, with the number of the first."""
    first_row = 0
    for part in parts:
        for batch in _part_batches(folder, part, form, batch_rows):
            yield first_row, batch
            first_row += batch.num_rows


def _part_batches(folder: Folder, part: Part, form: RowForm, num_rows: int) -> Iterator[pa.Table]:
    name = f"{DATA}/{part.name}"
    with opened_parquet(folder, name, pre_buffer=False, buffer_size=_READ_BUFFER_BYTES) as file:
        for batch in file.iter_batches(num_rows, columns=form.read_columns):
            table = pa.Table.from_batches([batch]).select(form.columns)
            yield table.replace_schema_metadata(None)


def _bucket_file(scratch: Path, number: int) -> Path:
    return scratch / f"bucket-{number:06d}.arrow"


# -- files


def _gather(
    filled: list[Bucket],
    files: list[ExportedFile],
    store: Store,
    scratch: Path,
    options: ExportOptions,
    log: Callable[[str], None],
) -> list[ExportedFile]:
    """Sort bucket after bucket into files; those of finished files are passed over."""
    done = {n for f in files for n in range(f.first_bucket, f.last_bucket + 1)}
    waiting = [bucket for bucket in filled if bucket.number not in done]
    while waiting:
        split = waiting[0].split
        number = sum(file.split == split for file in files)
        name = f"data/{split}-{number:05d}.parquet"
        file = _write_file(name, [b for b in waiting if b.split == split], store, scratch, options)
        waiting = [bucket for bucket in waiting if bucket.number > file.last_bucket]
        files = [*files, file]
        lines = (json.dumps(asdict(file)) + "\n" for file in files)
        _write_synced(scratch / "journal.jsonl", "".join(lines))
        for n in range(file.first_bucket, file.last_bucket + 1):
            _bucket_file(scratch, n).unlink(missing_ok=True)
        log(f"event=file_written name={name} rows={file.num_rows} bytes={file.size_bytes}")
    return files


def _write_file(
    name: str, buckets: list[Bucket], store: Store, scratch: Path, options: ExportOptions
) -> ExportedFile:
    """One file from as many buckets as it takes to its size."""
    num_rows, last = 0, buckets[0]
    schema = _bucket_schema(_bucket_file(scratch, last.number))
    with (
        store.writing(name) as stream,
        pq.ParquetWriter(stream, schema, compression="zstd") as writer,
    ):
        for bucket in buckets:
            num_rows += _write_bucket(writer, _bucket_file(scratch, bucket.number))
            last = bucket
            if stream.tell() >= options.file_bytes:
                break
    size_bytes = store.size_bytes(name)
    assert size_bytes is not None
    return ExportedFile(
        name=name,
        split=last.split,
        size_bytes=size_bytes,
        num_rows=num_rows,
        first_bucket=buckets[0].number,
        last_bucket=last.number,
    )


def _write_bucket(writer: Any, path: Path) -> int:  # noqa: ANN401 - pyarrow ships no types
    """The number of its rows. A function of its own, so that one bucket at a time is held."""
    table = _sorted_bucket(path)
    writer.write_table(table)
    return int(table.num_rows)


def _bucket_schema(path: Path) -> pa.Schema:
    with _opened_bucket(path) as reader:
        schema = reader.schema
    return schema.remove(schema.get_field_index(_RANK))


def _sorted_bucket(path: Path) -> pa.Table:
    with _opened_bucket(path) as reader:
        table = reader.read_all()
    return _by_rank(table).drop_columns([_RANK])


@contextmanager
def _opened_bucket(path: Path) -> Iterator[Any]:
    try:
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_stream(file) as reader:
            yield reader
    except (pa.ArrowInvalid, OSError) as error:
        # A killed process leaves whole buckets beside their marker; a machine that goes down may
        # not.
        raise ConfigError(
            f"{path}: cannot be read: {error}; remove {path.parent} and what is in the "
            f"destination to begin again"
        ) from None


def _read_journal(scratch: Path, store: Store) -> list[ExportedFile]:
    """Files of a broken-off export that stand as they were written."""
    journal = scratch / "journal.jsonl"
    if not journal.exists():
        return []
    lines = journal.read_text().split("\n")[:-1]
    files = [ExportedFile(**json.loads(line)) for line in lines]
    gone = [file.name for file in files if store.size_bytes(file.name) != file.size_bytes]
    if gone:
        raise ConfigError(
            f"{store.where}: {gone[0]} is not as this export wrote it; "
            f"{_begin_again(store, scratch)}"
        )
    return files


def _write_synced(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    _append_synced(temporary, text)
    temporary.replace(path)


def _append_synced(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# -- the proof


def _check_written(
    index: Index, files: list[ExportedFile], store: Store, form: RowForm, scratch: Path
) -> None:
    """Every kept row stands in the files once, in its place, and nothing else does."""
    expected = index.kept_keys()
    for file in files:
        for key in _written_keys(store, file, form):
            wanted = next(expected, None)
            if wanted != key:
                raise ConfigError(
                    f"{store.where}: {file.name} holds row {key} where {wanted} belongs; "
                    f"{_begin_again(store, scratch)}"
                )
    missing = next(expected, None)
    if missing is not None:
        raise ConfigError(
            f"{store.where}: row {missing} was not written; {_begin_again(store, scratch)}"
        )


def _begin_again(store: Store, scratch: Path) -> str:
    return f"remove {store.where} and {scratch} to begin again"


def _written_keys(store: Store, file: ExportedFile, form: RowForm) -> Iterator[tuple[str, int]]:
    """As read back; the turns of a row, one behind the other, count once."""
    has_turns = form.format == "tokens"
    with store.open_input(file.name) as stream, pq.ParquetFile(stream) as parquet:
        columns = [*KEY_COLUMNS, *(["turn_index"] if has_turns else [])]
        for batch in parquet.iter_batches(4096, columns=columns):
            for row in batch.to_pylist():
                if not has_turns or row["turn_index"] == 0:
                    yield row["row_id"], row["sample_index"]


def _dropped_lines(index: Index) -> Iterator[bytes]:
    for row_id, sample_index, reason in index.dropped_keys():
        values = {"row_id": row_id, "sample_index": sample_index, "reason": reason}
        yield json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
