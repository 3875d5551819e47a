"""TODO docstring."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dataset.parts import FOOTER_KEY, flag_counts, part_bytes, part_from, publish
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA, MANIFEST_FILE, STAGING
from schemas.manifest import Part, RunRecord, event_line


def take_back_errors(
    folder: Folder,
    record: RunRecord,
    parts: Sequence[Part],
    row_ids: Iterable[pa.Array],
    *,
    errors: bool = True,
    flags: Collection[str] = (),
    now_s: float,
) -> tuple[Part, ...]:
    """Rewrite parts without the error rows of `row_ids`, so that those can be asked again.

    With `flags`, rows that bear one of them go too.

    Each part is replaced in one rename, so a row is never visible twice; a crash leaves every
    part either as it was or without its error rows.
    """
    kept: list[Part] = []
    asked = pa.concat_arrays(list(row_ids))
    for part in parts:
        is_asked = (errors and part.num_errors) or dict(part.flag_counts).keys() & set(flags)
        remaining: Part | None = part
        if is_asked:
            remaining = _without(folder, record, part, asked, errors=errors, flags=set(flags))
        if remaining is None:
            folder.remove(f"{DATA}/{part.name}")
            folder.append_line(MANIFEST_FILE, event_line("unlisted", {"name": part.name}))
            continue
        if remaining is not part:
            # Unlisted first: between the move and the listing the file alone is believed.
            folder.append_line(MANIFEST_FILE, event_line("unlisted", {"name": part.name}))
            remaining = publish(folder, remaining, now_s=now_s)
        kept.append(remaining)
    return tuple(kept)


def _without(
    folder: Folder,
    record: RunRecord,
    part: Part,
    asked: pa.Array,
    *,
    errors: bool,
    flags: set[str],
) -> Part | None:
    """The part staged anew; itself when none of its rows is asked for; None when all are."""
    with opened_parquet(folder, f"{DATA}/{part.name}") as file:
        table = file.read()
        summary = json.loads(file.schema_arrow.metadata[FOOTER_KEY])
    bad = [
        (errors and status == "error") or not flags.isdisjoint(found)
        for status, found in _states_and_flags(table)
    ]
    stays = pc.invert(pc.and_(pa.array(bad, pa.bool_()), pc.is_in(table["row_id"], asked)))
    num_before, table = table.num_rows, table.filter(stays)
    if table.num_rows == num_before:
        return part
    if not table.num_rows:
        return None
    num_errors = pc.sum(pc.equal(table["status"], "error")).as_py()
    summary |= {"num_errors": num_errors, "run_id": record.run_id}
    summary["num_turns"] = pc.sum(pc.list_value_length(table["turns"])).as_py()
    summary["flag_counts"] = flag_counts(_states_and_flags(table))
    summary |= {name: _turn_sum(table, name) for name in ("prompt_tokens", "completion_tokens")}
    data = part_bytes(table, summary)
    folder.write_whole(f"{STAGING}/{part.name}", data)
    return part_from(table, summary, len(data))


def _states_and_flags(table: pa.Table) -> Iterator[tuple[str, list[str]]]:
    yield from zip(table["status"].to_pylist(), table["flags"].to_pylist(), strict=True)


def _turn_sum(table: pa.Table, name: str) -> int:
    turns = pc.list_flatten(table["turns"].combine_chunks())
    return int(pc.sum(pc.struct_field(turns, name)).as_py() or 0)


@dataclass(slots=True)
class DoneRows:
    """The published rows, held as Arrow columns: a million take tens of megabytes."""

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
    ) -> tuple[int, str | None]:
        """Set `states[prompt_number * samples + sample_index] = done` for every published row.

        `ids` are the input's row ids and content hashes in order. Returns how many rows were
        marked, and the first row id whose published content is another than the input's.
        """
        if not len(self.row_ids):
            return 0, None
        batches = list(ids)
        row_ids = pa.chunked_array([ids for ids, _ in batches], pa.string())
        hashes = pa.chunked_array([hashes for _, hashes in batches], pa.string())
        marked, first_changed = 0, len(row_ids)
        for sample in range(samples):
            published_ids, published_hashes = self._of_sample(sample)
            # All of the input at once: each look-up makes a table of all that is published.
            found = pc.index_in(row_ids, value_set=published_ids)
            for number in _numbers_where(pc.is_valid(found)):
                states[number * samples + sample] = done
                marked += 1
            same = pc.equal(pc.take(published_hashes, found), hashes)
            others = _numbers_where(pc.invert(pc.fill_null(same, True)))
            first_changed = min(first_changed, next(others, first_changed))
        changed = row_ids[first_changed].as_py() if first_changed < len(row_ids) else None
        return marked, changed

    def _of_sample(self, sample: int) -> tuple[pa.Array, pa.Array]:
        chosen = pc.equal(self.sample_indexes, pa.scalar(sample, pa.int32()))
        return self.row_ids.filter(chosen), self.content_hashes.filter(chosen)


def _numbers_where(true: pa.ChunkedArray) -> Iterator[int]:
    start = 0
    for chunk in true.chunks:
        for number in pc.indices_nonzero(chunk).to_pylist():
            yield start + number
        start += len(chunk)
