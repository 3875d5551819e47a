"""What an export knows of every published row: kept or dropped, which split, which place.

Invariant: each row has one reason, one split and one rank; kept rows have the ranks from 0 on, in
the order in which they go out. It holds some 150 bytes a row, and no text but the ids.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dataset.export_rows import KEY_COLUMNS
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA
from schemas.export import ExportOptions
from schemas.manifest import Part

KEPT = 0
_TEXTS_AT_ONCE = 4096


@dataclass(slots=True)
class Index:
    """What is known of every published row, in the order of the parts."""

    parts: tuple[Part, ...]
    ids: pa.Array
    samples: pa.Array
    reasons: "array[int]"
    """0: kept; else the number of the reason why not, in `reason_names`."""
    reason_names: list[str]
    split_of: "array[int]"
    rank: "array[int]" = field(default_factory=lambda: array("q"))
    """Place among the kept rows, in the order in which they go out."""
    split_starts: list[int] = field(default_factory=list)
    """Rank at which each split begins, and the number of kept rows at the end."""

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    def drop(self, row: int, reason: str) -> None:
        if reason not in self.reason_names:
            self.reason_names.append(reason)
        self.reasons[row] = self.reason_names.index(reason)

    def dropped(self) -> dict[str, int]:
        counts = Counter(self.reasons)
        return {
            name: counts[number]
            for number, name in enumerate(self.reason_names)
            if number != KEPT and counts[number]
        }

    def kept_keys(self) -> Iterator[tuple[str, int]]:
        """Row id and sample index of what goes out, in order."""
        order = pc.sort_indices(pa.array(self.rank, pa.int64()))
        for start in range(0, self.split_starts[-1], _TEXTS_AT_ONCE):
            rows = order.slice(start, min(_TEXTS_AT_ONCE, self.split_starts[-1] - start))
            ids, samples = self.ids.take(rows).to_pylist(), self.samples.take(rows).to_pylist()
            for row, row_id, sample in zip(rows.to_pylist(), ids, samples, strict=True):
                if self.reasons[row] == KEPT:
                    yield row_id, sample

    def dropped_keys(self) -> Iterator[tuple[str, int, str]]:
        """Row id, sample index and reason of what does not."""
        for row, reason in enumerate(self.reasons):
            if reason != KEPT:
                sample = self.samples[row].as_py()
                yield self.ids[row].as_py(), sample, self.reason_names[reason]


def index_rows(
    folder: Folder, parts: Sequence[Part], input_ids: Iterable[pa.Array], options: ExportOptions
) -> Index:
    """Read ids, states and flags; decide what is dropped, and each row's split and rank."""
    ids, samples = [], []
    names, reasons = ["kept"], array("B")
    drop_flags = set(options.drop_flags)
    for part in parts:
        columns = [*KEY_COLUMNS, "status", "flags"]
        with opened_parquet(folder, f"{DATA}/{part.name}") as file:
            table = file.read(columns=columns)
        ids += table["row_id"].chunks
        samples += table["sample_index"].chunks
        states = zip(table["status"].to_pylist(), table["flags"].to_pylist(), strict=True)
        for status, flags in states:
            reason = _drop_reason(status, flags, drop_flags)
            if reason not in names:
                names.append(reason)
            reasons.append(names.index(reason))
    all_ids = pa.concat_arrays(ids) if ids else pa.array([], pa.string())
    index = Index(
        parts=tuple(parts),
        ids=all_ids,
        samples=pa.concat_arrays(samples) if samples else pa.array([], pa.int32()),
        reasons=reasons,
        reason_names=names,
        split_of=array("B", _splits(all_ids, options.splits)),
    )
    _rank(index, input_ids, options)
    return index


def _drop_reason(status: str, flags: list[str], drop_flags: set[str]) -> str:
    if status == "error":
        return "error_row"
    return next((flag for flag in flags if flag in drop_flags), "kept")


def _splits(ids: pa.Array, splits: Sequence[tuple[str, float]]) -> Iterator[int]:
    bounds, total = [], 0.0
    for _, share in splits:
        total += share
        bounds.append(int(total * 2**32))
    bounds[-1] = 2**32
    for row_id in _texts(ids):
        value = _hash(f"split\n{row_id}") >> 32
        yield next(number for number, bound in enumerate(bounds) if value < bound)


def _texts(ids: pa.Array) -> Iterator[str]:
    """A few thousand at a time as Python's own."""
    for start in range(0, len(ids), _TEXTS_AT_ONCE):
        yield from ids.slice(start, _TEXTS_AT_ONCE).to_pylist()


def _hash(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _rank(index: Index, input_ids: Iterable[pa.Array], options: ExportOptions) -> None:
    """Sort by split, then by the input's order or by chance; rows dropped have no rank."""
    if options.shuffle_seed is None:
        keys = _input_order(index, input_ids)
    else:
        pairs = zip(_texts(index.ids), index.samples.to_pylist(), strict=True)
        keys = pa.array(
            (_hash(f"{options.shuffle_seed}\n{row_id}\n{s}") >> 1 for row_id, s in pairs),
            pa.int64(),
        )
    dropped = pc.not_equal(pa.array(index.reasons, pa.uint8()), pa.scalar(KEPT, pa.uint8()))
    table = pa.table(
        {
            "dropped": dropped.cast(pa.uint8()),
            "split": pa.array(index.split_of, pa.uint8()),
            "key": keys,
            "sample": index.samples,
        }
    )
    by = [(name, "ascending") for name in table.column_names]
    order = pc.sort_indices(table, sort_keys=by)
    index.rank = array("q", pc.sort_indices(order).to_pylist())
    kept = Counter(
        split for split, reason in zip(index.split_of, index.reasons, strict=True) if reason == KEPT
    )
    index.split_starts = [0]
    for number in range(len(options.splits)):
        index.split_starts.append(index.split_starts[-1] + kept[number])


def _input_order(index: Index, input_ids: Iterable[pa.Array]) -> pa.Array:
    known = pa.concat_arrays([*input_ids, pa.array([], pa.string())])
    found = pc.index_in(index.ids, value_set=known).cast(pa.int64())
    outside = pa.array(range(len(known), len(known) + index.num_rows), pa.int64())
    return pc.coalesce(found, outside)
