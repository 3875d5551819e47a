"""What workers, engines and the coordinator tell each other, and what `live.json` tells people."""

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Literal

from schemas.estimate import Band
from schemas.shard import Lease

CanaryState = Literal["none", "running", "passed", "failed"]
WorkerState = Literal["starting", "running", "idle", "restarting", "stopped", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What a worker has for its engine at one moment."""

    in_flight: int
    waiting: int = 0
    """Rows that are leased and not sent."""
    backing_off: int = 0
    """Rows that wait for their next try."""
    held_s: float = 0.0
    """For so long nothing is sent, because the engine asked for that."""
    is_alone: bool = False
    """A row at which engines have died is in flight, and none but its like may be."""
    is_leasing: bool = False
    """A lease is asked for and not answered."""

    @property
    def has_more(self) -> bool:
        """Whether rows are there, or may be, beside those in flight."""
        return bool(self.waiting or self.backing_off or self.is_leasing)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One heartbeat. Totals count from the worker's start."""

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
    node: str | None = None
    """The machine it is on, and Ray's name for that node."""
    node_id: str | None = None
    gpus: tuple[str, ...] = ()
    """The GPUs that Ray gave it, as `CUDA_VISIBLE_DEVICES` names them."""
    window_rows: int = 0
    """Last rows, those of the canary not counted."""
    window_flags: dict[str, int] = field(default_factory=dict)
    plan: str | None = None
    """The launch flags of the engine that runs."""
    max_running_requests: int = 0
    starved: str | None = None
    """What the engine is short of, where it has long run far fewer requests than it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The coordinator's answer to a heartbeat."""

    give_back_rows: int = 0
    """Rows not yet started that others are waiting for."""
    leases_are_lost: bool = False
    """The worker was taken for dead: its rows are others' by this time."""
    drain_cause: str | None = None
    """What the engine writes has turned bad, and the worker is to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReply:
    """A lease; or none for the time being; or none ever again."""

    lease: Lease | None
    is_over: bool
    is_canary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`live.json`: the run as the coordinator sees it."""

    session_id: str
    updated_at_s: float
    state: Literal["running", "done", "stopped", "failed"]
    rows_total: int
    rows_done: int
    rows_failed: int
    rows_error: int
    completion_tokens: int
    """Of rows published in this session."""
    last_publish_s: float | None
    leases_lost: int
    workers: tuple[WorkerReport, ...]
    engines_awaited: int = 0
    """Engines that must still come up before rows are handed out."""
    days_left: Band | None = None
    """By the engines' readings; None before there are any."""
    canary: CanaryState = "none"

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
    """What an output folder says of its run, from the files alone."""

    folder: str
    state: RunState
    """`interrupted`: the driver is gone without a word; `unknown`: it runs on another machine."""
    rows_total: int
    rows_done: int
    """Published rows of the input: `ok` and `error`."""
    rows_error: int
    """Published rows that say why there is no completion."""
    rows_failed: int
    """Rows that used up their budget in the last session; a resume tries them again."""
    rows_outside_input: int
    """Published rows that the present input does not have."""
    completion_tokens: int
    """Of all published rows."""
    tokens_per_s: float | None
    """Of rows published over the last minutes; None while nothing was."""
    eta_s: float | None
    days_left: Band | None
    """By the readings of the engines that run; None where there are none."""
    last_publish_s: float | None
    started_at_s: float
    num_parts: int
    workers: tuple[WorkerReport, ...]
    failed: tuple[tuple[str, int, str], ...]
    """Row id, sample index and last cause of failed rows."""


def slot_of(worker_id: str) -> str:
    """The worker's place in the run: `w3r2` follows `w3` in the slot `w3`."""
    return re.sub(r"(?<=.)r\d+$", "", worker_id)
