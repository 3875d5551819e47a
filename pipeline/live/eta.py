"""The time left of a running job, estimated in a thread of the driver.

It is the one figure that the progress line, `jobs.status`, the report, the metrics and the notices
show. An error in the estimate is logged and never ends the run.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date

from pipeline.errors import PipelineError
from pipeline.live.estimate import expectation
from pipeline.live.log import LiveLog
from pipeline.live.update import Expectation, RowCounts, run_update
from pipeline.store.folder import Folder
from schemas.config.run_file import RunFile
from schemas.estimate import Band, RunUpdate
from schemas.progress import Progress
from schemas.units import SECONDS_PER_DAY

NewerLog = Callable[[int], LiveLog | None]
"""Returns the log if it has more readings than this, else None."""

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 1.5, 10.0
_WAIT_AFTER_ERROR_S = 60.0
# Wait over the time that an estimate takes, so that it uses at most 5 % of a core.
_WAIT_PER_ESTIMATE = 20.0
# The driver waits at most this long for an estimate under way when the run ends.
_JOIN_S = 2.0
# From the last answer to the end of the run: its part is published and the engines are ended.
# measured: 0.5 to 4 s on local folders
_CLOSING = Band(p10=0.5, p50=1.5, p90=4.0).times(1 / SECONDS_PER_DAY)
# Time that has passed since the estimate reduces it, but not below this share.
_LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """An estimate and when it was made, by a monotonic clock."""

    days: Band
    made_s: float

    def at(self, now_s: float) -> Band:
        """Return what is left of it."""
        return days_left_after(self.days, now_s - self.made_s)


def days_left_after(days: Band, passed_s: float) -> Band:
    """Return what is left of an estimate of the days left, so many seconds after it was made."""
    passed = max(passed_s, 0.0) / SECONDS_PER_DAY
    p10, p50, p90 = (
        max(each - passed, _LEAST_SHARE * each) for each in (days.p10, days.p50, days.p90)
    )
    return Band(p10=p10, p50=p50, p90=p90)


@dataclass(slots=True, kw_only=True)
class LiveEta:
    """The latest estimate of the days left. The driver calls `follow` and `take_events`."""

    folder: Folder
    config: RunFile
    today: date
    newer_log: NewerLog
    clock: Callable[[], float]
    """Monotonic seconds."""
    _figure: _Figure | None = None
    _log: LiveLog | None = None
    _rows: RowCounts | None = None
    _followed_s: float = 0.0
    _launched: str | None = None
    _expectation: Expectation | None = None
    _events: deque[str] = field(default_factory=deque)
    _logged: set[str] = field(default_factory=set)
    _took_s: float = 0.0
    """Time that the last estimate took."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _wake: threading.Event = field(default_factory=threading.Event)
    """Set when the next estimate should not wait."""

    @property
    def days_left(self) -> Band | None:
        """The latest estimate, less the time since; None while it is unknown."""
        figure = self._figure
        return figure.at(self.clock()) if figure else None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Estimate from time to time until the block ends."""
        thread = threading.Thread(target=self._estimate_forever, name="live-estimate", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._wake.set()
            thread.join(_JOIN_S)

    def follow(self, progress: Progress) -> None:
        """Use this progress for the next estimate."""
        had_open_rows = self._rows is None or self._rows.rows_open > 0
        plans = (worker.plan for worker in progress.workers if worker.plan)
        self._launched = next(plans, self._launched)
        self._rows = RowCounts(
            rows_total=progress.rows_total,
            rows_done=progress.rows_done,
            rows_failed=progress.rows_failed,
            rows_unpublished=sum(worker.unflushed for worker in progress.workers),
            rows_held=progress.rows_held,
            counted_at_s=progress.updated_at_s,
        )
        self._followed_s = self.clock()
        if had_open_rows and not self._rows.rows_open:
            self._wake.set()

    def take_events(self) -> list[str]:
        """Return log lines since the last call; each deviation is logged once."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _estimate_forever(self) -> None:
        wait_s = _SHORTEST_WAIT_S
        while not self._stop.is_set():
            self._wake.wait(wait_s)
            self._wake.clear()
            try:
                self.estimate()
            except (PipelineError, OSError) as error:
                wait_s = _WAIT_AFTER_ERROR_S
                self._log_once(str(error), f"event=no_estimate why={str(error)!r}")
                continue
            wait_s = self.next_wait_s

    @property
    def next_wait_s(self) -> float:
        """Wait before the next estimate; the time that the plan took does not count."""
        return min(max(_WAIT_PER_ESTIMATE * self._took_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)

    def estimate(self) -> RunUpdate | None:
        """Make the estimate once; None before there is a reading."""
        num_seen = self._log.num_added if self._log is not None else 0
        log = self._log = self.newer_log(num_seen) or self._log
        if log is None or not log.readings or self._rows is None:
            return None
        if self._expectation is None:
            self._expectation = expectation(
                self.folder, self.config, today=self.today, launched=self._launched
            )
        rows, made_s = self._rows, self._followed_s
        began_s = self.clock()
        update = run_update(log, self.config, rows, self._expectation)
        self._took_s = self.clock() - began_s
        days = update.days_left
        self._figure = _Figure(days=days.plus(_CLOSING), made_s=made_s) if days else None
        for each in update.deviations:
            line = f"event=deviates_from_plan input={each.input} why={each.sentence!r}"
            self._log_once(each.input, line)
        return update

    def _log_once(self, key: str, line: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            self._events.append(line)
