"""Shard and Lease: a range of rows, and one worker's right to it.

A row is numbered `prompt_number * samples_per_prompt + sample_index` within the frozen prompts of
this session; numbers are never written to the output, where only the row id counts.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Rows `start` to `stop`, the last one not included."""

    shard_id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseKey:
    """Names one lease of one shard. `attempt` rises with each lease and fences late publishers."""

    shard_id: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """`rows` of a shard, in order, for one worker; rows already done are left out."""

    key: LeaseKey
    worker_id: str
    rows: tuple[int, ...]
    deaths: tuple[tuple[int, int], ...] = ()
    """Rows that were in flight when an engine died, with how often."""
