"""Count failed attempts and starts of one engine: when to ask again, when to give up. Pure.

A single failed attempt says nothing about the engine; many in a row, or nearly all of many, do.
"""

import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.worker.row import Row
from schemas.completion import Interruption
from schemas.config.engine import EngineConfig
from schemas.config.running import RetryConfig

# assumed: this many rows of a minute or two each do not prolong a run
_MAX_ONE_BY_ONE = 8
# assumed: one more death costs minutes, and leaves this many rows to be tried alone
_GROUP_ROWS = 16

_MAX_FIRST_STARTS = 2
# assumed: an engine that is killed by chance dies less often; each death costs its running rows
_MOST_STARTS_OF_LATE = 20
_STARTS_OF_LATE_S = 6 * 3600.0
# Time after which an engine that is busy or away leaves its rows to others, and after which it does
# so again. assumed: a burst of refusals is over by then; a probe needs some seconds
_LEAVES_ROWS_AFTER_S, _LEAVES_AGAIN_AFTER_S = 10.0, 3.0
_MOST_REST_S = 30.0
_SICK_ATTEMPTS = 200
# assumed: a server that is only overloaded answers more than a tenth of its requests
_SICK_FRACTION = 0.9


@dataclass(slots=True)
class Starts:
    """Starts of one engine since its last finished row."""

    count: int = 0
    _plan: str | None = None
    _at_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_STARTS_OF_LATE + 1))

    def note_start(self, plan: str | None, *, now_s: float) -> int:
        """Count one. Launch flags that changed count anew: the ladder has a bound of its own."""
        self.count = self.count + 1 if plan == self._plan else 1
        self._plan = plan
        self._at_s.append(now_s)
        return self.count

    def are_too_frequent(self, now_s: float) -> bool:
        """Return whether there were too many of late, whatever was finished in between."""
        recent = [at_s for at_s in self._at_s if now_s - at_s <= _STARTS_OF_LATE_S]
        return len(recent) > _MOST_STARTS_OF_LATE

    def reset(self) -> None:
        self.count = 0


def is_out_of_starts(engine: EngineConfig, *, is_first: bool, attempts: int, lost_s: float) -> bool:
    """Return whether an engine that fails to start is abandoned."""
    if engine.kind == "endpoint":
        return is_first or lost_s > engine.outage_patience_s
    return attempts >= (_MAX_FIRST_STARTS if is_first else engine.max_restarts)


@dataclass(slots=True, kw_only=True)
class Attempts:
    """Outcomes of requests since the engine's last start."""

    retry: RetryConfig
    max_consecutive_failures: int
    outage_patience_s: float
    num_consecutive_failures: int = 0
    held_until_s: float = 0.0
    """Time before which nothing is sent, because the engine asked for that."""
    _num_busy: int = 0
    """Attempts since the last answer that the engine was too busy for, or away."""
    _busy_since_s: float | None = None
    _leaves_rows_at_s: float = math.inf
    _num_rests: int = 0
    """Times since the last answer that the rows were left to others."""
    _failed: deque[bool] = field(default_factory=lambda: deque(maxlen=_SICK_ATTEMPTS))
    _jitter: random.Random = field(default_factory=random.Random)

    def note_answer(self) -> None:
        self.num_consecutive_failures = 0
        self._forget_outage()
        self._failed.append(False)

    def note_failure(self, outcome: Interruption, *, now_s: float) -> str | None:
        """Count one. Return why the engine must be restarted, or None while it may be well."""
        if outcome.is_engines:
            return self._note_busy(outcome, now_s)
        self.num_consecutive_failures += 1
        self._failed.append(True)
        if self.num_consecutive_failures >= self.max_consecutive_failures:
            return (
                f"{self.num_consecutive_failures} requests failed in a row, the last with: "
                f"{outcome.cause}"
            )
        num_failed = sum(self._failed)
        # A server that asks for a wait is busy, not sick.
        if num_failed > _SICK_FRACTION * _SICK_ATTEMPTS and not outcome.retry_after_s:
            return (
                f"{num_failed} of {_SICK_ATTEMPTS} requests failed, the last with: {outcome.cause}"
            )
        return None

    def _note_busy(self, outcome: Interruption, now_s: float) -> str | None:
        """An engine that is busy or away is waited for, and not sick."""
        self._num_busy += 1
        if self._busy_since_s is None:
            self._busy_since_s = now_s
        if outcome.kind != "denial":
            # One that denies everything is probed, and leaves the run.
            self._leaves_rows_at_s = min(self._leaves_rows_at_s, now_s + _LEAVES_ROWS_AFTER_S)
        busy_s = now_s - self._busy_since_s
        if busy_s <= self.outage_patience_s:
            return None
        return f"no answer for {busy_s:,.0f} s, the last with: {outcome.cause}"

    def is_to_leave_rows(self, now_s: float) -> bool:
        """Return whether other engines, if there are any, should get the rows of this one."""
        return now_s >= self._leaves_rows_at_s

    def rest(self, now_s: float) -> float:
        """Send nothing for a while, longer each time; return the seconds."""
        self._num_rests += 1
        wait_s = min(_MOST_REST_S, _LEAVES_AGAIN_AFTER_S * 2.0**self._num_rests)
        self.held_until_s = now_s + wait_s
        self._leaves_rows_at_s = self.held_until_s + _LEAVES_AGAIN_AFTER_S
        return wait_s

    def _forget_outage(self) -> None:
        self._num_busy, self._busy_since_s = 0, None
        self._num_rests, self._leaves_rows_at_s = 0, math.inf

    def hold_if_refused(
        self, outcome: Interruption, *, max_running_requests: int, now_s: float
    ) -> None:
        """Send nothing for a while to an engine that refuses all requests and says how long."""
        num_refused = self.num_consecutive_failures + self._num_busy
        if outcome.retry_after_s and num_refused >= max_running_requests:
            wait_s = min(outcome.retry_after_s, self.retry.retry_after_max_s)
            self.held_until_s = now_s + wait_s

    def reset(self) -> None:
        """Forget the outcomes of before a restart."""
        self.num_consecutive_failures = 0
        self._forget_outage()
        self._failed.clear()

    def backoff_s(self, num_attempts: int, retry_after_s: float | None) -> float:
        """Draw the wait before the next attempt: exponential, with jitter that spreads rows."""
        retry = self.retry
        backoff_s = min(retry.backoff_max_s, retry.backoff_initial_s * 2.0 ** (num_attempts - 1))
        asked_s = min(retry_after_s or 0.0, retry.retry_after_max_s)
        return max(asked_s, backoff_s) * self._jitter.uniform(1.0 if asked_s else 0.5, 1.1)


@dataclass(slots=True, kw_only=True)
class Suspects:
    """Rows that were in flight at engine deaths; they are sent after all others."""

    max_deaths: int
    """Deaths in flight from which a row is a suspect."""
    _rows: deque[Row] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def is_suspect(self, row: Row) -> bool:
        """Return whether the row is a suspect, wherever it is."""
        return row.deaths >= self.max_deaths

    def add(self, row: Row) -> None:
        self._rows.append(row)

    def clear(self) -> None:
        self._rows.clear()

    def take_together(self, max_rows: int) -> list[Row]:
        """Take the rows to send together, with nothing else in flight.

        Many rows that were in flight at the same few deaths cannot all be guilty: they go in
        groups. A row whose group died too goes alone.
        """
        bystanders = [row for row in self._rows if row.deaths == self.max_deaths]
        if len(bystanders) <= _MAX_ONE_BY_ONE:
            return [self._rows.popleft()]
        group = bystanders[: min(_GROUP_ROWS, max_rows)]
        taken = {row.number for row in group}
        self._rows = deque(row for row in self._rows if row.number not in taken)
        return group
