"""Rows of the input, and the bounds on how much of it is in memory."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.errors import ConfigError
from schemas.prompt import Problem
from schemas.units import MIB

# assumed: a prompt of two million tokens at four bytes each, which is longer than the context of
# the models that are served
MAX_ROW_BYTES = 8 * MIB
# Decoded rows that are in memory at a time.
BATCH_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be read."""

    problem: Problem
    content: str
    """Text that distinguishes the row from other bad rows: its id is a hash of it."""
    values: dict[str, object] = field(default_factory=dict)
    """Columns that can be read all the same."""


Row = dict[str, object] | BadRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """Rows of one file of the input."""

    where: str
    columns: tuple[str, ...] | None
    """Column names; None where each row has its own."""
    arrow_schema: object | None
    """The columns' types (a pyarrow.Schema); None where only the rows show them."""
    rows: Callable[[list[str], object | None], Iterator[Row]]
    """Iterate once over the named columns, cast to the types of a schema if one is given."""


def check_names_differ(names: Sequence[str], where: str) -> None:
    """Raise ConfigError for two columns of one name, of which a row could have only one."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ConfigError(f"prompts.path: {where} has two columns named {repeated[0]!r}")


def unreadable(text: str, content: str) -> BadRow:
    return BadRow(problem=Problem(kind="unreadable", text=text), content=content)


def too_large(where: str, num_bytes: int, content: str, values: dict[str, object]) -> BadRow:
    text = f"{where}: the row has {num_bytes:,} bytes; at most {MAX_ROW_BYTES:,} are read"
    return BadRow(problem=Problem(kind="too_large", text=text), content=content, values=values)
