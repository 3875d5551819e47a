"""The time left of a running job, estimated in a thread of the driver.

It reads the folder as `jobs.estimate --update-from` does. An error in the estimate is logged and
never ends the run.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date

from pipeline.errors import PipelineError
from pipeline.live.estimate import expectation
from pipeline.live.log import read_live_log
from pipeline.live.update import Expectation, RowCounts, run_update
from pipeline.store.folder import Folder
from schemas.config.run_file import RunFile
from schemas.estimate import Band, RunUpdate
from schemas.progress import Progress
from schemas.units import SECONDS_PER_DAY

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 2.0, 60.0
# Age at which an estimate is due again, as a fraction of the time left.
_WAIT_SHARE = 0.05


@dataclass(slots=True, kw_only=True)
class LiveEta:
    """The latest estimate of the days left. The driver calls `follow` and `take_events`."""

    folder: Folder
    config: RunFile
    today: date
    days_left: Band | None = None
    _rows: RowCounts | None = None
    _launched: str | None = None
    _expectation: Expectation | None = None
    _events: deque[str] = field(default_factory=deque)
    _logged: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Estimate from time to time until the block ends."""
        threading.Thread(target=self._estimate_forever, name="live-estimate", daemon=True).start()
        try:
            yield
        finally:
            # The thread is a daemon: a calculation under way is not waited for.
            self._stop.set()

    def follow(self, progress: Progress) -> None:
        """Use this progress for the next estimate."""
        plans = (worker.plan for worker in progress.workers if worker.plan)
        self._launched = next(plans, self._launched)
        self._rows = RowCounts(
            rows_total=progress.rows_total,
            rows_done=progress.rows_done,
            rows_failed=progress.rows_failed,
            rows_unpublished=sum(worker.unflushed for worker in progress.workers),
            counted_at_s=progress.updated_at_s,
        )

    def take_events(self) -> list[str]:
        """Return log lines since the last call; each deviation is logged once."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _estimate_forever(self) -> None:
        wait_s = _SHORTEST_WAIT_S
        while not self._stop.wait(wait_s):
            try:
                update = self.estimate()
            except (PipelineError, OSError) as error:
                wait_s = _LONGEST_WAIT_S
                self._log_once(str(error), f"event=no_estimate why={str(error)!r}")
                continue
            if update is not None and update.days_left is not None:
                left_s = update.days_left.p50 * SECONDS_PER_DAY
                wait_s = min(max(left_s * _WAIT_SHARE, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)

    def estimate(self) -> RunUpdate | None:
        """Make the estimate once; None before there is a reading."""
        log = read_live_log(self.folder)
        if log is None or not log.readings or self._rows is None:
            return None
        if self._expectation is None:
            self._expectation = expectation(
                self.folder, self.config, today=self.today, launched=self._launched
            )
        update = run_update(log, self.config, self._rows, self._expectation)
        is_left = update.days_left is not None and update.days_left.p90 > 0
        self.days_left = update.days_left if is_left else None
        for each in update.disagreements:
            line = f"event=deviates_from_plan input={each.input} why={each.sentence!r}"
            self._log_once(each.input, line)
        return update

    def _log_once(self, key: str, line: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            self._events.append(line)
