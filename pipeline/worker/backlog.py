"""Rows that a worker has leased and not finished: in line, backing off, suspect, or in flight.

A row that backs off gives its place to another. Suspects are sent last, with nothing beside them.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field

from pipeline.worker.retries import Suspects
from pipeline.worker.row import Row
from schemas.shard import LeaseKey

# assumed: rows that back off for minutes are few; beyond this many no new ones are leased
_MAX_DELAYED_PER_RUNNING = 8


@dataclass(slots=True, kw_only=True)
class Backlog:
    """Rows that wait to be sent. Pure: time arrives as `now_s`."""

    suspects: Suspects
    _line: deque[Row] = field(default_factory=deque)
    _delayed: list[tuple[float, int, Row]] = field(default_factory=list)
    """Heap of due time, a tie-breaker and the row."""
    _num_delays: int = 0

    @property
    def num_waiting(self) -> int:
        """Rows that could be sent at once, suspects included."""
        return len(self._line) + len(self.suspects)

    @property
    def has_canary_rows(self) -> bool:
        delayed = (row for _, _, row in self._delayed)
        return any(row.is_canary for row in (*self._line, *self.suspects, *delayed))

    @property
    def num_delayed(self) -> int:
        return len(self._delayed)

    @property
    def num_not_started(self) -> int:
        return sum(not row.started_at_s for row in self._line)

    def __len__(self) -> int:
        return self.num_waiting + self.num_delayed

    def is_short(self, max_running_requests: int) -> bool:
        """Return whether fewer rows are in line than the engine can run."""
        return len(self._line) < max_running_requests

    def has_many_delayed(self, max_running_requests: int) -> bool:
        """Return whether so many rows back off that no new ones should be leased."""
        return len(self._delayed) > _MAX_DELAYED_PER_RUNNING * max_running_requests

    def __iter__(self) -> Iterator[Row]:
        return iter([*self._line, *self.suspects, *(row for _, _, row in self._delayed)])

    def add(self, row: Row) -> None:
        """Put a row at the end of the line, or among the suspects; begun rows go first."""
        if self.suspects.is_suspect(row):
            self.suspects.add(row)
        elif row.has_begun:
            self._line.appendleft(row)
        else:
            self._line.append(row)

    def delay(self, row: Row, until_s: float) -> None:
        self._num_delays += 1
        heapq.heappush(self._delayed, (until_s, self._num_delays, row))

    def wake(self, now_s: float) -> None:
        """Put the rows whose delay is over at the head of the line."""
        while self._delayed and self._delayed[0][0] <= now_s:
            row = heapq.heappop(self._delayed)[2]
            if self.suspects.is_suspect(row):
                self.suspects.add(row)
            else:
                self._line.appendleft(row)

    def take_next(self, in_flight: "InFlight", max_running_requests: int) -> list[Row]:
        """Take the rows to send next: from the line, or suspects once nothing else is left."""
        if self.has_suspects(in_flight):
            # Nothing may join them: if the engine dies, one of them killed it.
            return []
        if self.suspects and not (self._line or self._delayed or in_flight):
            return self.suspects.take_together(max_running_requests)
        room = max_running_requests - len(in_flight)
        return [self._line.popleft() for _ in range(min(room, len(self._line)))]

    def has_suspects(self, in_flight: "InFlight") -> bool:
        """Return whether suspects are in flight: they never are beside other rows."""
        return in_flight.oldest is not None and self.suspects.is_suspect(in_flight.oldest)

    def take_unstarted(self, max_rows: int) -> dict[LeaseKey, int]:
        """Drop rows that were never sent from the end of the line, and keep half of the line.

        Return the first row that is dropped of each lease.
        """
        num_rows = min(max_rows, len(self._line) // 2)
        first: dict[LeaseKey, int] = {}
        while num_rows > 0 and not self._line[-1].started_at_s:
            row = self._line.pop()
            first[row.key] = row.number
            num_rows -= 1
        return first

    def clear(self) -> None:
        self._line.clear()
        self._delayed.clear()
        self.suspects.clear()


@dataclass(slots=True, kw_only=True)
class InFlight:
    """Rows that the engine works on, each in a task of its own."""

    wake: asyncio.Event
    """Set when a task ends."""
    cut_off: list[Row] = field(default_factory=list)
    """Rows whose request ended without an outcome because the engine was lost or stopped."""
    _rows: dict[asyncio.Task[None], Row] = field(default_factory=dict)
    _fault: BaseException | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    @property
    def oldest(self) -> Row | None:
        return next(iter(self), None)

    @property
    def has_canary_rows(self) -> bool:
        return any(row.is_canary for row in self)

    def send(self, row: Row, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._rows[task] = row
        task.add_done_callback(self._note_end)

    def raise_fault(self) -> None:
        """Raise the first error of a row's task: a fault of ours ends the worker, loudly."""
        if self._fault is not None:
            raise self._fault

    def cancel(self) -> None:
        for task in list(self._rows):
            task.cancel()

    async def wait_for_end(self, timeout_s: float) -> None:
        """Wait until all rows have ended, or the time is up."""
        if self._rows:
            await asyncio.wait(list(self._rows), timeout=timeout_s)

    async def cancel_and_wait(self) -> None:
        tasks = list(self._rows)
        self.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        self._rows.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = error
        self.wake.set()
