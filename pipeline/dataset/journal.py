"""Journals: finished rows that are durable at once, and become parts later.

Invariant: a worker alone appends to its journals, in `staging/`. A journal's rows are published as
one part, under the name that goes with the journal's, by its worker, by the coordinator once that
worker is lost, or by the next session's recovery. Each of them skips rows that are published or no
longer the worker's, and removes the journal last, so that a crash anywhere loses no row and
publishes none twice.

A record is an Arrow stream with the rows of one commit: the columns of the part, and the lease and
number of each row, which mean something in the session that wrote them. On a file system a journal
is one file, and a crash costs what finished since the last commit, at most a second before. In an
object store each commit is an object; commits are ten seconds apart.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import pyarrow as pa

from pipeline.dataset.columns import completion_table
from pipeline.dataset.parts import stage_tables
from pipeline.store.folder import Folder
from pipeline.store.run_folder import STAGING
from schemas.completion import Completion
from schemas.manifest import Part
from schemas.shard import LeaseKey
from schemas.units import MIB

LeasedRow = tuple[LeaseKey, int]
"""A row's lease and number."""
JournalKind = Literal["canary", "rows"]

_METADATA_KEY = b"regenerate.journal"
_LEASE_COLUMNS = ("lease_shard", "lease_attempt", "row_number")
_NAME = re.compile(r"journal-(?P<session>[^-]+)-(?P<worker>.+)-(?P<number>\d+)-(?P<kind>\w+)")
# Several row groups of a part, so that writing and reading one need little memory.
_GROUP_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalName:
    """Name of a journal in `staging/`."""

    session_id: str
    worker_id: str
    number: int
    kind: JournalKind

    @classmethod
    def parsed(cls, name: str) -> "JournalName | None":
        """Parse a file's name; None when it is not a journal's."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(
            session_id=match["session"],
            worker_id=match["worker"],
            number=int(match["number"]),
            kind="canary" if match["kind"] == "canary" else "rows",
        )

    def __str__(self) -> str:
        return f"journal-{self.session_id}-{self.worker_id}-{self.number:06d}-{self.kind}"

    @property
    def path(self) -> str:
        return f"{STAGING}/{self}"

    @property
    def part(self) -> str:
        """Name of the part that its rows become."""
        return f"part-{self.session_id}-{self.worker_id}-{self.number:06d}.parquet"


def journals_in(folder: Folder) -> list[JournalName]:
    """List the journals in `staging/`."""
    names = (JournalName.parsed(name) for name in folder.names(STAGING))
    return [name for name in names if name is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Journals:
    """Journals of one run, as they are read and become parts."""

    folder: Folder
    run_id: str

    def leased_rows(self, name: JournalName) -> list[LeasedRow]:
        """List the leases and numbers of a journal's rows, in order."""
        leased: list[LeasedRow] = []
        for table in self._tables(name):
            columns = (table[column].to_pylist() for column in _LEASE_COLUMNS)
            leased += [
                (LeaseKey(shard_id=shard, attempt=attempt), row)
                for shard, attempt, row in zip(*columns, strict=True)
            ]
        return leased

    def stage(self, name: JournalName, *, without: Collection[int] = ()) -> Part | None:
        """Stage a journal's rows as a part, except those at some positions; None without rows."""
        groups = _grouped(self._rest(name, frozenset(without)))
        first = next(groups, None)
        if first is None:
            return None
        return stage_tables(
            self.folder,
            name.part,
            chain([first], groups),
            run_id=self.run_id,
            worker_id=name.worker_id,
        )

    def row_keys(self, name: JournalName) -> list[tuple[str, int]]:
        """List row ids and sample indexes of a journal's rows, in order.

        Raises ValueError for a journal of another run.
        """
        keys: list[tuple[str, int]] = []
        for table in self._tables(name):
            footer = json.loads((table.schema.metadata or {}).get(_METADATA_KEY, b"{}"))
            if footer.get("run_id") != self.run_id:
                raise ValueError("belongs to another run")
            keys += zip(table["row_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
        return keys

    def remove(self, name: JournalName) -> None:
        self.folder.remove_records(name.path)

    def _rest(self, name: JournalName, dropped: frozenset[int]) -> Iterator[pa.Table]:
        """Yield the rows of a part, without those at the positions that are dropped."""
        start = 0
        for table in self._tables(name):
            positions = range(start, start + table.num_rows)
            start = positions.stop
            rest = table.drop_columns(list(_LEASE_COLUMNS)).replace_schema_metadata(None)
            if not dropped.isdisjoint(positions):
                rest = rest.filter(pa.array([number not in dropped for number in positions]))
            if rest.num_rows:
                yield rest

    def _tables(self, name: JournalName) -> Iterator[pa.Table]:
        for record in self.folder.read_records(name.path):
            yield pa.ipc.open_stream(record).read_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalWriter:
    """Writer of one worker's journals, with the columns of the run's rows."""

    journals: Journals
    own_schema: pa.Schema
    carried_schema: pa.Schema

    def append(
        self, name: JournalName, completions: Sequence[Completion], leased: Sequence[LeasedRow]
    ) -> int:
        """Append rows, which are durable when this returns. Return their size in bytes."""
        table = completion_table(completions, self.carried_schema, self.own_schema)
        for column, values in zip(_LEASE_COLUMNS, _lease_columns(leased), strict=True):
            table = table.append_column(column, pa.array(values, pa.int64()))
        metadata = {_METADATA_KEY: json.dumps({"run_id": self.journals.run_id}).encode()}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.replace_schema_metadata(metadata).schema) as writer:
            writer.write_table(table)
        record = memoryview(sink.getvalue())
        self.journals.folder.append_record(name.path, record)
        return len(record)


def _lease_columns(leased: Sequence[LeasedRow]) -> tuple[list[int], list[int], list[int]]:
    shards = [key.shard_id for key, _ in leased]
    return shards, [key.attempt for key, _ in leased], [row for _, row in leased]


def _grouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join tables until each is large enough for a row group."""
    waiting: list[pa.Table] = []
    size_bytes = 0
    for table in tables:
        waiting.append(table)
        size_bytes += table.nbytes
        if size_bytes >= _GROUP_BYTES:
            yield pa.concat_tables(waiting).combine_chunks()
            waiting, size_bytes = [], 0
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()
