"""Time in which a run worked, and its pauses. Pure; times are seconds since the run began."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

PauseReason = Literal[
    "start",
    "between sessions",
    "waiting for an engine",
    "waiting for the store",
    "publishing the last rows",
    "no requests",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A stretch in which no engine had a request."""

    start_s: float
    end_s: float
    reason: PauseReason

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTime:
    """Clock that stands still in pauses, which rates leave out."""

    pauses: Sequence[Pause] = ()
    """Pauses in order of time, without overlaps."""
    _starts: list[float] = field(init=False)
    _paused: list[float] = field(init=False)
    """Seconds of pauses before each pause."""

    def __post_init__(self) -> None:
        lengths = [pause.length_s for pause in self.pauses]
        object.__setattr__(self, "_starts", [pause.start_s for pause in self.pauses])
        object.__setattr__(self, "_paused", [0.0, *accumulate(lengths)])

    def worked_s(self, from_s: float, until_s: float) -> float:
        """Return the seconds of work between two times."""
        return max(self._until(until_s) - self._until(from_s), 0.0)

    def last_worked(self, at_s: float) -> float:
        """Return the time itself, or the start of the pause that it is in."""
        place = bisect_right(self._starts, at_s) - 1
        if place >= 0 and at_s < self.pauses[place].end_s:
            return self.pauses[place].start_s
        return at_s

    def _until(self, at_s: float) -> float:
        place = bisect_right(self._starts, at_s) - 1
        if place < 0:
            return at_s
        inside_s = min(at_s, self.pauses[place].end_s) - self.pauses[place].start_s
        return at_s - self._paused[place] - inside_s


ALL_WORK = WorkTime()
