"""Rows to read, in groups: errors and failures first, then flags, the slowest and a sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.report.rows.examples import Example
from pipeline.report.rows.figures import RowFigures
from pipeline.store.folder import Folder

_MOST_FAILED = 40

GroupKind = Literal["error", "failed", "flag", "slowest", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleGroup:
    """Rows of one kind."""

    kind: GroupKind
    flag: str | None = None
    examples: tuple[Example, ...]
    total: int
    """Rows of this kind in the run."""

    @property
    def num_left_out(self) -> int:
        return self.total - len(self.examples)


def example_groups(
    folder: Folder, rows: RowFigures, failed: Sequence[tuple[str, int, str]]
) -> tuple[ExampleGroup, ...]:
    """Read the texts of the chosen rows; groups without a row are left out.

    `failed` has row id, sample index and cause of the rows that used up their attempts.
    """
    picks, book = rows.picks, rows.examples
    book.read(folder, picks.all())
    groups = [
        ExampleGroup(kind="error", examples=tuple(book.of(picks.errors)), total=picks.num_errors),
        ExampleGroup(
            kind="failed",
            examples=tuple(book.failed(folder, failed[:_MOST_FAILED])),
            total=len(failed),
        ),
    ]
    groups += [
        ExampleGroup(
            kind="flag",
            flag=flag,
            examples=tuple(book.of(picks.by_flag[flag])),
            total=picks.num_flagged[flag],
        )
        for flag in sorted(picks.by_flag)
    ]
    groups += [
        ExampleGroup(kind="slowest", examples=tuple(book.of(picks.slowest)), total=rows.num_rows),
        ExampleGroup(kind="random", examples=tuple(book.of(picks.random)), total=picks.num_ok),
    ]
    return tuple(group for group in groups if group.examples)
