"""Cut rows into shards, and the ledger of who works on which. Pure: time arrives as `now_s`.

Invariant: a shard is pending, leased to one worker, complete, or failed. The rows of a lost lease
that are not published go back to pending. A lease's attempt rises each time its shard is leased,
and rows that arrive under an older attempt are refused. Rows that failed by themselves and leases
that were lost with their worker are counted separately.
"""

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from schemas.shard import Lease, LeaseKey, Shard

PENDING, DONE, FAILED, LATER = 0, 1, 2, 3
"""States of a row, one byte each. LATER rows are open too, and leased after a canary's."""

# assumed: a worker reads a few prompts from each of so many places in a moment
_CANARY_LEASE_ROWS = 16


def row_shards(num_rows: int, shard_rows: int) -> list[Shard]:
    """Cut rows 0 to `num_rows` into ranges of `shard_rows`; the last may be shorter."""
    starts = range(0, num_rows, shard_rows)
    return [
        Shard(shard_id=shard_id, start=start, stop=min(start + shard_rows, num_rows))
        for shard_id, start in enumerate(starts)
    ]


@dataclass(slots=True)
class _Entry:
    start: int
    stop: int
    state: Literal["pending", "leased", "complete", "failed"] = "pending"
    worker_id: str | None = None
    attempt: int = 0
    losses: int = 0
    num_open: int = 0
    """Rows that are neither done nor failed."""
    opens: int = PENDING
    """State of its open rows. A canary's rows have entries of their own over the same range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Counts of rows and shards by state, and of lost leases."""

    rows_total: int
    rows_done: int
    rows_failed: int
    shards_pending: int
    shards_leased: int
    leases_lost: int


@dataclass(slots=True)
class Ledger:
    """Shards and leases over `row_states`, a byte per row that is changed in place."""

    row_states: bytearray
    shard_rows: int
    lease_ttl_s: float
    max_shard_losses: int
    has_canary: bool = False
    """True if the pending rows are a canary's."""
    rows_done: int = 0
    rows_failed: int = 0
    leases_lost: int = 0
    deaths: dict[int, int] = field(default_factory=dict)
    """Row → engine deaths while it was in flight, those of earlier sessions included."""
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _pending: deque[int] = field(default_factory=deque)
    _leased_by: dict[str, set[int]] = field(default_factory=dict)
    _last_seen_s: dict[str, float] = field(default_factory=dict)
    _next_shard_id: int = 0

    def __post_init__(self) -> None:
        self.rows_done = self.row_states.count(DONE)
        if LATER in self.row_states:
            num_canary = self.row_states.count(PENDING)
            num_leases = max(1, num_canary // _CANARY_LEASE_ROWS)
            self._add_entries(max(1, len(self.row_states) // num_leases), opens=PENDING)
            self._add_entries(self.shard_rows, opens=LATER)
        else:
            self._add_entries(self.shard_rows, opens=PENDING)

    # -- what workers ask for

    def lease(self, worker_id: str, *, now_s: float) -> Lease | None:
        """Lease the next pending shard, or return None when there is none."""
        self.renew(worker_id, now_s=now_s)
        if not self._pending:
            return None
        shard_id = self._pending.popleft()
        entry = self._entries[shard_id]
        entry.state, entry.worker_id = "leased", worker_id
        entry.attempt += 1
        self._leased_by.setdefault(worker_id, set()).add(shard_id)
        key = LeaseKey(shard_id=shard_id, attempt=entry.attempt)
        rows = tuple(self._open_rows(entry))
        deaths = tuple((row, self.deaths[row]) for row in rows if row in self.deaths)
        is_canary = self.has_canary and entry.opens == PENDING
        return Lease(key=key, worker_id=worker_id, rows=rows, deaths=deaths, is_canary=is_canary)

    def put_first(self, rows: Collection[int]) -> None:
        """Move the pending shards of these rows before others; those of a canary stay first."""
        firsts = sorted(rows)

        def is_later(shard_id: int) -> tuple[bool, bool]:
            entry = self._entries[shard_id]
            has_some = bisect_left(firsts, entry.start) < bisect_left(firsts, entry.stop)
            return self.has_canary and entry.opens == LATER, not has_some

        self._pending = deque(sorted(self._pending, key=is_later))

    def is_open(self, row: int) -> bool:
        return self.row_states[row] in (PENDING, LATER)

    def renew(self, worker_id: str, *, now_s: float) -> None:
        self._last_seen_s[worker_id] = now_s

    def pass_over(self, duration_s: float) -> None:
        """Exclude a time in which no worker could be heard from their silence."""
        for worker_id in self._last_seen_s:
            self._last_seen_s[worker_id] += duration_s

    def stale_rows(self, rows: Iterable[tuple[LeaseKey, int]]) -> set[tuple[LeaseKey, int]]:
        """Return the rows that may not be published: done, or under a lease that is not current.

        Each row is returned with its lease: a worker may have a row twice, finished under a lease
        that it gave back and again under the current one.
        """
        return {(key, row) for key, row in rows if not self._holds(key, row)}

    def have_later_ones(self, rows: Iterable[tuple[LeaseKey, int]]) -> bool:
        """Return whether some of the rows are none of the canary's."""
        return any(self.row_states[row] == LATER for _, row in rows)

    def mark_done(self, rows: Sequence[tuple[LeaseKey, int]]) -> None:
        """Mark published rows. Raises ValueError for a row whose lease is not current."""
        for key, row in rows:
            if not self._holds(key, row):
                raise ValueError(f"row {row} is not held by lease {key}")
            self.row_states[row] = DONE
            self.rows_done += 1
            self._entries[key.shard_id].num_open -= 1
        self._settle({key.shard_id for key, _ in rows})

    def set_aside(self, key: LeaseKey, row: int) -> bool:
        """Mark a row that used up its attempts as failed. Return False for a stale lease."""
        if not self._holds(key, row):
            return False
        self.row_states[row] = FAILED
        self.rows_failed += 1
        self._entries[key.shard_id].num_open -= 1
        self._settle({key.shard_id})
        return True

    def give_back(self, key: LeaseKey, first_row: int) -> int:
        """Make the rows of a lease from `first_row` on a pending shard of their own.

        Returns the number of rows; 0 when the lease is not current.
        """
        if not self._is_current(key):
            return 0
        entry = self._entries[key.shard_id]
        if not entry.start <= first_row < entry.stop:
            return 0
        tail = self._entry(first_row, entry.stop, losses=entry.losses, opens=entry.opens)
        entry.stop = first_row
        entry.num_open -= tail.num_open
        if tail.num_open:
            self._entries[self._next_shard_id] = tail
            self._pending.appendleft(self._next_shard_id)
            self._next_shard_id += 1
        self._settle({key.shard_id})
        return tail.num_open

    # -- what happens to workers

    def worker_lost(self, worker_id: str) -> list[int]:
        """Return the leases of a lost worker to pending, ahead of the rest.

        Returns the rows of shards that lost too many workers: they are marked as failed.
        """
        failed: list[int] = []
        self._last_seen_s.pop(worker_id, None)
        for shard_id in sorted(self._leased_by.pop(worker_id, set()), reverse=True):
            entry = self._entries[shard_id]
            entry.worker_id = None
            entry.losses += 1
            self.leases_lost += 1
            if entry.losses < self.max_shard_losses:
                entry.state = "pending"
                self._pending.appendleft(shard_id)
                continue
            entry.state = "failed"
            rows, entry.num_open = self._open_rows(entry), 0
            for row in rows:
                self.row_states[row] = FAILED
            self.rows_failed += len(rows)
            failed += rows
        return failed

    def engine_died(self, rows: Iterable[tuple[LeaseKey, int]]) -> list[int]:
        """Count a death on the rows that were in flight; one of them may have killed the engine.

        Returns the rows that were counted: those with a current lease.
        """
        counted = sorted(row for key, row in rows if self._holds(key, row))
        for row in counted:
            self.deaths[row] = self.deaths.get(row, 0) + 1
        return counted

    def worker_left(self, worker_id: str) -> None:
        """Return the leases of a worker that ended by itself to pending, without a loss."""
        self._last_seen_s.pop(worker_id, None)
        for shard_id in sorted(self._leased_by.pop(worker_id, set()), reverse=True):
            entry = self._entries[shard_id]
            entry.state, entry.worker_id = "pending", None
            self._pending.appendleft(shard_id)

    def silent_workers(self, *, now_s: float) -> list[str]:
        """Return workers with leases that sent nothing for `lease_ttl_s`."""
        return [
            worker_id
            for worker_id, shard_ids in self._leased_by.items()
            if shard_ids and now_s - self._last_seen_s[worker_id] > self.lease_ttl_s
        ]

    # -- progress

    @property
    def is_over(self) -> bool:
        return self.rows_done + self.rows_failed == len(self.row_states)

    @property
    def has_open_canary_rows(self) -> bool:
        """Return whether any row of the canary is leased, or may still be."""
        return any(entry.num_open for entry in self._entries.values() if entry.opens == PENDING)

    def counts(self) -> LedgerCounts:
        return LedgerCounts(
            rows_total=len(self.row_states),
            rows_done=self.rows_done,
            rows_failed=self.rows_failed,
            shards_pending=len(self._pending),
            shards_leased=sum(map(len, self._leased_by.values())),
            leases_lost=self.leases_lost,
        )

    # -- inside

    def _add_entries(self, shard_rows: int, *, opens: int) -> None:
        for shard in row_shards(len(self.row_states), shard_rows):
            entry = self._entry(shard.start, shard.stop, opens=opens)
            shard_id, self._next_shard_id = self._next_shard_id, self._next_shard_id + 1
            self._entries[shard_id] = entry
            if entry.num_open:
                self._pending.append(shard_id)
            else:
                entry.state = "complete"

    def _entry(self, start: int, stop: int, *, losses: int = 0, opens: int = PENDING) -> _Entry:
        num_open = self.row_states.count(opens, start, stop)
        return _Entry(start=start, stop=stop, losses=losses, num_open=num_open, opens=opens)

    def _open_rows(self, entry: _Entry) -> list[int]:
        rows = range(entry.start, entry.stop)
        return [row for row in rows if self.row_states[row] == entry.opens]

    def _is_current(self, key: LeaseKey) -> bool:
        entry = self._entries.get(key.shard_id)
        return entry is not None and entry.state == "leased" and entry.attempt == key.attempt

    def _holds(self, key: LeaseKey, row: int) -> bool:
        if not self._is_current(key):
            return False
        entry = self._entries[key.shard_id]
        return entry.start <= row < entry.stop and self.row_states[row] == entry.opens

    def _settle(self, shard_ids: set[int]) -> None:
        """Close leased shards that have no open row left."""
        for shard_id in shard_ids:
            entry = self._entries[shard_id]
            if entry.state != "leased" or entry.num_open:
                continue
            entry.state = "complete"
            self._leased_by[str(entry.worker_id)].discard(shard_id)
            entry.worker_id = None


def put_canary_first(row_states: bytearray, num_rows: int, seed: int | None) -> int:
    """Draw `num_rows` open rows at random; all others are LATER. Return how many are drawn.

    The same seed and states give the same rows.
    """
    open_rows = [row for row, state in enumerate(row_states) if state == PENDING]
    if len(open_rows) <= num_rows:
        return len(open_rows)
    drawn = random.Random(seed or 0).sample(open_rows, num_rows)  # noqa: S311 - no secret
    for row in open_rows:
        row_states[row] = LATER
    for row in drawn:
        row_states[row] = PENDING
    return num_rows
