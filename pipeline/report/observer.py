"""What is told of a run while it goes on: the events file, the webhook, the report.

It stands beside the run, in the driver, and sees what the driver sees. Nothing in here ends a run
or holds it up: a failure is logged, the report is written by a thread, and at the end each is
waited for no longer than its bound.
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
from pipeline.report.rows import RowFigures
from pipeline.report.webhook import Notice, Webhook
from pipeline.store.folder import Folder
from pipeline.store.journal import RunEvent, append_events, event_of, read_events, trim_events
from pipeline.store.run_folder import REPORT_FILE
from schemas.config import RunFile
from schemas.progress import Progress, RunState

REPORT_INTERVAL_S = 180.0
_FIRST_REPORT_S = 20.0
_TRIM_EVERY = 1_000
_MOST_LAST_WORDS = 400
"""Characters of why a run failed."""

Ending = Literal["done", "stopped", "failed"]
NOTICES = {
    "canary_failed": "canary_failed",
    "engine_drained": "engine_drained",
    "every_engine_over_limit": "every_engine_over_limit",
    "step_down": "engine_stepped_down",
    "run_done": "run_done",
    "run_stopped": "run_stopped",
    "run_failed": "run_failed",
}
"""Kind of event → the name that the webhook has for it."""
_ENDINGS = ("run_done", "run_stopped", "run_failed")
_WEBHOOK_WAIT_S = {"done": 5.0, "failed": 5.0, "stopped": 0.5}
_REPORT_WAIT_S = {"done": 60.0, "failed": 60.0, "stopped": 0.5}
# After a signal to stop, `ray job stop` kills within 3 s; the rows are published by then.


@dataclass(slots=True, kw_only=True)
class Observer:
    """One session's. `see` and `finish` are the driver's to call."""

    folder: Folder
    run_id: str
    clock: Callable[[], float]
    log: Callable[[str], None]
    webhook: Webhook | None = None
    report_interval_s: float = REPORT_INTERVAL_S
    first_report_s: float = _FIRST_REPORT_S
    rows: tuple[int, int]
    """Done and total, as last seen."""
    _ending: Ending | None = None
    _is_ours: bool = True
    """Whether the folder is: once another driver has it, nothing is written there."""
    _num_events: int = 0
    _wake: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _figures: RowFigures = field(default_factory=RowFigures)

    @contextmanager
    def watching(self, config: RunFile) -> Iterator[None]:
        """Keep the run file beside the rows and the report up to date until the block ends.

        A block that is left by an error, or without a word, is a run that has failed.
        """
        self._try("run file", lambda: write_run_file(self.folder, config))
        self._thread = threading.Thread(target=self._report_on_and_on, name="report", daemon=True)
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
        """What the driver has heard since the last time."""
        self.rows = (progress.rows_done, progress.rows_total)
        self.hear(lines)

    def hear(self, lines: Sequence[str]) -> None:
        """Event lines of the log; others are left out."""
        now_s = self.clock()
        events = [event for line in lines if (event := event_of(line, now_s=now_s)) is not None]
        if events:
            self._note(events)

    def finish_without_work(self) -> None:
        """The last word of a session that found every row done, unless it was told before.

        It was not when the last session was killed between its last row and its end.
        """
        endings = [e.kind for e in read_events(self.folder) if e.kind in _ENDINGS]
        if endings[-1:] != ["run_done"]:
            self.finish("done", "every row was done already")

    def finish(self, ending: Ending, text: str = "") -> None:
        """The last word, once."""
        if self._ending is not None:
            return
        self._ending = ending
        line = " ".join(text.split())[:_MOST_LAST_WORDS]
        self._note([RunEvent(kind=f"run_{ending}", at_s=self.clock(), worker=None, text=line)])
        self._wake.set()
        if self.webhook is not None:
            self.webhook.close(_WEBHOOK_WAIT_S[ending])
        if self._thread is not None:
            self._thread.join(_REPORT_WAIT_S[ending])

    def write_report(self, state: RunState) -> None:
        """Write the page as things stand."""
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
                self.webhook.tell(self._notice(event))

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
        )

    def _report_on_and_on(self) -> None:
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
        except Exception as error:  # noqa: BLE001 - whatever it is, the run must not end of it
            self.log(f"event=warning the {what} was not written: {error!r}")
