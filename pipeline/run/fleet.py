"""Workers of a run by their reports: which are ready, have rows to spare, or write badly."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.quality.canary import broken_by_all, turned_bad
from schemas.config.quality import QualityConfig
from schemas.progress import WorkerReport

_COMPARE_ALL_INTERVAL_S = 30.0


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Last reports of the workers, and the orders that follow from them."""

    min_engines: int
    quality: QualityConfig
    accepted_shares: Mapping[str, float]
    reports: dict[str, WorkerReport] = field(default_factory=dict)
    _ready: set[str] = field(default_factory=set)
    _has_begun: bool = False
    """`min_engines` were ready at one time: rows are leased from then on."""
    _with_spare_rows: set[str] = field(default_factory=set)
    _rows_to_give_back: dict[str, int] = field(default_factory=dict)
    _declared_dead: set[str] = field(default_factory=set)
    _listed_starts: set[tuple[str, int]] = field(default_factory=set)
    _reported_flags: set[str] = field(default_factory=set)
    _compared_all_s: float = 0.0

    # -- start of the run

    @property
    def engines_awaited(self) -> int:
        """Engines that must still come up before rows are leased."""
        return 0 if self._has_begun else max(0, self.min_engines - len(self._ready))

    def note_ready(self, worker_id: str) -> None:
        self._ready.add(worker_id)
        self._has_begun = self.engines_awaited == 0

    # -- reports

    def note_report(self, report: WorkerReport) -> None:
        self.reports[report.worker_id] = report
        if report.state == "running" and report.not_started > 0:
            self._with_spare_rows.add(report.worker_id)
        else:
            self._with_spare_rows.discard(report.worker_id)

    def has_others(self, worker_id: str) -> bool:
        """Return whether engines of other workers run."""
        return any(
            report.state in ("running", "idle")
            for other, report in self.reports.items()
            if other != worker_id and other not in self._declared_dead
        )

    def note_ended(self, worker_id: str) -> None:
        """Forget a worker that ended or died."""
        self._ready.discard(worker_id)
        self.reports.pop(worker_id, None)
        self._with_spare_rows.discard(worker_id)

    def note_start(self, report: WorkerReport) -> bool:
        """Return whether the report is the first of an engine that came up, and remember it."""
        start = (report.worker_id, report.restarts)
        if report.state not in ("idle", "running") or start in self._listed_starts:
            return False
        self._listed_starts.add(start)
        return True

    # -- silent workers

    def declare_dead(self, worker_id: str) -> None:
        """Note that a worker's leases were taken while it was silent."""
        self._declared_dead.add(worker_id)

    def is_declared_dead(self, worker_id: str) -> bool:
        return worker_id in self._declared_dead

    def declare_alive(self, worker_id: str) -> None:
        """Note that a worker learns that its leases are lost."""
        self._declared_dead.discard(worker_id)

    # -- rows for idle workers

    def request_rows_back(self, idle_worker_id: str) -> None:
        """Have the fullest worker give back half of the rows that it has not started.

        A worker with a pending request gets no other one before its next heartbeat.
        """
        spare = {
            worker_id: self.reports[worker_id].not_started
            for worker_id in self._with_spare_rows - self._rows_to_give_back.keys()
            if worker_id != idle_worker_id
        }
        fullest = max(spare, key=lambda worker_id: spare[worker_id], default=None)
        if fullest is not None:
            self._rows_to_give_back[fullest] = math.ceil(spare[fullest] / 2)

    def take_rows_to_give_back(self, worker_id: str) -> int:
        """Return how many rows a worker is to give back, once."""
        return self._rows_to_give_back.pop(worker_id, 0)

    # -- engines that write badly

    def drain_cause(self, worker_id: str) -> str | None:
        """Return why this worker's engine is to be drained; None while it writes well enough."""
        return turned_bad(worker_id, self.reports, self.quality, self.accepted_shares)

    def take_flags_of_all(self, *, now_s: float) -> dict[str, float]:
        """Return the flags whose limit every engine has begun to exceed, and their shares.

        Each flag is returned once. No engine is drained for it: no other would write better rows.
        """
        if now_s - self._compared_all_s < _COMPARE_ALL_INTERVAL_S:
            return {}
        self._compared_all_s = now_s
        broken = broken_by_all(self.reports, self.quality, self.accepted_shares)
        new = {flag: share for flag, share in broken.items() if flag not in self._reported_flags}
        self._reported_flags |= new.keys()
        return new
