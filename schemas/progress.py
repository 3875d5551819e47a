"""Messages between workers and coordinator, `live.json`, and the status of a run."""

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Literal

from schemas.estimate import Band
from schemas.shard import Lease

LengthCounts = tuple[tuple[int, int], ...]
"""Pairs of tokens and number of requests."""
Counter = Literal["engine", "answers"]
"""Source of a rate: the engine's own counters, or the answers received."""

CanaryState = Literal["none", "running", "passed", "failed"]
WorkerState = Literal["starting", "running", "idle", "restarting", "stopped", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Rows that a worker has for its engine at one moment."""

    in_flight: int
    waiting: int = 0
    """Leased rows that are not sent yet."""
    backing_off: int = 0
    """Rows that wait for their next attempt."""
    held_s: float = 0.0
    """Time for which nothing is sent because the engine requested a pause."""
    is_alone: bool = False
    """True while suspects are in flight: rows at which engines have died, and no others."""
    is_leasing: bool = False
    """True while a request for a lease is open."""

    @property
    def has_more(self) -> bool:
        """Return true if there are, or may be, rows besides those in flight."""
        return bool(self.waiting or self.backing_off or self.is_leasing)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A heartbeat. Totals count from the worker's start."""

    worker_id: str
    state: WorkerState
    engine: str
    engine_release: str | None
    in_flight: int
    not_started: int
    backing_off: int
    unflushed: int
    requests: int
    interruptions: int
    restarts: int
    completion_tokens: int
    last_cause: str | None
    timeouts: int = 0
    refusals: int = 0
    """Requests that the server answered with an HTTP error."""
    node: str | None = None
    """Host name."""
    node_id: str | None = None
    gpus: tuple[str, ...] = ()
    """GPUs that Ray assigned to it, as in `CUDA_VISIBLE_DEVICES`."""
    window_rows: int = 0
    """Rows in its quality window, without those of the canary."""
    window_flags: dict[str, int] = field(default_factory=dict)
    plan: str | None = None
    """Launch flags of the running engine."""
    max_running_requests: int = 0
    starved: str | None = None
    """Reason that the engine is starved: it has long run far fewer requests than it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The coordinator's answer to a heartbeat."""

    give_back_rows: int = 0
    """Rows to return that are not started and that other workers wait for."""
    leases_are_lost: bool = False
    """True if the worker was taken for dead, so that others may have its rows."""
    drain_cause: str | None = None
    """Reason to drain the engine, whose output has turned bad."""
    has_others: bool = False
    """True if other engines run."""
    relaunch: tuple[str, ...] | None = None
    """Launch flags under which to start the engine anew, with what its rows have kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReply:
    """A lease; or no lease for the moment; or the end of the work (`is_over`)."""

    lease: Lease | None
    is_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`live.json`: the coordinator's view of the run."""

    session_id: str
    updated_at_s: float
    state: Literal["running", "done", "stopped", "failed"]
    rows_total: int
    rows_done: int
    rows_failed: int
    rows_error: int
    completion_tokens: int
    """Tokens of rows published in this session."""
    last_publish_s: float | None
    leases_lost: int
    workers: tuple[WorkerReport, ...]
    engines_awaited: int = 0
    """Engines that must still come up before rows are leased."""
    days_left: Band | None = None
    """Estimate from the engines' readings; None before the first ones."""
    canary: CanaryState = "none"

    @property
    def rows_finished(self) -> int:
        """Rows that are done, and those that are durable and not yet in `data/`.

        Rows of a part that was just published are still unflushed in their worker's last report.
        """
        unpublished = sum(worker.unflushed for worker in self.workers)
        most = self.rows_total - self.rows_failed - self.rows_held
        return max(min(self.rows_done + unpublished, most), self.rows_done)

    @property
    def rows_held(self) -> int:
        """Rows at the workers that have not ended."""
        return sum(w.in_flight + w.not_started + w.backing_off for w in self.workers)

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Progress":
        values = json.loads(text)
        values["workers"] = tuple(
            WorkerReport(**{**worker, "gpus": tuple(worker.get("gpus", ()))})
            for worker in values["workers"]
        )
        days_left = values.get("days_left")
        values["days_left"] = Band(**days_left) if days_left else None
        return cls(**values)


RunState = Literal["running", "done", "stopped", "failed", "interrupted", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Status of a run, read from its output folder alone."""

    folder: str
    state: RunState
    """`interrupted`: the driver ended without a report; `unknown`: it is on another machine."""
    rows_total: int
    rows_done: int
    """Finished rows of the input, `ok` and `error`. All are published once the run has ended."""
    rows_error: int
    """Published rows with an error instead of a completion."""
    rows_failed: int
    """Rows that used up their attempts in the last session; a resume retries them."""
    rows_outside_input: int
    """Published rows that are not in the current input."""
    completion_tokens: int
    """Tokens of all published rows."""
    tokens_saved: int
    """Tokens that rows had when they were continued after planned stops."""
    tokens_per_s: float | None
    """Rate of the last minutes' published rows; None before the first part."""
    eta_s: float | None
    days_left: Band | None
    """Estimate from the engines' readings; None if there are none."""
    last_publish_s: float | None
    started_at_s: float
    num_parts: int
    workers: tuple[WorkerReport, ...]
    failed: tuple[tuple[str, int, str], ...]
    """Row id, sample index and last cause of failed rows."""


def slot_of(worker_id: str) -> str:
    """The worker's place in the run: `w3r2` follows `w3` in the slot `w3`."""
    return re.sub(r"(?<=.)r\d+$", "", worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSpan:
    """Readings of an engine over one span of time. Rates are means over the span."""

    duration_s: float
    engine_age_s: float
    """Time from the launched engine's first request to the span's start."""
    cap_requests: int
    running_requests: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    accept_length: float | None
    """Mean tokens kept per step; None if MTP is off or the engine does not report it."""
    counted_by: Counter
    finished: LengthCounts
    """Completions that ended in this span, by tokens."""
    running: LengthCounts
    """Requests in flight at the span's end, by tokens so far: estimated from age and rate, because
    an answer comes whole."""
    card: str | None = None
    """Catalogue name of the engine's GPU, if the worker knows it."""
    interrupted: LengthCounts = ()
    """Attempts that failed in this span, or hung before their answer came, by the tokens that
    others would have had by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """Estimated time left of the run, noted while it ran."""

    at_s: float
    """Time since the job began."""
    days: Band
