"""Shard and lease: a range of rows, and one worker's right to it.

The number of a row is `prompt_number * samples_per_prompt + sample_index` in the frozen prompts of
this session. Numbers are never written to the output, where only the row id counts.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Rows from `start` up to and without `stop`."""

    shard_id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseKey:
    """Name of one lease of a shard. `attempt` rises with each lease and fences late publishers."""

    shard_id: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Open rows of a shard in order, for one worker."""

    key: LeaseKey
    worker_id: str
    rows: tuple[int, ...]
    deaths: tuple[tuple[int, int], ...] = ()
    """Rows that were in flight at deaths of an engine, with the number of deaths."""
    begun: tuple[tuple[int, str], ...] = ()
    """Rows that an engine before has begun, with the file in `partials/` that has them."""
    is_canary: bool = False
    """True if its rows are part of a canary."""
