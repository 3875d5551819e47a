"""Sums over the rows of a run: lengths, cuts, durations, flags by a kept column.

Parts are read once, one at a time, and only the columns that are summed, so that memory contains
one part's figures, some thousand counts and some hundred chosen rows for any number of rows.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.report.rows.categories import Categories, CategoryRows
from pipeline.report.rows.examples import ExampleBook
from pipeline.report.rows.lengths import LengthCounts
from pipeline.report.rows.picks import PartRows, Picks
from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA
from schemas.completion import COMPLETION_SCHEMA

_NUM_SLOWEST = 10
# Resolution of counts over time: ten days need 170,000 counts.
_TIME_STEP_S = 5
_TURN = "turns.list.element."
_COLUMNS = (
    "row_id", "sample_index", "status", "finish_reason", "attempt", "quality_retries", "flags",
    "worker_id", "started_at", "finished_at",
    f"{_TURN}completion_tokens", f"{_TURN}reasoning_tokens", f"{_TURN}finish_reason",
)  # fmt: skip
_CATEGORY_TYPES = (pa.types.is_string, pa.types.is_integer, pa.types.is_boolean)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRow:
    """A slow row, timed from its first request to its end."""

    duration_s: float
    row_id: str
    sample_index: int
    completion_tokens: int
    num_turns: int
    finish_reason: str | None
    worker_id: str
    flags: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class RowFigures:
    """Sums over the parts read so far."""

    num_rows: int = 0
    num_turns: int = 0
    num_cut: int = 0
    """Turns that reached the limit."""
    completion: LengthCounts = field(default_factory=LengthCounts)
    reasoning: LengthCounts = field(default_factory=LengthCounts)
    answer: LengthCounts = field(default_factory=LengthCounts)
    """Lengths of turns whose engine counted the reasoning."""
    slowest: list[SlowRow] = field(default_factory=list)
    categories: Categories = field(default_factory=Categories)
    picks: Picks = field(default_factory=Picks)
    examples: ExampleBook = field(default_factory=ExampleBook)
    """Texts of the picks, once they have been read."""
    num_unreadable: int = 0
    _started: Counter[int] = field(default_factory=Counter)
    """Rows by their start, in steps of time."""
    _finished: Counter[int] = field(default_factory=Counter)
    _retries: Counter[int] = field(default_factory=Counter)
    _errors: Counter[int] = field(default_factory=Counter)
    _parts_read: set[str] = field(default_factory=set)

    @property
    def num_parts(self) -> int:
        """Number of parts that were read or tried."""
        return len(self._parts_read)

    def read(self, folder: Folder, names: Iterable[str]) -> None:
        """Add the parts that have not been read yet."""
        for name in names:
            if name in self._parts_read:
                continue
            self._parts_read.add(name)
            try:
                with opened_parquet(folder, f"{DATA}/{name}") as file:
                    kept = self.categories.candidates(_kept_columns(file.schema_arrow))
                    table = file.read(columns=[*_COLUMNS, *kept])
            except (pa.ArrowException, OSError):
                # It was removed since it was listed; the next session reports it.
                self.num_unreadable += 1
                continue
            self.add(name, table, kept)

    def add(self, name: str, table: pa.Table, kept: Sequence[str]) -> None:
        """Add the rows of one part, with the kept columns that may be categories."""
        self.num_rows += table.num_rows
        turns = pc.list_flatten(table["turns"].combine_chunks())
        tokens = pc.struct_field(turns, "completion_tokens")
        reasoning = pc.struct_field(turns, "reasoning_tokens")
        answer = pc.max_element_wise(pc.subtract(tokens, reasoning), 0, skip_nulls=False)
        self.num_turns += len(turns)
        self.num_cut += _total(pc.equal(pc.struct_field(turns, "finish_reason"), "length"))
        self.completion.add(_counted(tokens))
        self.reasoning.add(_counted(reasoning))
        self.answer.add(_counted(answer))
        self._add_times(table)
        self._add_slowest(table)
        self._add_picks(name, table)
        for column in kept:
            self._add_category(column, table)

    def in_flight(self) -> list[tuple[float, int]]:
        """Count the rows between their first request and their end at each step that changes it."""
        number, steps = 0, []
        for step in sorted(self._started.keys() | self._finished.keys()):
            number += self._started[step] - self._finished[step]
            steps.append((float(step * _TIME_STEP_S), number))
        return steps

    @property
    def retries(self) -> dict[float, int]:
        """Attempts after the first, of requests and of flagged turns, by the time of the row's end.

        Keys are Unix time.
        """
        return _by_time(self._retries)

    @property
    def errors(self) -> dict[float, int]:
        """Error rows by the Unix time of their end."""
        return _by_time(self._errors)

    # -- inside

    def _add_times(self, table: pa.Table) -> None:
        started, finished = _steps(table["started_at"]), _steps(table["finished_at"])
        self._started.update(_counted(started))
        self._finished.update(_counted(finished))
        again = pc.max_element_wise(pc.subtract(table["attempt"], 1), 0)
        # Rows of the first format have no retries for quality.
        if "quality_retries" in table.column_names:
            again = pc.add(again, table["quality_retries"])
        self._retries.update(_summed(finished, again))
        is_error = pc.cast(pc.equal(table["status"], "error"), pa.int64())
        self._errors.update(_summed(finished, is_error))

    def _add_slowest(self, table: pa.Table) -> None:
        timed = table.append_column("took_ms", _took_ms(table))
        top = pc.select_k_unstable(
            timed, k=min(_NUM_SLOWEST, table.num_rows), sort_keys=[("took_ms", "descending")]
        )
        rows = (_slow_row(row) for row in timed.take(top).to_pylist())
        self.slowest = heapq.nlargest(
            _NUM_SLOWEST, [*self.slowest, *rows], key=lambda row: row.duration_s
        )

    def _add_picks(self, name: str, table: pa.Table) -> None:
        self.picks.add(
            PartRows(
                part=name,
                is_ok=pc.equal(table["status"], "ok").to_pylist(),
                took_s=pc.divide(pc.cast(_took_ms(table), pa.float64()), 1000).to_pylist(),
                flagged=_flagged(table),
            )
        )

    def _add_category(self, column: str, table: pa.Table) -> None:
        texts = pc.fill_null(pc.cast(table[column], pa.string()), "(none)")
        values = [str(value) for value in pc.unique(texts).to_pylist()]
        if not self.categories.is_candidate(column, values):
            return
        tokens = _row_tokens(table)
        flags = dict(_flagged(table))
        for value in values:
            is_own = pc.equal(texts, value)
            own = pc.indices_nonzero(is_own).to_pylist() if flags else []
            rows = CategoryRows(
                num_rows=_total(is_own),
                tokens=_counted(tokens.filter(is_own)),
                flags=[flags[place] for place in own if place in flags],
            )
            self.categories.add(column, value, rows)


def _kept_columns(schema: pa.Schema) -> list[str]:
    own = set(COMPLETION_SCHEMA.names)
    return [
        column.name
        for column in schema
        if column.name not in own
        # A dot would name an inner field when columns are read.
        and "." not in column.name
        and any(is_type(column.type) for is_type in _CATEGORY_TYPES)
    ]


def _flagged(table: pa.Table) -> list[tuple[int, list[str]]]:
    """Return the places and flags of rows that have any; rows of the first format have none."""
    if "flags" not in table.column_names:
        return []
    places = pc.indices_nonzero(pc.greater(pc.list_value_length(table["flags"]), 0))
    return list(zip(places.to_pylist(), table["flags"].take(places).to_pylist(), strict=True))


def _row_tokens(table: pa.Table) -> pa.Array:
    """Add up the completion tokens of each row's turns; null where an engine counted none."""
    turns = table["turns"].combine_chunks()
    inner = pa.table(
        {
            "row": pc.list_parent_indices(turns),
            "tokens": pc.struct_field(pc.list_flatten(turns), "completion_tokens"),
        }
    )
    sums = inner.group_by("row").aggregate([("tokens", "sum")])
    places = pc.index_in(pa.array(range(table.num_rows)), sums["row"].combine_chunks())
    return sums["tokens_sum"].combine_chunks().take(places)


def _steps(times: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.divide(pc.cast(times, pa.int64()), _TIME_STEP_S * 1000)


def _by_time(counts: Counter[int]) -> dict[float, int]:
    return {float(step * _TIME_STEP_S): number for step, number in counts.items()}


def _took_ms(table: pa.Table) -> pa.ChunkedArray:
    return pc.subtract(
        pc.cast(table["finished_at"], pa.int64()), pc.cast(table["started_at"], pa.int64())
    )


def _total(values: pa.Array) -> int:
    return int(pc.sum(values).as_py() or 0)


def _counted(values: pa.Array) -> dict[int, int]:
    pairs = pc.value_counts(pc.drop_null(values)).to_pylist()
    return {pair["values"]: pair["counts"] for pair in pairs}


def _summed(keys: pa.Array, values: pa.Array) -> dict[int, int]:
    """Add up the values by key, without keys whose sum is 0."""
    inner = pa.table({"key": keys, "value": values}).filter(pc.not_equal(values, 0))
    sums = inner.group_by("key").aggregate([("value", "sum")]).to_pylist()
    return {row["key"]: row["value_sum"] for row in sums}


def _slow_row(row: dict[str, object]) -> SlowRow:
    turns: list[dict[str, int | None]] = row["turns"]  # type: ignore[assignment]
    return SlowRow(
        duration_s=row["took_ms"] / 1000,  # type: ignore[operator]
        row_id=str(row["row_id"]),
        sample_index=row["sample_index"],  # type: ignore[arg-type]
        completion_tokens=sum(turn["completion_tokens"] or 0 for turn in turns),
        num_turns=len(turns),
        finish_reason=row["finish_reason"],  # type: ignore[arg-type]
        worker_id=str(row["worker_id"]),
        # Rows of the first format have no flags.
        flags=tuple(row.get("flags") or ()),  # type: ignore[arg-type]
    )
