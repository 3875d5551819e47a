"""How the tries of one engine end, and what follows from it: when to ask again, when to give up.

A single failed try says nothing of the engine; many in a row, or nearly all of many, do.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from pipeline.worker.row import Row
from schemas.completion import Interruption
from schemas.config import EngineConfig, RetryConfig

_MOST_ONE_BY_ONE = 8
# assumed: so many rows of a minute or two each are no long end of a run
_GROUP_ROWS = 16
# assumed: one more death costs minutes, and leaves so many to be tried alone

_FIRST_START_TRIES = 2
_SICK_TRIES = 200
_SICK_FRACTION = 0.9
# assumed: a server that is only overloaded answers more than a tenth of what it is asked


@dataclass(slots=True)
class Starts:
    """Starts of one engine since its last finished row."""

    count: int = 0
    _plan: str | None = None

    def started(self, plan: str | None) -> int:
        """Count one. Another launch than before counts anew: the ladder has a bound of its own."""
        self.count = self.count + 1 if plan == self._plan else 1
        self._plan = plan
        return self.count


def is_given_up(engine: EngineConfig, *, first: bool, tries: int, lost_s: float) -> bool:
    """Whether an engine that fails to start is not started again."""
    if engine.kind == "endpoint":
        return first or lost_s > engine.lost_after_s
    return tries >= (_FIRST_START_TRIES if first else engine.max_restarts)


@dataclass(slots=True, kw_only=True)
class Tries:
    """Tries since the engine's last start."""

    retry: RetryConfig
    max_consecutive_failures: int
    consecutive_failures: int = 0
    _failed: deque[bool] = field(default_factory=lambda: deque(maxlen=_SICK_TRIES))
    _jitter: random.Random = field(default_factory=random.Random)

    def note_answer(self) -> None:
        self.consecutive_failures = 0
        self._failed.append(False)

    def note_failure(self, outcome: Interruption) -> str | None:
        """Count one; why the engine is sick, or None while it may be well."""
        self.consecutive_failures += 1
        self._failed.append(True)
        if self.consecutive_failures >= self.max_consecutive_failures:
            return (
                f"{self.consecutive_failures} tries failed in a row, the last with: {outcome.cause}"
            )
        failed = sum(self._failed)
        # Who asks for a wait is busy, not sick.
        if failed > _SICK_FRACTION * _SICK_TRIES and not outcome.retry_after_s:
            return f"{failed} of {_SICK_TRIES} tries failed, the last with: {outcome.cause}"
        return None

    def start_anew(self) -> None:
        self.consecutive_failures = 0
        self._failed.clear()

    def backoff_s(self, tries: int, retry_after_s: float | None) -> float:
        """Exponential, with half of it left to chance so that rows do not return together."""
        retry = self.retry
        backoff_s = min(retry.backoff_max_s, retry.backoff_initial_s * 2.0 ** (tries - 1))
        asked_s = min(retry_after_s or 0.0, retry.retry_after_max_s)
        return max(asked_s, backoff_s) * self._jitter.uniform(1.0 if asked_s else 0.5, 1.1)


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
