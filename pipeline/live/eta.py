"""The time left of the job that runs, worked out beside it: a thread of the driver's.

It reads the folder as `jobs.estimate --update-from` does, and keeps what it finds for the driver's
next look. A run goes on whatever becomes of its estimate.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date

from pipeline.errors import PipelineError
from pipeline.live.estimate import Expectation, RowCounts, expectation, update
from pipeline.live.log import read_live_log
from pipeline.store.folder import Folder
from schemas.config import RunFile
from schemas.estimate import Band, RunUpdate
from schemas.progress import Progress
from schemas.units import SECONDS_PER_DAY

_FIRST_LOOK_S, _SELDOM_S = 2.0, 60.0
_PART_OF_TIME_LEFT = 0.05  # a figure that is so much older than itself is worked out anew


@dataclass(slots=True, kw_only=True)
class LiveEta:
    """Days left, as far as known. `follow` and `events` are the driver's to call."""

    folder: Folder
    config: RunFile
    today: date
    days_left: Band | None = None
    """The last figure."""
    _rows: RowCounts | None = None
    _launched: str | None = None
    _expected: Expectation | None = None
    _events: deque[str] = field(default_factory=deque)
    _told: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Look at the readings now and then until the block ends."""
        threading.Thread(target=self._look_forever, name="live-estimate", daemon=True).start()
        try:
            yield
        finally:
            # It may be in the middle of a sum, which nothing waits for.
            self._stop.set()

    def follow(self, progress: Progress) -> None:
        """What the progress says goes into the next figure."""
        plans = (worker.plan for worker in progress.workers if worker.plan)
        self._launched = next(plans, self._launched)
        self._rows = RowCounts(
            rows_total=progress.rows_total,
            rows_done=progress.rows_done,
            rows_failed=progress.rows_failed,
            rows_unpublished=sum(worker.unflushed for worker in progress.workers),
        )

    def events(self) -> list[str]:
        """What there is to log since the last call: each disagreement once."""
        told = []
        while self._events:
            told.append(self._events.popleft())
        return told

    def _look_forever(self) -> None:
        wait_s = _FIRST_LOOK_S
        while not self._stop.wait(wait_s):
            try:
                found = self.look()
            except (PipelineError, OSError) as error:
                wait_s = _SELDOM_S
                self._tell_once(str(error), f"event=no_estimate why={str(error)!r}")
                continue
            if found is not None:
                left_s = found.days_left.p50 * SECONDS_PER_DAY
                wait_s = min(max(left_s * _PART_OF_TIME_LEFT, _FIRST_LOOK_S), _SELDOM_S)

    def look(self) -> RunUpdate | None:
        """Work the figures out once; None before there is a reading."""
        log = read_live_log(self.folder)
        if log is None or not log.readings or self._rows is None:
            return None
        if self._expected is None:
            self._expected = expectation(
                self.folder, self.config, today=self.today, launched=self._launched
            )
        found = update(log, self.config, self._rows, self._expected)
        self.days_left = found.days_left if found.days_left.p90 > 0 else None
        for each in found.disagreements:
            line = f"event=differs_from_dry_run input={each.input} why={each.sentence!r}"
            self._tell_once(each.input, line)
        return found

    def _tell_once(self, key: str, line: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._events.append(line)
