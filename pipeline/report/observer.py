"""Observer of a running run: writes the events file and the report, and posts to the webhook.

It lives in the driver. Nothing in here ends a run or delays it: failures are logged, a thread
writes the report, and the wait at the end is bounded.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from pipeline.dataset.run_record import write_run_file
from pipeline.errors import DriverLostError, PipelineError
from pipeline.report.page import report_page
from pipeline.report.report import run_report
from pipeline.report.rows.figures import RowFigures
from pipeline.report.webhook import Notice, Webhook
from pipeline.store.folder import Folder
from pipeline.store.journal import RunEvent, append_events, event_of, read_events, trim_events
from pipeline.store.run_folder import REPORT_FILE
from schemas.config.run_file import RunFile
from schemas.estimate import Band
from schemas.progress import Progress, RunState
from schemas.units import SECONDS_PER_DAY

REPORT_INTERVAL_S = 180.0
_FIRST_REPORT_S = 20.0
_TRIM_EVERY = 1_000
# Characters of the cause of a failed run.
_MAX_CAUSE_CHARACTERS = 400

Ending = Literal["done", "stopped", "failed"]
# Kind of event → name of its notice.
NOTICES = {
    "canary_failed": "canary_failed",
    "engine_drained": "engine_drained",
    "every_engine_over_limit": "every_engine_over_limit",
    "step_down": "engine_stepped_down",
    "run_done": "run_done",
    "run_stopped": "run_stopped",
    "run_failed": "run_failed",
}
_ENDINGS = ("run_done", "run_stopped", "run_failed")
# After a signal `ray job stop` kills within 3 s, and all rows are published by then.
_WEBHOOK_WAIT_S = {"done": 5.0, "failed": 5.0, "stopped": 0.5}
_REPORT_WAIT_S = {"done": 60.0, "failed": 60.0, "stopped": 0.5}


@dataclass(slots=True, kw_only=True)
class Observer:
    """Observer of one session. The driver calls `see` and `finish`."""

    folder: Folder
    run_id: str
    clock: Callable[[], float]
    log: Callable[[str], None]
    webhook: Webhook | None = None
    report_interval_s: float = REPORT_INTERVAL_S
    first_report_s: float = _FIRST_REPORT_S
    rows: tuple[int, int]
    """Last known counts of rows: done, total."""
    days_left: Band | None = None
    """Last known estimate."""
    _ending: Ending | None = None
    _is_ours: bool = True
    """False once another driver has the folder; nothing is written there after that."""
    _num_events: int = 0
    _wake: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _figures: RowFigures = field(default_factory=RowFigures)

    @contextmanager
    def watching(self, config: RunFile) -> Iterator[None]:
        """Store the run file, and keep the report up to date until the block ends.

        A block that ends by an error, or without `finish`, is a failed run.
        """
        self._try("run file", lambda: write_run_file(self.folder, config))
        self._thread = threading.Thread(target=self._report_regularly, name="report", daemon=True)
        self._thread.start()
        try:
            yield
        except DriverLostError:
            self._is_ours = False
            raise
        except PipelineError as error:
            self.finish("failed", str(error))
            raise
        finally:
            self.finish("failed")

    def see(self, progress: Progress, lines: Sequence[str]) -> None:
        """Note the progress, and the events among new lines of the log."""
        self.rows = (progress.rows_done, progress.rows_total)
        self.days_left = progress.days_left
        self.note_events(lines)

    def note_events(self, lines: Sequence[str]) -> None:
        """Note the events among lines of the log."""
        now_s = self.clock()
        events = [event for line in lines if (event := event_of(line, now_s=now_s)) is not None]
        if events:
            self._note(events)

    def finish_without_work(self) -> None:
        """Finish a session that found every row done, if the last one has not reported `run_done`.

        It has not if it was killed between its last row and its end.
        """
        endings = [e.kind for e in read_events(self.folder) if e.kind in _ENDINGS]
        if endings[-1:] != ["run_done"]:
            self.finish("done", "every row was done already")

    def finish(self, ending: Ending, text: str = "") -> None:
        """Report the end of the session, once, and wait for the deliveries."""
        if self._ending is not None:
            return
        self._ending = ending
        line = " ".join(text.split())[:_MAX_CAUSE_CHARACTERS]
        self._note([RunEvent(kind=f"run_{ending}", at_s=self.clock(), worker=None, text=line)])
        self._wake.set()
        if self.webhook is not None:
            self.webhook.close(_WEBHOOK_WAIT_S[ending])
        if self._thread is not None:
            self._thread.join(_REPORT_WAIT_S[ending])

    def write_report(self, state: RunState) -> None:
        """Write the current report."""
        report = run_report(self.folder, now_s=self.clock(), rows=self._figures, state=state)
        self.folder.write_whole(REPORT_FILE, report_page(report).encode())

    # -- inside

    def _note(self, events: Sequence[RunEvent]) -> None:
        self._num_events += len(events)
        self._try("events file", lambda: append_events(self.folder, events))
        if self._num_events >= _TRIM_EVERY:
            self._num_events = 0
            self._try("events file", lambda: trim_events(self.folder))
        if self.webhook is None:
            return
        for event in events:
            if event.kind in NOTICES:
                self.webhook.post(self._notice(event))

    def _notice(self, event: RunEvent) -> Notice:
        rows_done, rows_total = self.rows
        return Notice(
            event=NOTICES[event.kind],
            run=self.run_id,
            folder=self.folder.where,
            at_s=event.at_s,
            text=event.text,
            rows_done=rows_done,
            rows_total=rows_total,
            worker=event.worker,
            eta_s=self._eta_s(),
        )

    def _eta_s(self) -> float | None:
        if self._ending is not None:
            return 0.0 if self._ending == "done" else None
        return self.days_left.p50 * SECONDS_PER_DAY if self.days_left else None

    def _report_regularly(self) -> None:
        wait_s = self.first_report_s
        while not self._wake.wait(wait_s):
            self._try("report", lambda: self.write_report("running"))
            wait_s = self.report_interval_s
        self._try("report", lambda: self.write_report(self._ending or "running"))

    def _try(self, what: str, act: Callable[[], None]) -> None:
        if not self._is_ours:
            return
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever it is, the run must go on
            self.log(f"event=warning the {what} was not written: {error!r}")
