"""Records that a report is made from. Times are seconds since the run began."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.dataset.run_record import RunHistory
from pipeline.live.log import LiveLog
from pipeline.report.course.worktime import ALL_WORK, WorkTime
from pipeline.report.rows.figures import RowFigures
from pipeline.store.journal import RunEvent
from schemas.config.run_file import RunFile
from schemas.estimate import LiveReading
from schemas.progress import RunStatus, slot_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Rows and tokens that one part made visible."""

    at_s: float
    rows: int
    tokens: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """Records of one run, read from its folder."""

    config: RunFile | None
    status: RunStatus
    history: RunHistory
    parts: Sequence[Published]
    log: LiveLog
    """Readings and estimates on the log's own clock."""
    readings: Sequence[LiveReading]
    """Readings of the log on the clock of the run."""
    events: Sequence[RunEvent]
    rows: RowFigures
    began_at_s: float
    now_s: float
    span_s: float
    work: WorkTime = ALL_WORK
    """Time that the run worked; all the time until its pauses have been found."""

    @property
    def session_starts_s(self) -> list[float]:
        return [session.started_at_s - self.began_at_s for session in self.history.sessions]

    @property
    def session_s(self) -> float:
        """Seconds of all sessions, without the time between them; at least one."""
        between = (p.length_s for p in self.work.pauses if p.reason == "between sessions")
        return max(self.span_s - sum(between), 1.0)

    def readings_by_engine(self) -> dict[str, list[LiveReading]]:
        """Group the readings by slot, so that a replaced worker's follow those of the first."""
        by_engine: dict[str, list[LiveReading]] = {}
        for reading in self.readings:
            by_engine.setdefault(slot_of(reading.engine), []).append(reading)
        return by_engine


def published(history: RunHistory, began_at_s: float) -> list[Published]:
    """List the parts in the order in which their rows became visible."""
    parts = (
        Published(
            at_s=max(0.0, history.first_listed_s[part.name] - began_at_s),
            rows=part.num_rows,
            tokens=part.completion_tokens,
            worker=slot_of(part.worker_id),
        )
        for part in history.parts.values()
    )
    return sorted(parts, key=lambda part: part.at_s)
