"""Published rows: mark them as done in the input, and take rows back to be generated again.

Invariant: what is done is a set of (row id, sample index) pairs, never a count or a position. A
row that is taken back leaves the visible parts before it becomes open.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dataset.parts import publish, stage_table, states_and_flags, unlist
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA
from schemas.manifest import Part, RunRecord


@dataclass(slots=True)
class DoneRows:
    """The published rows as Arrow columns: a million rows use tens of megabytes."""

    row_ids: pa.Array
    sample_indexes: pa.Array
    content_hashes: pa.Array

    @classmethod
    def of(cls, parts: Sequence[Part]) -> "DoneRows":
        return cls(
            pa.array([row_id for part in parts for row_id in part.row_ids], pa.string()),
            pa.array([s for part in parts for s in part.sample_indexes], pa.int32()),
            pa.array([h for part in parts for h in part.content_hashes], pa.string()),
        )

    def mark(
        self,
        ids: Iterator[tuple[pa.Array, pa.Array]],
        states: bytearray,
        *,
        samples: int,
        done: int,
        error_ids: Callable[[], Collection[str]] = frozenset,
    ) -> tuple[int, str | None]:
        """Set `states[prompt_number * samples + sample_index] = done` for every published row.

        `ids` are the input's row ids and content hashes in order. Returns the number of rows
        marked, and the first row id whose published content differs from the input's.

        An error row may differ: the row of the input was mended, or a release that reads more of
        them makes a prompt of it. `error_ids` is called only where content differs.
        """
        if not len(self.row_ids):
            return 0, None
        batches = list(ids)
        row_ids = pa.chunked_array([ids for ids, _ in batches], pa.string())
        hashes = pa.chunked_array([hashes for _, hashes in batches], pa.string())
        num_marked, changed = 0, set[int]()
        for sample in range(samples):
            published_ids, published_hashes = self._of_sample(sample)
            # The whole input at once: each look-up builds a hash table of all published ids.
            places = pc.index_in(row_ids, value_set=published_ids)
            for number in _numbers_where(pc.is_valid(places)):
                states[number * samples + sample] = done
                num_marked += 1
            is_same = pc.equal(pc.take(published_hashes, places), hashes)
            changed.update(_numbers_where(pc.invert(pc.fill_null(is_same, True))))
        may_differ = error_ids() if changed else ()
        ids_changed = (row_ids[number].as_py() for number in sorted(changed))
        return num_marked, next((id_ for id_ in ids_changed if id_ not in may_differ), None)

    def _of_sample(self, sample: int) -> tuple[pa.Array, pa.Array]:
        is_sample = pc.equal(self.sample_indexes, pa.scalar(sample, pa.int32()))
        return self.row_ids.filter(is_sample), self.content_hashes.filter(is_sample)


def _numbers_where(true: pa.ChunkedArray) -> Iterator[int]:
    start = 0
    for chunk in true.chunks:
        for number in pc.indices_nonzero(chunk).to_pylist():
            yield start + number
        start += len(chunk)


def error_row_ids(folder: Folder, parts: Sequence[Part]) -> frozenset[str]:
    """Return the ids of published error rows."""
    found: list[str] = []
    for part in parts:
        if part.num_errors:
            with opened_parquet(folder, f"{DATA}/{part.name}") as file:
                table = file.read(columns=["row_id", "status"])
            found += table.filter(pc.equal(table["status"], "error"))["row_id"].to_pylist()
    return frozenset(found)


# -- rows taken back


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsToRedo:
    """The published rows that a session generates again: error rows, flagged rows, or both."""

    row_ids: pa.Array
    """Row ids of the input: other rows stay as they are."""
    errors: bool = True
    flags: frozenset[str] = frozenset()

    def may_be_in(self, part: Part) -> bool:
        has_errors = self.errors and part.num_errors > 0
        return has_errors or not self.flags.isdisjoint(dict(part.flag_counts))

    def are_in(self, table: pa.Table) -> pa.Array:
        """A boolean per row."""
        is_bad = [
            (self.errors and status == "error") or not self.flags.isdisjoint(flags)
            for status, flags in states_and_flags(table)
        ]
        return pc.and_(pa.array(is_bad, pa.bool_()), pc.is_in(table["row_id"], self.row_ids))


def take_back(
    folder: Folder, record: RunRecord, parts: Sequence[Part], redo: RowsToRedo, *, now_s: float
) -> tuple[Part, ...]:
    """Rewrite parts without the rows to redo, and return the parts that remain.

    Each part is replaced in one rename, so a row is never visible twice; a crash leaves every
    part either as it was or without those rows.
    """
    remaining: list[Part] = []
    for part in parts:
        rest = _rest_of(folder, record, part, redo) if redo.may_be_in(part) else part
        if rest is None:
            folder.remove(f"{DATA}/{part.name}")
            unlist(folder, part.name)
            continue
        if rest is not part:
            # Unlist first: between the move and the listing, recovery trusts the file alone.
            unlist(folder, part.name)
            rest = publish(folder, rest, now_s=now_s)
        remaining.append(rest)
    return tuple(remaining)


def _rest_of(folder: Folder, record: RunRecord, part: Part, redo: RowsToRedo) -> Part | None:
    """Stage the rows that stay; the part itself when all of them do, None when none does."""
    with opened_parquet(folder, f"{DATA}/{part.name}") as file:
        table = file.read()
    rest = table.filter(pc.invert(redo.are_in(table)))
    if rest.num_rows == table.num_rows:
        return part
    if not rest.num_rows:
        return None
    return stage_table(folder, part.name, rest, run_id=record.run_id, worker_id=part.worker_id)
