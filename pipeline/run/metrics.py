"""Figures of the run as Ray metrics, which Ray's Prometheus endpoint exports.

Only the coordinator sets them. Ray adds the prefix `ray_`, and the suffix `_total` to counters;
`EXPORTED` has the names as they are scraped, and the dashboard in `jobs/deploy` uses no others.
Counters start at 0 with each session.
"""

from dataclasses import dataclass, field
from typing import Literal

from ray.util.metrics import Counter, Gauge

from pipeline.store.event_line import event_line
from schemas.manifest import Part
from schemas.progress import Progress, WorkerReport
from schemas.units import SECONDS_PER_DAY


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of the run, its description, and the tag that splits it."""

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    tag: str | None = None

    @property
    def exported(self) -> str:
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


METRICS = (
    Metric("regenerate_rows", "counter", "rows published", tag="status"),
    Metric("regenerate_completion_tokens", "counter", "output tokens published"),
    Metric("regenerate_prompt_tokens", "counter", "prompt tokens published"),
    Metric("regenerate_flags", "counter", "rows with a quality flag", tag="flag"),
    Metric("regenerate_retries", "counter", "interrupted requests", tag="worker"),
    Metric("regenerate_restarts", "counter", "engine restarts", tag="worker"),
    Metric("regenerate_ladder_step", "gauge", "fallbacks taken", tag="worker"),
    Metric("regenerate_in_flight", "gauge", "requests in flight", tag="worker"),
    Metric("regenerate_rows_open", "gauge", "rows neither done nor failed"),
    Metric("regenerate_rows_failed", "gauge", "rows out of attempts"),
    Metric("regenerate_publish_lag_seconds", "gauge", "since the last publish"),
    Metric("regenerate_eta_seconds", "gauge", "time left, as in jobs.status"),
)
EXPORTED = frozenset(metric.exported for metric in METRICS)


@dataclass(slots=True, kw_only=True)
class RunMetrics:
    """Metrics of one session. Time arrives as `now_s`."""

    run_id: str
    _made: dict[str, Counter | Gauge] = field(default_factory=dict)
    _counted: dict[tuple[str, str], int] = field(default_factory=dict)
    """Totals of workers that are counted already."""
    _steps: dict[str, int] = field(default_factory=dict)
    _began_at_s: float | None = None

    def __post_init__(self) -> None:
        for metric in METRICS:
            tags = ("run", metric.tag) if metric.tag else ("run",)
            kind = Counter if metric.kind == "counter" else Gauge
            made = kind(metric.name, description=metric.description, tag_keys=tags)
            made.set_default_tags({"run": self.run_id})
            self._made[metric.name] = made

    def count_part(self, part: Part) -> None:
        """Count the rows of a published part."""
        self._count("rows", part.num_rows - part.num_errors, {"status": "ok"})
        self._count("rows", part.num_errors, {"status": "error"})
        self._count("completion_tokens", part.completion_tokens)
        self._count("prompt_tokens", part.prompt_tokens)
        for flag, number in part.flag_counts:
            self._count("flags", number, {"flag": flag})

    def note_line(self, line: str) -> None:
        """Count a fallback, which is known only by its line in the log."""
        parsed = event_line(line)
        if parsed.kind == "step_down" and "worker" in parsed.fields:
            worker = str(parsed.fields["worker"])
            self._steps[worker] = self._steps.get(worker, 0) + 1

    def update(self, progress: Progress, *, now_s: float) -> None:
        """Set the gauges and advance the counters to the progress."""
        self._began_at_s = self._began_at_s or now_s
        rows_open = progress.rows_total - progress.rows_done - progress.rows_failed
        self._set("rows_open", rows_open)
        self._set("rows_failed", progress.rows_failed)
        self._set("publish_lag_seconds", now_s - (progress.last_publish_s or self._began_at_s))
        if progress.days_left is not None and progress.state == "running":
            self._set("eta_seconds", progress.days_left.p50 * SECONDS_PER_DAY)
        elif rows_open <= 0:
            self._set("eta_seconds", 0.0)
        self._update_workers(progress.workers)

    def _update_workers(self, workers: tuple[WorkerReport, ...]) -> None:
        present = {worker.worker_id for worker in workers}
        for gone in [
            name for kind, name in self._counted if kind == "retries" and name not in present
        ]:
            # Otherwise the gauge would keep its last value forever.
            self._set("in_flight", 0, {"worker": gone})
        for worker in workers:
            name = worker.worker_id
            self._set("in_flight", worker.in_flight, {"worker": name})
            self._set("ladder_step", self._steps.get(name, 0), {"worker": name})
            self._count_up_to("retries", name, worker.interruptions)
            self._count_up_to("restarts", name, worker.restarts)

    def _count_up_to(self, kind: str, worker: str, total: int) -> None:
        grown = total - self._counted.get((kind, worker), 0)
        self._counted[kind, worker] = total
        self._count(kind, grown, {"worker": worker})

    def _count(self, name: str, number: int, tags: dict[str, str] | None = None) -> None:
        metric = self._made[f"regenerate_{name}"]
        if number > 0 and isinstance(metric, Counter):
            metric.inc(number, tags=tags or {})

    def _set(self, name: str, value: float, tags: dict[str, str] | None = None) -> None:
        metric = self._made[f"regenerate_{name}"]
        if isinstance(metric, Gauge):
            metric.set(value, tags=tags or {})
