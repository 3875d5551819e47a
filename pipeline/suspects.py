"""Rows that were in flight when their engine died too often: which of them are tried together.

A row that kills its engine has to be found without killing many, and the rows that were only near
it have to be answered without taking as long as they would one by one.
"""

from collections import deque
from dataclasses import dataclass, field

from pipeline.rows import Row

_MOST_ONE_BY_ONE = 8
# assumed: so many rows of a minute or two each are no long end of a run
_GROUP_ROWS = 16
# assumed: one more death costs minutes, and leaves so many to be tried alone


@dataclass(slots=True, kw_only=True)
class Suspects:
    """Rows of one worker, tried after the others."""

    max_deaths: int
    """A row in flight at so many deaths is a suspect."""
    _rows: deque[Row] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._rows)

    def accuses(self, row: Row) -> bool:
        """Whether the row is one of them, held here or in flight."""
        return row.deaths >= self.max_deaths

    def add(self, row: Row) -> None:
        self._rows.append(row)

    def clear(self) -> None:
        self._rows.clear()

    def next_together(self, most: int) -> list[Row]:
        """Take what may be in flight at once, beside nothing else.

        Many that were in flight at the same few deaths cannot all be guilty: they go in groups. One
        at whose side a group died too goes alone.
        """
        bystanders = [row for row in self._rows if row.deaths == self.max_deaths]
        if len(bystanders) <= _MOST_ONE_BY_ONE:
            return [self._rows.popleft()]
        group = bystanders[: min(_GROUP_ROWS, most)]
        taken = {row.number for row in group}
        self._rows = deque(row for row in self._rows if row.number not in taken)
        return group
