"""Sums over the rows of a run: lengths, cuts, durations, flags by a kept column.

Parts are read once, one at a time, and only the columns that are summed, so that memory contains
one part's figures and some thousand counts for any number of rows.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.folder import Folder
from pipeline.store.parquet import opened_parquet
from pipeline.store.run_folder import DATA
from schemas.completion import COMPLETION_SCHEMA

_NUM_SLOWEST = 10
_MOST_CATEGORIES = 12
_MOST_CATEGORY_CHARACTERS = 60
# Resolution of the count of rows in flight: ten days need 170,000 counts.
_TIME_STEP_S = 5
_TURN = "turns.list.element."
_COLUMNS = (
    "row_id", "sample_index", "finish_reason", "flags", "worker_id", "started_at", "finished_at",
    f"{_TURN}completion_tokens", f"{_TURN}reasoning_tokens", f"{_TURN}finish_reason",
)  # fmt: skip


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
class CategoryCount:
    """Rows that share a value of a kept column."""

    num_rows: int = 0
    num_flagged: int = 0
    flags: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True)
class RowFigures:
    """Sums over the parts read so far."""

    num_rows: int = 0
    num_turns: int = 0
    num_cut: int = 0
    """Turns that reached the limit."""
    completion: Counter[int] = field(default_factory=Counter)
    """Tokens of a turn, rounded to three digits → turns."""
    reasoning: Counter[int] = field(default_factory=Counter)
    answer: Counter[int] = field(default_factory=Counter)
    """Counts of turns whose engine counted the reasoning."""
    started: Counter[int] = field(default_factory=Counter)
    """Rows by their start, in steps of time."""
    finished: Counter[int] = field(default_factory=Counter)
    slowest: list[SlowRow] = field(default_factory=list)
    category_column: str | None = None
    categories: dict[str, CategoryCount] = field(default_factory=dict)
    num_unreadable: int = 0
    _parts_read: set[str] = field(default_factory=set)
    _no_categories: bool = False

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
                    self._choose_category(file.schema_arrow)
                    table = file.read(columns=[*_COLUMNS, *filter(None, [self._category])])
            except (pa.ArrowException, OSError):
                # It was removed since it was listed; the next session reports it.
                self.num_unreadable += 1
                continue
            self.add(table)

    def add(self, table: pa.Table) -> None:
        """Add the rows of one part."""
        self.num_rows += table.num_rows
        turns = pc.list_flatten(table["turns"].combine_chunks())
        tokens = pc.struct_field(turns, "completion_tokens")
        reasoning = pc.struct_field(turns, "reasoning_tokens")
        self.num_turns += len(turns)
        cut = pc.equal(pc.struct_field(turns, "finish_reason"), "length")
        self.num_cut += int(pc.sum(cut).as_py() or 0)
        _count(self.completion, tokens)
        _count(self.reasoning, reasoning)
        _count(
            self.answer, pc.max_element_wise(pc.subtract(tokens, reasoning), 0, skip_nulls=False)
        )
        self._add_times(table)
        self._add_slowest(table)
        self._add_categories(table)

    def in_flight(self) -> list[tuple[float, int]]:
        """Count the rows between their first request and their end at each step that changes it."""
        number, steps = 0, []
        for step in sorted(self.started.keys() | self.finished.keys()):
            number += self.started[step] - self.finished[step]
            steps.append((float(step * _TIME_STEP_S), number))
        return steps

    # -- inside

    @property
    def _category(self) -> str | None:
        return None if self._no_categories else self.category_column

    def _choose_category(self, schema: pa.Schema) -> None:
        """Choose the first kept column of texts."""
        if self.category_column is not None or self._no_categories:
            return
        own = set(COMPLETION_SCHEMA.names)
        kept = (f.name for f in schema if f.name not in own and pa.types.is_string(f.type))
        self.category_column = next((name for name in kept if "." not in name), None)
        self._no_categories = self.category_column is None

    def _add_times(self, table: pa.Table) -> None:
        for column, counts in (("started_at", self.started), ("finished_at", self.finished)):
            steps = pc.divide(pc.cast(table[column], pa.int64()), _TIME_STEP_S * 1000)
            counts.update(_counted(steps))

    def _add_slowest(self, table: pa.Table) -> None:
        took_ms = pc.subtract(
            pc.cast(table["finished_at"], pa.int64()), pc.cast(table["started_at"], pa.int64())
        )
        timed = table.append_column("took_ms", took_ms)
        top = pc.select_k_unstable(
            timed, k=min(_NUM_SLOWEST, table.num_rows), sort_keys=[("took_ms", "descending")]
        )
        rows = (_slow_row(row) for row in timed.take(top).to_pylist())
        self.slowest = heapq.nlargest(
            _NUM_SLOWEST, [*self.slowest, *rows], key=lambda row: row.duration_s
        )

    def _add_categories(self, table: pa.Table) -> None:
        if self._category is None or self._category not in table.column_names:
            return
        values = pc.fill_null(table[self._category], "(none)")
        for value, number in _counted(values).items():
            self.categories.setdefault(str(value), CategoryCount()).num_rows += number
        longest = max((len(value) for value in self.categories), default=0)
        if len(self.categories) > _MOST_CATEGORIES or longest > _MOST_CATEGORY_CHARACTERS:
            # The column has free text instead of categories.
            self._no_categories, self.category_column = True, None
            self.categories.clear()
            return
        if "flags" not in table.column_names:
            return
        is_flagged = pc.greater(pc.list_value_length(table["flags"]), 0)
        flagged = pa.table({"value": values, "flags": table["flags"]}).filter(is_flagged)
        for row in flagged.to_pylist():
            count = self.categories[row["value"]]
            count.num_flagged += 1
            count.flags.update(row["flags"])


def mean(counts: Mapping[int, int]) -> float:
    """Average the counted values; 0 for none."""
    total = sum(counts.values())
    return sum(value * count for value, count in counts.items()) / total if total else 0.0


def quantile(counts: Mapping[int, int], share: float) -> int:
    """Return the least value that this share of the counts does not exceed; 0 for none."""
    left = share * sum(counts.values())
    for value, count in sorted(counts.items()):
        left -= count
        if left <= 1e-9:
            return value
    return 0


def _count(counts: Counter[int], lengths: pa.Array) -> None:
    for tokens, number in _counted(lengths).items():
        counts[_to_three_digits(tokens)] += number


def _counted(values: pa.Array) -> dict[int, int]:
    pairs = pc.value_counts(pc.drop_null(values)).to_pylist()
    return {pair["values"]: pair["counts"] for pair in pairs}


def _to_three_digits(tokens: int) -> int:
    surplus = len(str(tokens)) - 3
    return round(tokens, -surplus) if surplus > 0 else tokens


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
