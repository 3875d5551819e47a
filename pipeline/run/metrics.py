"""The run's figures as Ray's own metrics, so that Ray's Prometheus endpoint has them.

The coordinator alone tells them. Ray puts `ray_` in front of a name and `_total` behind that of a
counter; `EXPORTED` holds the names as they are scraped, and the dashboard in `jobs/deploy` asks
for no others. Counters count from the session's start.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from ray.util.metrics import Counter, Gauge

from schemas.manifest import Part
from schemas.progress import Progress, WorkerReport
from schemas.units import SECONDS_PER_DAY

_STEP_DOWN = re.compile(r"^event=step_down\b.*\bworker=(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One name, what it says, and what it is told apart by."""

    name: str
    kind: Literal["counter", "gauge"]
    says: str
    tag: str | None = None

    @property
    def exported(self) -> str:
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


METRICS = (
    Metric(name="regenerate_rows", kind="counter", says="rows published", tag="status"),
    Metric(name="regenerate_completion_tokens", kind="counter", says="output tokens published"),
    Metric(name="regenerate_prompt_tokens", kind="counter", says="prompt tokens published"),
    Metric(name="regenerate_flags", kind="counter", says="rows with a quality flag", tag="flag"),
    Metric(name="regenerate_retries", kind="counter", says="interrupted tries", tag="worker"),
    Metric(name="regenerate_restarts", kind="counter", says="engine restarts", tag="worker"),
    Metric(name="regenerate_ladder_step", kind="gauge", says="steps taken down", tag="worker"),
    Metric(name="regenerate_in_flight", kind="gauge", says="requests in flight", tag="worker"),
    Metric(name="regenerate_rows_open", kind="gauge", says="rows neither done nor failed"),
    Metric(name="regenerate_rows_failed", kind="gauge", says="rows out of tries"),
    Metric(name="regenerate_publish_lag_seconds", kind="gauge", says="since the last publication"),
    Metric(name="regenerate_eta_seconds", kind="gauge", says="time left, as jobs.status tells it"),
)
EXPORTED = frozenset(metric.exported for metric in METRICS)


@dataclass(slots=True, kw_only=True)
class RunMetrics:
    """One session's. Time arrives as `now_s`."""

    run_id: str
    _made: dict[str, Counter | Gauge] = field(default_factory=dict)
    _told: dict[tuple[str, str], int] = field(default_factory=dict)
    """Totals of workers that were told already."""
    _steps: dict[str, int] = field(default_factory=dict)
    _began_at_s: float | None = None

    def __post_init__(self) -> None:
        for metric in METRICS:
            tags = ("run", metric.tag) if metric.tag else ("run",)
            kind = Counter if metric.kind == "counter" else Gauge
            made = kind(metric.name, description=metric.says, tag_keys=tags)
            made.set_default_tags({"run": self.run_id})
            self._made[metric.name] = made

    def published(self, part: Part) -> None:
        """A part's rows are visible."""
        self._count("rows", part.num_rows - part.num_errors, {"status": "ok"})
        self._count("rows", part.num_errors, {"status": "error"})
        self._count("completion_tokens", part.completion_tokens)
        self._count("prompt_tokens", part.prompt_tokens)
        for flag, number in part.flag_counts:
            self._count("flags", number, {"flag": flag})

    def logged(self, line: str) -> None:
        """A step down has no other word than its line in the log."""
        if found := _STEP_DOWN.match(line):
            self._steps[found[1]] = self._steps.get(found[1], 0) + 1

    def tell(self, progress: Progress, *, now_s: float) -> None:
        """All that the progress says."""
        self._began_at_s = self._began_at_s or now_s
        rows_open = progress.rows_total - progress.rows_done - progress.rows_failed
        self._set("rows_open", rows_open)
        self._set("rows_failed", progress.rows_failed)
        self._set("publish_lag_seconds", now_s - (progress.last_publish_s or self._began_at_s))
        if rows_open <= 0:
            self._set("eta_seconds", 0.0)
        elif progress.days_left is not None:
            self._set("eta_seconds", progress.days_left.p50 * SECONDS_PER_DAY)
        self._tell_workers(progress.workers)

    def _tell_workers(self, workers: tuple[WorkerReport, ...]) -> None:
        present = {worker.worker_id for worker in workers}
        for gone in [
            name for kind, name in self._told if kind == "retries" and name not in present
        ]:
            # A gauge keeps its last value for ever otherwise.
            self._set("in_flight", 0, {"worker": gone})
        for worker in workers:
            name = worker.worker_id
            self._set("in_flight", worker.in_flight, {"worker": name})
            self._set("ladder_step", self._steps.get(name, 0), {"worker": name})
            self._count_up_to("retries", name, worker.interruptions)
            self._count_up_to("restarts", name, worker.restarts)

    def _count_up_to(self, kind: str, worker: str, total: int) -> None:
        grown = total - self._told.get((kind, worker), 0)
        self._told[kind, worker] = total
        self._count(kind, grown, {"worker": worker})

    def _count(self, name: str, number: int, tags: dict[str, str] | None = None) -> None:
        metric = self._made[f"regenerate_{name}"]
        if number > 0 and isinstance(metric, Counter):
            metric.inc(number, tags=tags or {})

    def _set(self, name: str, value: float, tags: dict[str, str] | None = None) -> None:
        metric = self._made[f"regenerate_{name}"]
        if isinstance(metric, Gauge):
            metric.set(value, tags=tags or {})
