"""Export: published parts become the final data set, sorted, split and in files of one size.

Invariant: every published row is in exactly one file or is dropped for a reason; the files are read
back to check it. An interrupted export resumes: filled buckets and finished files stay, and
`export.json` is written last.

Memory use: an index of about 150 bytes per row, one bucket or chunk of rows, and a batch.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.export.buckets import (
    Bucket,
    bucket_schema,
    cut_buckets,
    estimated_row_bytes,
    groups_of,
    remove_bucket,
    scatter,
    sorted_bucket,
)
from pipeline.export.files import DataFiles, data_files
from pipeline.export.index import ExportSource, Index, index_rows
from pipeline.export.rows import RowForm
from pipeline.store.folder import replacing
from pipeline.store.object_store import Store
from pipeline.untrusted.parsing import UNREADABLE
from schemas.export import ExportedFile, ExportOptions, ExportRecord

CARD_FILE, RECORD_FILE, DROPPED_FILE = "README.md", "export.json", "dropped.jsonl"

# Files that a store leaves behind when their writer is killed.
_TEMPORARY = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{8}\.tmp")
# An export that another version began is not resumed.
_SCRATCH_FORMAT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The store for the data set, and the folder on the local disk in which it is sorted."""

    store: Store
    scratch: Path

    def remedy(self) -> str:
        return f"remove {self.store.where} and {self.scratch} to begin again"


def export(
    source: ExportSource,
    options: ExportOptions,
    destination: Destination,
    log: Callable[[str], None],
) -> ExportRecord:
    """Write all files of the data set but the card and the record, which `commit` writes.

    Rows that are not in the input follow the others. Raises ConfigError when the destination has
    other files, or when what was written is not what was published.
    """
    fingerprint = _fingerprint(source, options)
    finished = _finished_record(destination.store, fingerprint)
    if finished is not None:
        # A process that ends between the record and this leaves the scratch behind.
        shutil.rmtree(destination.scratch, ignore_errors=True)
        log("event=nothing_to_do this export is complete already")
        return finished
    _prepare(destination, fingerprint)
    index = index_rows(source, options)
    dropped = json.dumps(index.dropped(), separators=(",", ":"))
    log(f"event=indexed rows={index.num_rows} dropped={dropped}")
    bytes_per_row = estimated_row_bytes(source, index)
    buckets = cut_buckets(index, options, bytes_per_row)
    files = _read_journal(destination)
    for group in groups_of(buckets):
        filled = scatter(source, index, group, destination.scratch, bytes_per_row)
        log(f"event=scattered buckets={group[-1].number + 1} of={len(buckets)}")
        files = _write_files(filled, files, destination, options, log)
    if not files:
        shutil.rmtree(destination.scratch, ignore_errors=True)
        reasons = ", ".join(f"{count:,} {why}" for why, count in sorted(index.dropped().items()))
        raise ConfigError(
            f"{source.folder.where}: no row is left to export; dropped: {reasons or 'none'}"
        )
    _check_written(index, files, destination, source.form, data_files(options))
    destination.store.write_whole(DROPPED_FILE, b"".join(_dropped_lines(index)))
    return ExportRecord(
        fingerprint=fingerprint,
        run_id=source.run.run_id,
        format=options.format,
        rows_published=index.num_rows,
        rows_exported=index.num_rows - sum(index.dropped().values()),
        dropped=index.dropped(),
        files=tuple(files),
        rows_cut=index.num_cut,
    )


def commit(record: ExportRecord, card: str, destination: Destination) -> None:
    """Write the card, then the record that completes the data set; remove the scratch."""
    destination.store.write_whole(CARD_FILE, card.encode())
    destination.store.write_whole(RECORD_FILE, record.to_json().encode())
    shutil.rmtree(destination.scratch, ignore_errors=True)


def _fingerprint(source: ExportSource, options: ExportOptions) -> str:
    listed = [(part.name, part.size_bytes) for part in source.parts]
    text = json.dumps([source.run.run_id, listed, options.deciding()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _finished_record(store: Store, fingerprint: str) -> ExportRecord | None:
    """The record of this export, if it is complete. Raises ConfigError for another export's."""
    if store.size_bytes(RECORD_FILE) is None:
        return None
    try:
        record = ExportRecord.from_json(store.read(RECORD_FILE).decode())
    except UNREADABLE:
        raise ConfigError(f"{store.where}: {RECORD_FILE} is not the record of an export") from None
    if record.fingerprint != fingerprint:
        raise ConfigError(
            f"{store.where}: contains another export, of run {record.run_id} as "
            f"{record.format!r}; give --to another folder"
        )
    return record


def _prepare(destination: Destination, fingerprint: str) -> None:
    """Resume this export if it was interrupted, else begin in an empty destination.

    Raises ConfigError for a destination with files that this export has not written.
    """
    store, marker = destination.store, destination.scratch / "fingerprint"
    names, begun = store.names(), f"{fingerprint} {_SCRATCH_FORMAT}"
    if marker.exists() and marker.read_text() == begun:
        finished = {file.name for file in _read_journal(destination)}
        for name in names:
            is_unfinished = name.startswith("data/") and name not in finished
            if is_unfinished or _TEMPORARY.fullmatch(name):
                store.remove(name)
        return
    if names:
        raise ConfigError(
            f"{store.where}: found {names[0]} there; expected an empty folder, or the same export "
            f"interrupted"
        )
    shutil.rmtree(destination.scratch, ignore_errors=True)
    destination.scratch.mkdir(parents=True)
    with replacing(marker) as file:
        file.write(begun.encode())


# -- files


def _write_files(
    filled: Sequence[Bucket],
    files: list[ExportedFile],
    destination: Destination,
    options: ExportOptions,
    log: Callable[[str], None],
) -> list[ExportedFile]:
    """Append the filled buckets' files to `files`; buckets of finished files are skipped."""
    done = {number for file in files for number in _buckets_of(file)}
    waiting = [bucket for bucket in filled if bucket.number not in done]
    suffix = data_files(options).suffix
    while waiting:
        split = waiting[0].split
        number = sum(file.split == split for file in files)
        name = f"data/{split}-{number:05d}{suffix}"
        buckets = [bucket for bucket in waiting if bucket.split == split]
        file = _write_file(name, buckets, destination, options)
        waiting = [bucket for bucket in waiting if bucket.number > file.last_bucket]
        files = [*files, file]
        _write_journal(destination, files)
        for bucket_number in _buckets_of(file):
            remove_bucket(destination.scratch, bucket_number)
        log(f"event=file_written name={name} rows={file.num_rows} bytes={file.size_bytes}")
    return files


def _buckets_of(file: ExportedFile) -> range:
    return range(file.first_bucket, file.last_bucket + 1)


def _write_file(
    name: str, buckets: Sequence[Bucket], destination: Destination, options: ExportOptions
) -> ExportedFile:
    """Write one file from the first buckets, until it has its size."""
    num_rows, last = 0, buckets[0]
    with (
        destination.store.writing(name) as stream,
        data_files(options).writer(
            stream, bucket_schema(destination.scratch, last.number)
        ) as writer,
    ):
        for bucket in buckets:
            num_rows += _write_bucket(writer, destination.scratch, bucket.number)
            last = bucket
            if options.file_bytes is not None and stream.tell() >= options.file_bytes:
                break
    size_bytes = destination.store.size_bytes(name)
    assert size_bytes is not None
    return ExportedFile(
        name=name,
        split=last.split,
        size_bytes=size_bytes,
        num_rows=num_rows,
        first_bucket=buckets[0].number,
        last_bucket=last.number,
    )


def _write_bucket(writer: Any, scratch: Path, number: int) -> int:  # noqa: ANN401 - pyarrow ships no types
    """Write a bucket's rows and count them; on return no bucket is in memory."""
    table = sorted_bucket(scratch, number)
    writer.write_table(table)
    return int(table.num_rows)


def _write_journal(destination: Destination, files: list[ExportedFile]) -> None:
    with replacing(destination.scratch / "journal.jsonl") as journal:
        journal.write("".join(json.dumps(asdict(file)) + "\n" for file in files).encode())


def _read_journal(destination: Destination) -> list[ExportedFile]:
    """Read the finished files of an interrupted export; each must be as it was written."""
    store, journal = destination.store, destination.scratch / "journal.jsonl"
    if not journal.exists():
        return []
    lines = journal.read_text().split("\n")[:-1]
    files = [ExportedFile(**json.loads(line)) for line in lines]
    changed = [file.name for file in files if store.size_bytes(file.name) != file.size_bytes]
    if changed:
        raise ConfigError(
            f"{store.where}: {changed[0]} is not as this export wrote it; {destination.remedy()}"
        )
    return files


# -- the check


def _check_written(
    index: Index,
    files: list[ExportedFile],
    destination: Destination,
    form: RowForm,
    kind: DataFiles,
) -> None:
    """Check that the files have every kept row once, in its place, and nothing else."""
    where = destination.store.where
    expected_keys = (form.key(row_id, sample) for row_id, sample in index.kept_keys())
    for file in files:
        for key in _written_keys(destination.store, file, form, kind):
            expected = next(expected_keys, None)
            if expected != key:
                raise ConfigError(
                    f"{where}: {file.name} has row {key} where {expected} belongs; "
                    f"{destination.remedy()}"
                )
    missing = next(expected_keys, None)
    if missing is not None:
        raise ConfigError(f"{where}: row {missing} was not written; {destination.remedy()}")


def _written_keys(
    store: Store, file: ExportedFile, form: RowForm, kind: DataFiles
) -> Iterator[tuple[object, ...]]:
    """Read the keys of a file's rows; the turns of a row count once."""
    with store.open_input(file.name) as stream:
        for row in kind.rows(stream, form.key_columns):
            key = form.written_key(row)
            if key is not None:
                yield key


def _dropped_lines(index: Index) -> Iterator[bytes]:
    for row_id, sample_index, reason in index.dropped_keys():
        yield _named_line(row_id, sample_index, {"reason": reason})
    for row_id, sample_index, kept in index.cut_keys():
        yield _named_line(row_id, sample_index, {"reason": "cut_to_max_tokens", "turns_kept": kept})


def _named_line(row_id: str, sample_index: int, values: dict[str, object]) -> bytes:
    named = {"row_id": row_id, "sample_index": sample_index, **values}
    return json.dumps(named, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
