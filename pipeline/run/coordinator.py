"""The coordinator: who has which rows, what is published, and whether the first rows are good.

Invariant: it alone publishes, and only while its driver holds the output folder. It owns no rows:
what it knows is rebuilt from the folder at every start. A worker that ends, dies or falls silent
loses its leases. This module knows nothing of Ray, whose actor the coordinator is.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import wraps
from time import monotonic, time
from typing import Concatenate, Literal, ParamSpec, TypeVar

from pipeline.dataset.journal import JournalName, Journals, LeasedRow, journals_in
from pipeline.dataset.partials import BegunRows, Partials
from pipeline.dataset.parts import discard, publish
from pipeline.dataset.run_record import list_in_manifest
from pipeline.engines.options import earlier_results
from pipeline.live.log import LiveLog, LogKeeper
from pipeline.run.canary import CanaryGate, canary_event
from pipeline.run.fleet import Fleet
from pipeline.run.ledger import Ledger, put_canary_first
from pipeline.run.metrics import RunMetrics
from pipeline.run.row_names import RowNames
from pipeline.store import lock
from pipeline.store.bucket import WORKING_PATIENCE_S, open_folder
from pipeline.store.journal import append_death, read_deaths
from pipeline.store.run_folder import LIVE_FILE, TRIALS_FILE
from pipeline.trial.tuning import Tuning
from schemas.config.run_file import RunFile
from schemas.estimate import Band
from schemas.manifest import CanaryVerdict, EngineRun, FailedRow, Part
from schemas.plan import EngineTrial, results_text
from schemas.progress import LeaseReply, LiveSpan, Orders, Progress, WorkerReport
from schemas.session import CanaryPlan, SessionPlan
from schemas.shard import LeaseKey
from schemas.units import SECONDS_PER_DAY

_LIVE_INTERVAL_S = 2.0

Params = ParamSpec("Params")
Answer = TypeVar("Answer")


def _waits_for_folder(
    method: Callable[Concatenate["Coordinator", Params], Answer],
) -> Callable[Concatenate["Coordinator", Params], Answer]:
    """Exclude the time that a method waits for the folder from the workers' silence."""

    @wraps(method)
    def timed(self: "Coordinator", /, *args: Params.args, **kwargs: Params.kwargs) -> Answer:
        began_s = monotonic()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._ledger.pass_over(monotonic() - began_s)

    return timed


class Coordinator:
    """Hands out leases and publishes parts. One method runs at a time."""

    def __init__(self, plan: SessionPlan, row_states: bytes) -> None:
        config, work = plan.config, plan.config.work
        self._plan = plan
        self._folder = open_folder(plan.root, patience_s=WORKING_PATIENCE_S)
        self._row_names = RowNames(
            folder=self._folder,
            frozen_name=plan.frozen_name,
            samples_per_prompt=config.samples_per_prompt,
        )
        states = bytearray(row_states)
        self._canary = _canary_gate(config, plan.canary, states)
        self._ledger = Ledger(
            row_states=states,
            shard_rows=work.shard_rows,
            lease_ttl_s=work.lease_ttl_s,
            max_shard_losses=work.max_shard_losses,
            has_canary=plan.canary is not None,
            deaths=self._row_names.by_number(read_deaths(self._folder)),
        )
        self._fleet = Fleet(
            min_engines=config.cluster.min_engines,
            quality=config.quality,
            accepted_shares=plan.accepted_shares,
        )
        self._metrics = RunMetrics(run_id=plan.run_id)
        self._readings = LogKeeper.opened(self._folder, config, now_s=time())
        self._journals = Journals(folder=self._folder, run_id=plan.run_id)
        # Staged parts of rows beyond the canary's, until it has passed.
        self._kept_back: list[Part] = []
        self._events: list[str] = []
        self._rows_error = plan.rows_error
        self._completion_tokens = 0
        self._last_publish_s: float | None = None
        self._live_written_s = 0.0
        self._days_left: Band | None = None
        self._begun = BegunRows(
            partials=Partials(
                folder=self._folder, run_id=plan.run_id, settings=plan.rows_depend_on
            ),
            by_number=self._row_names.by_number,
            is_open=self._ledger.is_open,
            log=self.log,
        )
        self._continue_first()
        self._tuning = Tuning(
            longest_reading_s=config.engine.longest_reading_s,
            log=self.log,
            results=earlier_results(self._folder),
        )

    # -- for workers

    def lease(self, worker_id: str) -> LeaseReply:
        """Lease the next shard to a worker, or say that there is none for now, or ever."""
        if self._fleet.is_declared_dead(worker_id) or self._canary.state == "failed":
            # It has not heard that its leases are lost; a new one would be dropped with them.
            return LeaseReply(lease=None, is_over=False)
        self._fleet.note_ready(worker_id)
        if self._fleet.engines_awaited:
            return LeaseReply(lease=None, is_over=False)
        lease = self._ledger.lease(worker_id, now_s=monotonic())
        if lease is not None:
            lease = replace(lease, begun=self._begun.files_of(lease.rows))
        is_over = self._ledger.is_over
        if lease is None and not is_over:
            self._fleet.request_rows_back(worker_id)
        return LeaseReply(lease=lease, is_over=is_over)

    @_waits_for_folder
    def publish(self, part: Part, rows: list[tuple[LeaseKey, int]]) -> set[tuple[LeaseKey, int]]:
        """Publish a staged part, unless rows are stale: then return these and publish nothing.

        Rows beyond the canary's are kept back until it has passed.
        """
        return self._accept(part, rows)

    @_waits_for_folder
    def set_aside(self, key: LeaseKey, row: int, failed: FailedRow) -> None:
        """List a row that used up its attempts, if its lease is current."""
        if self._ledger.set_aside(key, row):
            list_in_manifest(self._folder, failed)
            self._judge_canary()

    def give_back(self, key: LeaseKey, first_row: int) -> None:
        """Open the rows of a lease from `first_row` on, which were not started."""
        self._ledger.give_back(key, first_row)

    def release(self, worker_id: str) -> None:
        """Open every row that the ledger still leases to a worker that holds none."""
        self._ledger.worker_left(worker_id)

    @_waits_for_folder
    def hand_over(self, worker_id: str) -> None:
        """Open the rows of a worker whose engine restarts on purpose, to be continued first."""
        self._ledger.worker_left(worker_id)
        self._ledger.renew(worker_id, now_s=monotonic())
        self._continue_first(worker_id)

    def note_span(self, worker_id: str, span: LiveSpan, ended_ago_s: float = 0.0) -> None:
        self._readings.log.add(worker_id, span, now_s=time() - ended_ago_s)
        self._tuning.note_span(worker_id, span)

    def note_trial(self, worker_id: str, trial: EngineTrial) -> None:
        """Note the plans that a worker's engine may try, and the one that it runs."""
        self._tuning.note_engine(worker_id, trial, now_s=monotonic())

    @_waits_for_folder
    def engine_died(self, rows: list[tuple[LeaseKey, int]]) -> None:
        """Count a death on the rows that were in flight.

        It is written to disk: after a driver's death the same rows must not kill as many engines.
        """
        if counted := self._ledger.engine_died(rows):
            append_death(self._folder, self._row_names.names_of(counted), now_s=time())

    def engine_lost(self, worker_id: str, cause: str) -> None:
        """Open the rows of a worker whose engine is gone."""
        self._list_failed(self._ledger.worker_lost(worker_id), cause)

    @_waits_for_folder
    def heartbeat(self, report: WorkerReport) -> Orders:
        """Note a worker's report and return its orders."""
        worker_id = report.worker_id
        self._ledger.renew(worker_id, now_s=monotonic())
        if self._fleet.note_start(report):
            list_in_manifest(self._folder, _engine_run(report, now_s=time()))
        self._fleet.note_report(report)
        if self._fleet.is_declared_dead(worker_id):
            self._fleet.declare_alive(worker_id)
            return Orders(leases_are_lost=True)
        if cause := self._fleet.drain_cause(worker_id):
            self.log(
                f"event=engine_drained worker={worker_id} engine={report.engine} cause={cause!r}"
            )
            return Orders(drain_cause=cause)
        return Orders(
            give_back_rows=self._fleet.take_rows_to_give_back(worker_id),
            has_others=self._fleet.has_others(worker_id),
            relaunch=self._tuning.take_order(worker_id) if report.state == "running" else None,
        )

    def log(self, line: str) -> None:
        """Keep a line of a worker for the driver's log."""
        self._metrics.note_line(line)
        self._events.append(line)

    # -- for the driver

    @_waits_for_folder
    def worker_ended(self, worker_id: str, cause: str | None) -> None:
        """Open the rows of a worker that ended by itself (`cause` None) or died.

        What it finished is published first.
        """
        self._publish_journals(worker_id)
        if cause is None:
            self._ledger.worker_left(worker_id)
        else:
            self._list_failed(self._ledger.worker_lost(worker_id), cause)
        self._continue_first(worker_id)
        self._fleet.note_ended(worker_id)
        self._tuning.forget_engine(worker_id)

    @_waits_for_folder
    def poll(self, days_left: Band | None = None) -> tuple[Progress, list[str]]:
        """Return the progress and the log lines since the last poll."""
        self._days_left = days_left
        if days_left is not None:
            self._readings.log.note_time_left(days_left, now_s=time())
            self._tune(days_left.p50 * SECONDS_PER_DAY)
        for flag, share in self._fleet.take_flags_of_all(now_s=monotonic()).items():
            self.log(f"event=every_engine_over_limit flag={flag} share={share:.0%}")
        for worker_id in self._ledger.silent_workers(now_s=monotonic()):
            self._fleet.declare_dead(worker_id)
            self.log(f"event=worker_silent worker={worker_id}")
            self._publish_journals(worker_id)
            self._list_failed(self._ledger.worker_lost(worker_id), "its worker fell silent")
        progress = self._progress("running")
        if monotonic() - self._live_written_s >= _LIVE_INTERVAL_S:
            self._write_live(progress)
        self._readings.write_if_due(now_s=monotonic())
        return progress, self.take_lines()

    def take_lines(self) -> list[str]:
        """Return the log lines since the last call."""
        lines, self._events = self._events, []
        return lines

    def newer_log(self, num_seen: int) -> LiveLog | None:
        """Return the run's readings if there are more than `num_seen`."""
        log = self._readings.log
        return log if log.num_added > num_seen else None

    def close(self, state: Literal["done", "stopped", "failed"]) -> Progress:
        """Write the final state to `live.json` and the last readings."""
        self._days_left = None
        progress = self._progress(state)
        self._write_live(progress)
        self._readings.write()
        if state == "done":
            self._begun.load()
        return progress

    # -- inside

    def _continue_first(self, worker_id: str | None = None) -> None:
        """Lease rows first that were interrupted by a planned stop, or by that of a worker."""
        if rows := self._begun.load(worker_id):
            self._ledger.put_first(rows)

    def _tune(self, time_left_s: float) -> None:
        results = self._tuning.decide(time_left_s, now_s=monotonic())
        if results is not None:
            self._folder.write_whole(TRIALS_FILE, results_text(results).encode())

    def _accept(self, part: Part, rows: list[LeasedRow]) -> set[LeasedRow]:
        lock.check_held(self._folder, self._plan.token)
        if stale := self._ledger.stale_rows(rows):
            discard(self._folder, part)
            return stale
        are_later = self._ledger.have_later_ones(rows)
        if are_later and self._canary.state == "failed":
            discard(self._folder, part)
            return set()
        self._ledger.mark_done(rows)
        if are_later and self._canary.is_running:
            self._kept_back.append(part)
            return set()
        self._publish(part)
        self._canary.note_published(part)
        self._judge_canary()
        return set()

    def _publish(self, part: Part) -> None:
        publish(self._folder, part, now_s=time())
        self._metrics.count_part(part)
        self._rows_error += part.num_errors
        self._completion_tokens += part.completion_tokens
        self._last_publish_s = time()

    def _publish_journals(self, worker_id: str) -> None:
        """Publish the rows of a lost worker's journals that are still its own."""
        for name in journals_in(self._folder):
            if (name.session_id, name.worker_id) != (self._plan.session_id, worker_id):
                continue
            try:
                self._publish_journal(name)
            except FileNotFoundError:
                # Its worker is alive after all, and has published it at this moment.
                continue
            self._journals.remove(name)

    def _publish_journal(self, name: JournalName) -> None:
        leased = self._journals.leased_rows(name)
        own = first_of_each(leased, self._ledger.stale_rows(leased))
        part = self._journals.stage(name, without=set(range(len(leased))) - own.keys())
        if part is not None:
            self._accept(part, [own[position] for position in sorted(own)])
            self.log(f"event=journal_published worker={name.worker_id} rows={part.num_rows}")

    def _judge_canary(self) -> None:
        """End the canary as soon as its verdict is certain; once it has passed, open the rest."""
        if not self._canary.is_running:
            return
        over = self._canary.close_if_certain(is_complete=not self._ledger.has_open_canary_rows)
        if over is None:
            return
        verdict: CanaryVerdict = "failed" if over else "passed"
        plan = self._plan
        assert plan.canary is not None
        event = canary_event(verdict, over, plan.session_id, plan.canary.settings, now_s=time())
        list_in_manifest(self._folder, event)
        self.log(f"event=canary_{verdict} rows={self._canary.tally.num_rows}")
        kept_back, self._kept_back = self._kept_back, []
        for part in kept_back:
            if over:
                discard(self._folder, part)
            else:
                self._publish(part)

    def _list_failed(self, rows: list[int], cause: str) -> None:
        """List rows whose shard lost too many workers."""
        if not rows:
            return
        self._judge_canary()
        for row_id, sample_index in self._row_names.names_of(rows):
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
            workers=tuple(self._fleet.reports.values()),
            engines_awaited=self._fleet.engines_awaited,
            days_left=self._days_left,
            canary=self._canary.state,
        )

    def _write_live(self, progress: Progress) -> None:
        self._folder.write_whole(LIVE_FILE, progress.to_json().encode())
        self._metrics.update(progress, now_s=time())
        self._live_written_s = monotonic()


def _canary_gate(config: RunFile, plan: CanaryPlan | None, row_states: bytearray) -> CanaryGate:
    """Put the rows of a canary that is due before all others."""
    if plan is None:
        return CanaryGate(config=config)
    rows_drawn = put_canary_first(row_states, plan.rows_left, config.sampling.seed)
    return CanaryGate(
        config=config,
        state="running",
        tally=plan.tally,
        num_rows=plan.tally.num_rows + rows_drawn,
    )


def first_of_each(
    leased: Sequence[LeasedRow], stale: Collection[LeasedRow]
) -> dict[int, LeasedRow]:
    """Map positions to rows: those that are not stale, each once."""
    positions = {row: position for position, row in reversed(list(enumerate(leased)))}
    return {positions[row]: row for row in leased if row not in stale}


def _engine_run(report: WorkerReport, *, now_s: float) -> EngineRun:
    return EngineRun(
        worker_id=report.worker_id,
        engine=report.engine,
        release=report.engine_release,
        plan=report.plan,
        max_running_requests=report.max_running_requests,
        ready_at_s=now_s,
    )
