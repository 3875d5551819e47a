"""Rows by a kept column that sorts them into a few classes.

A kept column counts as one if it has texts, whole numbers or true and false, in all 2 to 12
different values of at most 60 characters. The first such column, in the order of the run file, is
shown. Memory is that of some columns times 12 values.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.report.rows.lengths import LengthCounts

_MOST_COLUMNS = 8
MOST_VALUES = 12
_MOST_CHARACTERS = 60


@dataclass(slots=True, kw_only=True)
class CategoryCount:
    """Rows that share a value of a kept column."""

    num_rows: int = 0
    num_flagged: int = 0
    flags: Counter[str] = field(default_factory=Counter)
    lengths: LengthCounts = field(default_factory=LengthCounts)
    """Completion tokens of a row, all turns together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryRows:
    """Rows of one part with one value."""

    num_rows: int
    tokens: Mapping[int, int]
    """Rows by their completion tokens."""
    flags: Sequence[Sequence[str]]
    """Flags of the rows that have any."""


@dataclass(slots=True, kw_only=True)
class Categories:
    """Counts by the values of each column that may be a category."""

    columns: dict[str, dict[str, CategoryCount]] = field(default_factory=dict)
    _other: set[str] = field(default_factory=set)
    """Columns with too many values, or with long ones."""

    def candidates(self, columns: Sequence[str]) -> list[str]:
        """Return which of these columns of a part are worth reading."""
        return [name for name in columns[:_MOST_COLUMNS] if name not in self._other]

    def is_candidate(self, column: str, values: Sequence[str]) -> bool:
        """Return whether a column with these values as well is one; one that is not is dropped."""
        known = self.columns.setdefault(column, {})
        all_values = known.keys() | set(values)
        longest = max((len(value) for value in all_values), default=0)
        if len(all_values) <= MOST_VALUES and longest <= _MOST_CHARACTERS:
            return True
        self._other.add(column)
        del self.columns[column]
        return False

    def add(self, column: str, value: str, rows: CategoryRows) -> None:
        """Add the rows of one part that have this value."""
        count = self.columns[column].setdefault(value, CategoryCount())
        count.num_rows += rows.num_rows
        count.lengths.add(rows.tokens)
        count.num_flagged += len(rows.flags)
        for flags in rows.flags:
            count.flags.update(flags)

    def shown(self) -> tuple[str, dict[str, CategoryCount]] | None:
        """Return the first column with at least two values, and its counts."""
        return next((item for item in self.columns.items() if len(item[1]) > 1), None)
