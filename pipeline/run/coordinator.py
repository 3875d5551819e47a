"""The coordinator: who has which rows, what is published, and whether the first rows are good.

Invariant: it alone publishes, and only while its driver holds the output folder. It owns no rows:
what it knows is rebuilt from the folder at every start. A worker that ends, dies or falls silent
gives its leases up. It knows nothing of Ray, whose actor it is.
"""

import math
from collections.abc import Callable
from functools import wraps
from time import monotonic, time
from typing import Concatenate, Literal, ParamSpec, TypeVar

from pipeline.dataset.frozen import FrozenPrompts, frozen_prompts
from pipeline.dataset.parts import discard, publish
from pipeline.dataset.run_record import list_in_manifest
from pipeline.live.log import LogKeeper
from pipeline.quality.canary import broken_by_all, excesses, tally_of, turned_bad
from pipeline.run.ledger import Ledger, hold_all_but_canary
from pipeline.run.metrics import RunMetrics
from pipeline.store import lock
from pipeline.store.bucket import WORKING_PATIENCE_S, open_folder
from pipeline.store.journal import RowName, append_death, read_deaths
from pipeline.store.run_folder import LIVE_FILE
from schemas.estimate import Band
from schemas.live import LiveSpan
from schemas.manifest import CanaryEvent, EngineRun, FailedRow, Part
from schemas.progress import CanaryState, LeaseReply, Orders, Progress, WorkerReport
from schemas.session import SessionPlan, Tally
from schemas.shard import LeaseKey

_LIVE_INTERVAL_S = 2.0
_LOOK_AT_ALL_S = 30.0

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def _deaf(
    method: Callable[Concatenate["Coordinator", Given], Answer],
) -> Callable[Concatenate["Coordinator", Given], Answer]:
    """Of a method that waits for the folder: what it takes is no silence of the workers."""

    @wraps(method)
    def timed(self: "Coordinator", /, *given: Given.args, **named: Given.kwargs) -> Answer:
        began_s = monotonic()
        try:
            return method(self, *given, **named)
        finally:
            self._ledger.pass_over(monotonic() - began_s)

    return timed


class Coordinator:
    """Hands out leases and publishes parts. One method runs at a time."""

    def __init__(self, plan: SessionPlan, row_states: bytes) -> None:
        work = plan.config.work
        self._plan = plan
        self._folder = open_folder(plan.root, patience_s=WORKING_PATIENCE_S)
        states, canary = bytearray(row_states), plan.canary
        self._canary: CanaryState = "none" if canary is None else "running"
        self._canary_tally = canary.tally if canary is not None else Tally()
        self._canary_rows = self._canary_tally.num_rows
        if canary is not None:
            seed = plan.config.sampling.seed
            self._canary_rows += hold_all_but_canary(states, canary.rows_left, seed)
        self._ledger = Ledger(
            row_states=states,
            shard_rows=work.shard_rows,
            lease_ttl_s=work.lease_ttl_s,
            max_shard_losses=work.max_shard_losses,
            deaths=self._known_deaths(),
        )
        self._metrics = RunMetrics(run_id=plan.run_id)
        self._reports: dict[str, WorkerReport] = {}
        self._with_spare_rows: set[str] = set()
        self._asked_back: dict[str, int] = {}
        self._listed_engines: set[tuple[str, int]] = set()
        self._taken_for_dead: set[str] = set()
        self._told_of_all: set[str] = set()
        self._looked_at_all_s = 0.0
        self._ready: set[str] = set()
        self._has_begun = False
        self._events: list[str] = []
        self._rows_error = plan.rows_error
        self._completion_tokens = 0
        self._last_publish_s: float | None = None
        self._live_written_s = 0.0
        self._readings = LogKeeper.opened(self._folder, plan.config, now_s=time())
        self._days_left: Band | None = None

    # -- for workers

    def lease(self, worker_id: str) -> LeaseReply:
        if worker_id in self._taken_for_dead or self._canary == "failed":
            # It has yet to hear that its leases are lost; a new one would be dropped with them.
            return LeaseReply(lease=None, is_over=False)
        self._ready.add(worker_id)
        if not self._are_enough:
            return LeaseReply(lease=None, is_over=False)
        lease = self._ledger.lease(worker_id, now_s=monotonic())
        if lease is None and not self._ledger.is_over:
            self._ask_back(worker_id)
        is_canary = self._canary == "running"
        return LeaseReply(lease=lease, is_over=self._ledger.is_over, is_canary=is_canary)

    @_deaf
    def publish(self, part: Part, rows: list[tuple[LeaseKey, int]]) -> set[tuple[LeaseKey, int]]:
        """The rows that are stale: then nothing is published, and the rest is to come again."""
        lock.check_held(self._folder, self._plan.token)
        if stale := self._ledger.stale_rows(rows):
            discard(self._folder, part)
            return stale
        publish(self._folder, part, now_s=time())
        self._ledger.mark_done(rows)
        self._metrics.published(part)
        self._rows_error += part.num_errors
        self._completion_tokens += part.completion_tokens
        self._last_publish_s = time()
        if self._canary == "running":
            self._canary_tally = tally_of([part], self._canary_tally)
        self._judge_canary()
        return set()

    @_deaf
    def set_aside(self, key: LeaseKey, row: int, failed: FailedRow) -> None:
        if self._ledger.set_aside(key, row):
            list_in_manifest(self._folder, failed)
            self._judge_canary()

    def give_back(self, key: LeaseKey, first_row: int) -> None:
        self._ledger.give_back(key, first_row)

    def release(self, worker_id: str) -> None:
        """The worker holds nothing: what the ledger still leases to it is open again."""
        self._ledger.worker_left(worker_id)

    def note_span(self, worker_id: str, span: LiveSpan, ended_ago_s: float = 0.0) -> None:
        self._readings.log.add(worker_id, span, now_s=time() - ended_ago_s)

    @_deaf
    def engine_died(self, rows: list[tuple[LeaseKey, int]]) -> None:
        """Kept on disk too: a driver that dies meanwhile must not cost as many engines again."""
        if counted := self._ledger.engine_died(rows):
            append_death(self._folder, self._row_names(counted), now_s=time())

    def engine_lost(self, worker_id: str, cause: str) -> None:
        self._give_up(self._ledger.worker_lost(worker_id), cause)

    @_deaf
    def heartbeat(self, report: WorkerReport) -> Orders:
        self._ledger.renew(report.worker_id, now_s=monotonic())
        self._note_engine(report)
        self._reports[report.worker_id] = report
        has_spare_rows = report.state == "running" and report.not_started > 0
        (self._with_spare_rows.add if has_spare_rows else self._with_spare_rows.discard)(
            report.worker_id
        )
        if report.worker_id in self._taken_for_dead:
            self._taken_for_dead.discard(report.worker_id)
            return Orders(leases_are_lost=True)
        quality, accepted = self._plan.config.quality, self._plan.accepted_shares
        if cause := turned_bad(report.worker_id, self._reports, quality, accepted):
            self.log(
                f"event=engine_drained worker={report.worker_id} engine={report.engine} "
                f"cause={cause!r}"
            )
            return Orders(drain_cause=cause)
        return Orders(give_back_rows=self._asked_back.pop(report.worker_id, 0))

    def _tell_what_all_break(self) -> None:
        """Once a flag: rows go on, flagged, since no other engine would write better ones."""
        if monotonic() - self._looked_at_all_s < _LOOK_AT_ALL_S:
            return
        self._looked_at_all_s = monotonic()
        quality, accepted = self._plan.config.quality, self._plan.accepted_shares
        for flag, share in broken_by_all(self._reports, quality, accepted).items():
            if flag not in self._told_of_all:
                self._told_of_all.add(flag)
                self.log(f"event=every_engine_over_limit flag={flag} share={share:.0%}")

    def log(self, line: str) -> None:
        self._metrics.logged(line)
        self._events.append(line)

    # -- for the driver

    def worker_ended(self, worker_id: str, cause: str | None) -> None:
        """A worker ended by itself (`cause` None) or died; what it held is open again."""
        self._ready.discard(worker_id)
        if cause is None:
            self._ledger.worker_left(worker_id)
        else:
            self._give_up(self._ledger.worker_lost(worker_id), cause)
        self._reports.pop(worker_id, None)
        self._with_spare_rows.discard(worker_id)

    @_deaf
    def poll(self, days_left: Band | None = None) -> tuple[Progress, list[str]]:
        """How far it is, and the log lines since the last poll."""
        self._days_left = days_left
        if days_left is not None:
            self._readings.log.note_time_left(days_left, now_s=time())
        self._tell_what_all_break()
        for worker_id in self._ledger.silent_workers(now_s=monotonic()):
            self._taken_for_dead.add(worker_id)
            self.log(f"event=worker_silent worker={worker_id}")
            self._give_up(self._ledger.worker_lost(worker_id), "its worker fell silent")
        progress = self._progress("running")
        if monotonic() - self._live_written_s >= _LIVE_INTERVAL_S:
            self._write_live(progress)
        self._readings.write_if_due(now_s=monotonic())
        events, self._events = self._events, []
        return progress, events

    def close(self, state: Literal["done", "stopped", "failed"]) -> Progress:
        """The final word in `live.json`."""
        progress = self._progress(state)
        self._write_live(progress)
        self._readings.write()
        return progress

    # -- inside

    def _known_deaths(self) -> dict[int, int]:
        """Of earlier sessions, by this session's row numbers."""
        deaths = read_deaths(self._folder)
        if not deaths:
            return {}
        samples = self._plan.config.samples_per_prompt
        numbers = dict(self._frozen().numbers_of({row_id for row_id, _ in deaths}))
        return {
            numbers[row_id] * samples + sample: count
            for (row_id, sample), count in deaths.items()
            if row_id in numbers and sample < samples
        }

    def _frozen(self) -> FrozenPrompts:
        frozen = frozen_prompts(self._folder, self._plan.frozen_name)
        assert frozen is not None
        return frozen

    def _row_names(self, rows: list[int]) -> list[RowName]:
        samples, frozen = self._plan.config.samples_per_prompt, self._frozen()
        return [(frozen.prompt(row // samples).row_id, row % samples) for row in rows]

    @property
    def _are_enough(self) -> bool:
        """Whether `min_engines` were ready at one time: from then on rows are handed out."""
        self._has_begun = self._has_begun or not self._engines_awaited
        return self._has_begun

    @property
    def _engines_awaited(self) -> int:
        if self._has_begun:
            return 0
        return max(0, self._plan.config.cluster.min_engines - len(self._ready))

    def _judge_canary(self) -> None:
        """End the canary as soon as its verdict is certain; once it has passed, open the rest."""
        if self._canary != "running":
            return
        is_complete = not self._ledger.has_open_rows
        num_rows = self._canary_tally.num_rows if is_complete else self._canary_rows
        found = excesses(self._canary_tally, self._plan.config, num_rows=num_rows)
        if not found and not is_complete:
            return
        self._canary = "failed" if found else "passed"
        assert self._plan.canary is not None
        event = CanaryEvent(
            session_id=self._plan.session_id,
            verdict=self._canary,
            settings=self._plan.canary.settings,
            shares={excess.name: excess.found for excess in found},
            at_s=time(),
        )
        list_in_manifest(self._folder, event)
        self.log(f"event=canary_{self._canary} rows={self._canary_tally.num_rows}")
        if not found:
            self._ledger.open_held()

    def _note_engine(self, report: WorkerReport) -> None:
        """List an engine that came up, with what runs: once for each start."""
        start = (report.worker_id, report.restarts)
        if report.state not in ("idle", "running") or start in self._listed_engines:
            return
        self._listed_engines.add(start)
        list_in_manifest(
            self._folder,
            EngineRun(
                worker_id=report.worker_id,
                engine=report.engine,
                release=report.engine_release,
                plan=report.plan,
                max_running_requests=report.max_running_requests,
                ready_at_s=time(),
            ),
        )

    def _ask_back(self, hungry: str) -> None:
        """An idle worker takes over half of the rows that the fullest one has not started.

        A worker that was asked already is not asked again before it has answered.
        """
        spare = {
            worker_id: self._reports[worker_id].not_started
            for worker_id in self._with_spare_rows - self._asked_back.keys() - {hungry}
        }
        fullest = max(spare, key=lambda worker_id: spare[worker_id], default=None)
        if fullest is not None:
            self._asked_back[fullest] = math.ceil(spare[fullest] / 2)

    def _give_up(self, rows: list[int], cause: str) -> None:
        """List rows whose shard lost its worker too often."""
        if not rows:
            return
        self._judge_canary()
        for row_id, sample_index in self._row_names(rows):
            failed = FailedRow(
                row_id=row_id,
                sample_index=sample_index,
                cause=f"its engine or worker was lost too often, the last time by: {cause}",
                attempts=self._plan.config.work.max_shard_losses,
                failed_at_s=time(),
            )
            list_in_manifest(self._folder, failed)

    def _progress(self, state: Literal["running", "done", "stopped", "failed"]) -> Progress:
        counts = self._ledger.counts()
        return Progress(
            session_id=self._plan.session_id,
            updated_at_s=time(),
            state=state,
            rows_total=counts.rows_total,
            rows_done=counts.rows_done,
            rows_failed=counts.rows_failed,
            rows_error=self._rows_error,
            completion_tokens=self._completion_tokens,
            last_publish_s=self._last_publish_s,
            leases_lost=counts.leases_lost,
            workers=tuple(self._reports.values()),
            engines_awaited=self._engines_awaited,
            days_left=self._days_left,
            canary=self._canary,
        )

    def _write_live(self, progress: Progress) -> None:
        self._folder.write_whole(LIVE_FILE, progress.to_json().encode())
        self._metrics.tell(progress, now_s=time())
        self._live_written_s = monotonic()
