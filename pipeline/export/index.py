"""Index of an export: each published row's drop reason, split and rank.

Invariant: each row has one reason, one split and one rank; the ranks of kept rows begin at 0, in
the order of the output. The index uses about 150 bytes per row, and the ids are its only text.
"""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dataset.frozen import frozen_in
from pipeline.dataset.parts import states_and_flags
from pipeline.errors import ConfigError
from pipeline.export.cutting import LENGTH_FIELDS, turns_within
from pipeline.export.rows import KEY_COLUMNS, RowForm
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA
from schemas.export import ExportOptions
from schemas.manifest import Part, RunRecord
from schemas.units import MIB

KEPT = 0
# Row ids that are Python strings at once.
_TEXT_BATCH = 4096
_READ_BUFFER_BYTES = MIB
# A resume does the rows of a missing part again.
_REMEDY = "run the same `jobs.regenerate` again, which does its {:,} rows again, then export"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """A run's published parts, and the form in which their rows are exported."""

    folder: Folder
    run: RunRecord
    parts: tuple[Part, ...]
    form: RowForm

    def batches(self, num_rows: int) -> Iterator[tuple[int, pa.Table]]:
        """Read all rows in order, `num_rows` at a time, each batch with its first row's number."""
        first_row = 0
        for part in self.parts:
            for batch in self.batches_of(part, num_rows):
                yield first_row, batch
                first_row += batch.num_rows

    def batches_of(self, part: Part, num_rows: int) -> Iterator[pa.Table]:
        """Read the columns of one part that the form needs, `num_rows` rows at a time."""
        with self.opened(part, pre_buffer=False, buffer_size=_READ_BUFFER_BYTES) as file:
            for batch in file.iter_batches(num_rows, columns=self.form.read_columns):
                table = pa.Table.from_batches([batch]).select(self.form.columns)
                yield table.replace_schema_metadata(None)

    @contextmanager
    def opened(self, part: Part, **options: object) -> Iterator[Any]:
        """Open a part. Raises ConfigError when it cannot be read, there or within the block."""
        path = f"{DATA}/{part.name}"
        try:
            options["page_checksum_verification"] = True
            with opened_parquet(self.folder, path, **options) as file:
                yield file
        except FileNotFoundError:
            raise ConfigError(
                f"{self.folder.place(path)}: is missing; {_REMEDY.format(part.num_rows)}"
            ) from None
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(
                f"{self.folder.place(path)}: is damaged: {_first_line(error)}; move it "
                f"away and {_REMEDY.format(part.num_rows)}"
            ) from None

    def has_any(self, *paths: str) -> bool:
        """Tell whether any part has a value in a column at or below these paths."""
        return any(self._has_any(part, paths) for part in self.parts)

    def _has_any(self, part: Part, paths: Sequence[str]) -> bool:
        with self.opened(part) as file:
            groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        columns = [group.column(n) for group in groups for n in range(group.num_columns)]
        return any(
            _has_values(column)
            for column in columns
            for path in paths
            if f"{column.path_in_schema}.".startswith(f"{path}.")
        )


def _has_values(column: Any) -> bool:  # noqa: ANN401 - pyarrow ships no types
    found = column.statistics
    return found is None or not found.has_null_count or found.null_count < column.num_values


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(slots=True)
class Index:
    """Columns of all published rows, in the order of the parts."""

    ids: pa.Array
    samples: pa.Array
    reasons: "array[int]"
    """`KEPT`, or the number of the drop reason in `reason_names`."""
    reason_names: list[str]
    split_of: "array[int]"
    turns_kept: "array[int]" = field(default_factory=lambda: array("H"))
    """Turns to keep of a row that is cut; 0 for a whole row."""
    rank: "array[int]" = field(default_factory=lambda: array("q"))
    """Position in the output; dropped rows come after all kept ones."""
    split_starts: list[int] = field(default_factory=list)
    """First rank of each split, followed by the number of kept rows."""

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

    @property
    def num_cut(self) -> int:
        """Count the exported rows that lack their last turns."""
        pairs = zip(self.reasons, self.turns_kept, strict=True)
        return sum(reason == KEPT and kept > 0 for reason, kept in pairs)

    def cut_keys(self) -> Iterator[tuple[str, int, int]]:
        """Row id, sample index and number of kept turns of each exported row that is cut."""
        for row, kept in enumerate(self.turns_kept):
            if kept and self.reasons[row] == KEPT:
                yield self.ids[row].as_py(), self.samples[row].as_py(), kept

    def kept_keys(self) -> Iterator[tuple[str, int]]:
        """Row id and sample index of each exported row, in order."""
        order = pc.sort_indices(pa.array(self.rank, pa.int64()))
        for start in range(0, self.split_starts[-1], _TEXT_BATCH):
            rows = order.slice(start, min(_TEXT_BATCH, self.split_starts[-1] - start))
            ids, samples = self.ids.take(rows).to_pylist(), self.samples.take(rows).to_pylist()
            for row, row_id, sample in zip(rows.to_pylist(), ids, samples, strict=True):
                if self.reasons[row] == KEPT:
                    yield row_id, sample

    def dropped_keys(self) -> Iterator[tuple[str, int, str]]:
        """Row id, sample index and reason of each dropped row."""
        for row, reason in enumerate(self.reasons):
            if reason != KEPT:
                sample = self.samples[row].as_py()
                yield self.ids[row].as_py(), sample, self.reason_names[reason]


def index_rows(source: ExportSource, options: ExportOptions) -> Index:
    """Read ids, states and flags, and decide each row's drop reason, split and rank."""
    ids, samples = [], []
    names, reasons = ["kept"], array("B")
    turns_kept, answers = array("H"), array("Q")
    drop_flags = set(options.drop_flags)
    for part in source.parts:
        with source.opened(part) as file:
            table = file.read(columns=[*KEY_COLUMNS, "status", "flags"])
        ids += table["row_id"].chunks
        samples += table["sample_index"].chunks
        found = [_drop_reason(*row, drop_flags) for row in states_and_flags(table)]
        if options.max_tokens is not None:
            lengths = _lengths(source, part, options.max_tokens, is_cut=options.is_cut)
            pairs = list(zip(found, lengths, strict=True))
            found = [reason if reason != "kept" else by_length for reason, (by_length, _) in pairs]
            turns_kept.extend(kept for _, (_, kept) in pairs)
        for reason in found:
            if reason not in names:
                names.append(reason)
            reasons.append(names.index(reason))
        if options.is_deduplicated:
            answers.extend(_answers(source, part))
    all_ids = pa.concat_arrays(ids) if ids else pa.array([], pa.string())
    index = Index(
        ids=all_ids,
        samples=pa.concat_arrays(samples) if samples else pa.array([], pa.int32()),
        reasons=reasons,
        reason_names=names,
        split_of=array("B", _splits(all_ids, options.splits)),
        turns_kept=turns_kept or array("H", bytes(2 * len(reasons))),
    )
    if options.is_deduplicated:
        _drop_repeated(index, answers, _input_order(index, source.folder))
    _rank(index, source, options)
    return index


def _lengths(
    source: ExportSource, part: Part, max_tokens: int, *, is_cut: bool
) -> Iterator[tuple[str, int]]:
    """Yield each row's drop reason by its length, and the turns to keep of a row to cut."""
    columns = [f"turns.list.element.{name}" for name in LENGTH_FIELDS]
    with source.opened(part) as file:
        turns = file.read(columns=columns)["turns"]
    for row in turns.to_pylist():
        kept = turns_within(row, max_tokens)
        if kept is None:
            yield "tokens_not_counted", 0
        elif kept == len(row):
            yield "kept", 0
        elif is_cut and kept:
            yield "kept", kept
        else:
            yield "more_than_max_tokens", 0


def _answers(source: ExportSource, part: Part) -> Iterator[int]:
    """Yield a hash of each row's answers."""
    calls = [name for name in ("tool_calls",) if name in source.form.own]
    columns = ["turns.list.element.answer_text", *calls]
    with source.opened(part, pre_buffer=False, buffer_size=_READ_BUFFER_BYTES) as file:
        for batch in file.iter_batches(_TEXT_BATCH, columns=columns):
            for row in batch.to_pylist():
                answers = [turn["answer_text"].strip() for turn in row["turns"]]
                yield _hash(json.dumps([answers, *(row[name] for name in calls)]))


def _drop_repeated(index: Index, answers: "array[int]", order: pa.Array) -> None:
    """Drop the kept rows whose answers an earlier row of the input has."""
    table = pa.table(
        {
            "answer": pa.array(answers, pa.uint64()),
            "order": order,
            "sample": index.samples,
            "row": pa.array(range(index.num_rows), pa.int64()),
        }
    ).filter(pc.equal(pa.array(index.reasons, pa.uint8()), pa.scalar(KEPT, pa.uint8())))
    by = [(name, "ascending") for name in ("answer", "order", "sample")]
    table = table.take(pc.sort_indices(table, sort_keys=by))
    if table.num_rows < 2:
        return
    answer = table["answer"].combine_chunks()
    is_repeated = pc.equal(answer.slice(1), answer.slice(0, len(answer) - 1))
    for row in table["row"].slice(1).filter(is_repeated).to_pylist():
        index.drop(row, "repeated_answer")


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
    """Yield the ids as Python strings, a few thousand of which are in memory at once."""
    for start in range(0, len(ids), _TEXT_BATCH):
        yield from ids.slice(start, _TEXT_BATCH).to_pylist()


def _hash(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _rank(index: Index, source: ExportSource, options: ExportOptions) -> None:
    """Rank rows by split, then in the order of the input or of the shuffle; dropped rows last."""
    if options.shuffle_seed is None:
        keys = _input_order(index, source.folder)
    else:
        pairs = zip(_texts(index.ids), index.samples.to_pylist(), strict=True)
        keys = pa.array(
            (_hash(f"{options.shuffle_seed}\n{row_id}\n{s}") >> 1 for row_id, s in pairs),
            pa.int64(),
        )
    if options.file_type == "jsonl" and source.form.chat.has_lists_of_calls:
        keys = _with_calls_first(index, source, keys)
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


def _with_calls_first(index: Index, source: ExportSource, keys: pa.Array) -> pa.Array:
    """Move the first row with a call to the front of its split.

    `load_dataset("json")` takes the types from the first 10 MB, where lists of calls that are all
    empty have none, and stops at the first call beyond. datasets 5.1, packaged_modules/json.
    """
    places, first = keys.to_pylist(), dict[int, int]()
    for row in _rows_with_calls(source):
        if index.reasons[row] == KEPT and not index.turns_kept[row]:
            split = index.split_of[row]
            first[split] = min(row, first.get(split, row), key=places.__getitem__)
    for row in first.values():
        places[row] = -1
    return pa.array(places, pa.int64())


def _rows_with_calls(source: ExportSource) -> Iterator[int]:
    """Yield the numbers of the rows that have a call in a turn, or one that they end with."""
    own = ["tool_calls"] if "tool_calls" in source.form.own else []
    first_row = 0
    for part in source.parts:
        with source.opened(part, pre_buffer=False, buffer_size=_READ_BUFFER_BYTES) as file:
            columns = ["messages.list.element.tool_calls", *own]
            for batch in file.iter_batches(_TEXT_BATCH, columns=columns):
                for number, row in enumerate(batch.to_pylist()):
                    turns = [*row["messages"], {"tool_calls": row.get("tool_calls")}]
                    if any(turn.get("tool_calls") for turn in turns):
                        yield first_row + number
                first_row += batch.num_rows


def _input_order(index: Index, folder: Folder) -> pa.Array:
    """Number each row by its place in the frozen prompts; rows that are not there follow."""
    frozen = frozen_in(folder)
    input_ids = pa.array([], pa.string()) if frozen is None else frozen.row_ids()
    places = pc.index_in(index.ids, value_set=input_ids).cast(pa.int64())
    after = pa.array(range(len(input_ids), len(input_ids) + index.num_rows), pa.int64())
    return pc.coalesce(places, after)
