"""Keep one engine full: a loop over the objects that own the worker's state.

Invariant: every leased row ends in exactly one completion (`stop`, `length` or `error`), or is
written nowhere: absence means "do it again". The next lease is taken before the last one has
drained, and a row that backs off gives its place to another, so that `max_running_requests` are in
flight whenever there is work.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, time

from pipeline.dataset.journal import JournalWriter
from pipeline.dataset.partials import Partials
from pipeline.errors import EngineError
from pipeline.quality.flags import LanguageOf
from pipeline.worker.background import Background
from pipeline.worker.backlog import Backlog, InFlight
from pipeline.worker.engine_watch import EngineWatch, Relaunch
from pipeline.worker.generation import Generator
from pipeline.worker.intervals import Intervals
from pipeline.worker.leasing import HeldRows, Leases
from pipeline.worker.ports import Engine, LeaseBook
from pipeline.worker.publishing import REFUSED, Publisher
from pipeline.worker.refusals import MOST_HELD, Refusals, RefusalWatch
from pipeline.worker.reporting import Reporter
from pipeline.worker.retries import Attempts, Suspects
from pipeline.worker.row import Row, engine_killed, failed_row
from schemas.completion import Interruption
from schemas.config.run_file import RunFile
from schemas.progress import Orders, WorkerReport, WorkerState
from schemas.prompt import Problem, Prompt

# Waits double with each attempt, up to the limit of the run file long before this many.
_MOST_DOUBLINGS = 32


@dataclass(slots=True, kw_only=True)
class Worker:
    """Takes leases, keeps the engine full, stages and publishes what is finished."""

    worker_id: str
    session_id: str
    config: RunFile
    engine: Engine
    book: LeaseBook
    prompt_of: Callable[[int], Prompt]
    writer: JournalWriter
    log: Callable[[str], None]
    partials: Partials | None = None
    language_of: LanguageOf | None = None
    intervals: Intervals = field(default_factory=Intervals)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the main loop should look again before its next tick."""
    _draining: asyncio.Event = field(default_factory=asyncio.Event)
    _state: WorkerState = "starting"
    _drain_cause: str | None = None
    """Reason why the coordinator wants the engine out of the run."""
    _leasing: Background = field(default_factory=Background)
    _heartbeats: Background = field(default_factory=Background)
    _attempts: Attempts = field(init=False)
    _backlog: Backlog = field(init=False)
    _in_flight: InFlight = field(init=False)
    _leases: Leases = field(init=False)
    _generator: Generator = field(init=False)
    _publisher: Publisher = field(init=False)
    _engine_watch: EngineWatch = field(init=False)
    _refusals: Refusals = field(init=False)
    _refusal_watch: RefusalWatch = field(init=False)
    _rows: HeldRows = field(init=False)
    _relaunch: Relaunch = field(init=False)
    _reporter: Reporter = field(init=False)

    def __post_init__(self) -> None:
        config, engine = self.config, self.engine
        self._attempts = Attempts(
            retry=config.retry,
            max_consecutive_failures=config.engine.max_consecutive_failures,
            outage_patience_s=config.engine.outage_patience_s,
        )
        self._backlog = Backlog(suspects=Suspects(max_deaths=config.engine.max_deaths_in_flight))
        self._in_flight = InFlight(wake=self._wake)
        self._leases = Leases(
            worker_id=self.worker_id,
            session_id=self.session_id,
            book=self.book,
            engine=engine,
            prompt_of=self.prompt_of,
            samples_per_prompt=config.samples_per_prompt,
            idle_poll_s=self.intervals.idle_poll_s,
            log=self.log,
            partials=self.partials,
        )
        self._refusals = Refusals(most_unproven=max(MOST_HELD, config.quality.window_rows))
        self._refusal_watch = RefusalWatch(
            refusals=self._refusals,
            engine=engine,
            worker_id=self.worker_id,
            clock=monotonic,
            finish=self._finish,
            wake=self._wake.set,
            log=self.log,
        )
        self._generator = Generator(
            engine=engine,
            config=config,
            attempts=self._attempts,
            refusals=self._refusals,
            language_of=self.language_of,
            worker_id=self.worker_id,
        )
        self._publisher = Publisher(
            worker_id=self.worker_id,
            session_id=self.session_id,
            config=config,
            engine=engine,
            book=self.book,
            writer=self.writer,
            log=self.log,
            commit_interval_s=self.intervals.commit_s,
        )
        self._engine_watch = EngineWatch(
            engine=engine,
            config=config.engine,
            worker_id=self.worker_id,
            supply=lambda: self._reporter.supply(self._attempts, self._leasing),
            log=self.log,
            draining=self._draining,
            wake=self._wake,
            intervals=self.intervals,
        )
        self._rows = HeldRows(self._in_flight, self._backlog, self._refusals, self._publisher,
                              self._leases, self._leasing)  # fmt: skip
        self._relaunch = Relaunch(engine, self._engine_watch, self._rows, self._wake)
        self._reporter = Reporter(self.worker_id, engine, self._backlog, self._in_flight,
                                  self._generator, self._publisher, self._engine_watch)  # fmt: skip

    # -- the life of a worker

    async def run(self) -> None:
        """Work until there is none. Raises EngineError when the engine cannot be brought back."""
        self._heartbeats.start(self._send_heartbeats())
        try:
            if await self._engine_watch.start():
                self._state = "idle"
            while not (self._leases.is_over or self._draining.is_set()):
                await self._step()
        except EngineError as error:
            self._state = "lost"
            await self._give_all_back(str(error))
            raise
        finally:
            await self._wind_up()

    def stop(self) -> None:
        """Drain: start nothing, flush what is finished, end the engine."""
        self._draining.set()
        self._wake.set()

    async def _step(self) -> None:
        self._wake.clear()
        self._backlog.wake(monotonic())
        self._send_next()
        self._lease_if_short()
        self._refusal_watch.attend(is_idle=not (self._in_flight or self._backlog))
        self._publisher.flush_if_due(
            is_idle=self._leases.is_dry and not (self._in_flight or self._backlog),
            is_canary_done=self._publisher.has_canary_rows
            and not (self._backlog.has_canary_rows or self._in_flight.has_canary_rows),
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), self.intervals.tick_s)
        self._raise_faults()
        if (cause := self._drain_cause or self._refusal_watch.drain_cause) is not None:
            self._leave_as_bad(cause)
        if self._engine_watch.lost_cause is not None:
            await self._recover_engine(self._engine_watch.lost_cause)
        elif self._relaunch.is_ordered:
            self._state = "restarting"
            await self._relaunch.carry_out()
            self._attempts.reset()
        elif self._refusal_watch.has_others and self._attempts.is_to_leave_rows(monotonic()):
            await self._leave_rows_to_others()
        is_busy = self._in_flight or self._backlog.num_waiting or self._refusals.num_held
        self._state = "running" if is_busy else "idle"

    async def _wind_up(self) -> None:
        if self._draining.is_set() and self._state != "lost":
            await self._leases.keep_begun(self._in_flight, self._backlog)
        await self._in_flight.cancel_and_wait()
        watching = (self._engine_watch.stop_watching(), self._refusal_watch.cancel())
        await asyncio.gather(self._leasing.cancel(), *watching, self._heartbeats.cancel())
        stopping = asyncio.create_task(self.engine.stop())
        try:
            await self._publisher.flush_all()
        finally:
            await stopping
            if self._state != "lost":
                self._state = "stopped"

    def _raise_faults(self) -> None:
        watches = (self._engine_watch, self._refusal_watch)
        for one in (self._in_flight, self._leasing, self._publisher, *watches, self._heartbeats):
            one.raise_fault()

    # -- rows into the engine

    def _send_next(self) -> None:
        if monotonic() < self._attempts.held_until_s or self._refusals.is_full:
            return
        for row in self._backlog.take_next(self._in_flight, self.engine.max_running_requests):
            self._in_flight.send(row, self._advance(row))

    async def _advance(self, row: Row) -> None:
        """Generate the row until it ends or is interrupted."""
        row.started_at_s = row.started_at_s or time()
        ending = await self._generator.generate(row)
        if isinstance(ending, Interruption):
            await self._handle_interruption(row, ending)
            return
        if ending is None:
            self._engine_watch.note_finished_row()
        if ending is not None and ending.kind == REFUSED:
            self._refusals.hold(row, ending, now_s=monotonic())
        else:
            self._finish(row, ending)

    async def _handle_interruption(self, row: Row, outcome: Interruption) -> None:
        """Delay the row, set it aside after its last attempt, or note that the engine is lost."""
        if self._draining.is_set() or self._relaunch.is_ordered:
            self._in_flight.cut_off.append(row)
            return
        self._engine_watch.note_interruption(outcome.cause)
        if outcome.is_engines:
            row.attempts_at_turn -= 1
        if outcome.kind == "denial":
            self._refusals.note_denial(now_s=monotonic())
        sick_cause = self._attempts.note_failure(outcome, now_s=monotonic())
        if outcome.connection_failed and not await self._engine_watch.is_alive():
            self._engine_watch.note_lost(outcome.cause)
            self._in_flight.cut_off.append(row)
            return
        if sick_cause is not None:
            self._engine_watch.note_lost(sick_cause)
        max_running = self.engine.max_running_requests
        self._attempts.hold_if_refused(outcome, max_running_requests=max_running, now_s=monotonic())
        row.interruptions += 1
        if row.attempts_at_turn >= self.config.retry.max_attempts:
            failed = failed_row(row, outcome.cause, now_s=time())
            await self.book.set_aside(row.key, row.number, failed)
            return
        num_attempts = max(row.attempts_at_turn, min(row.interruptions, _MOST_DOUBLINGS))
        wait_s = self._attempts.backoff_s(num_attempts, outcome.retry_after_s)
        self._backlog.delay(row, monotonic() + wait_s)

    def _finish(self, row: Row, problem: Problem | None) -> None:
        self._publisher.finish(row, problem)

    # -- leases

    def _lease_if_short(self) -> None:
        max_running, now_s = self.engine.max_running_requests, monotonic()
        if (
            self._backlog.is_short(max_running)
            and not self._backlog.has_many_delayed(max_running)
            and now_s >= self._attempts.held_until_s
            and not self._refusals.is_full
            and self._leases.may_ask(now_s)
            and not self._leasing.is_running
        ):
            self._leasing.start(self._lease())

    async def _lease(self) -> None:
        """Take leases until enough rows are in line."""

        def is_short() -> bool:
            max_running = self.engine.max_running_requests
            return self._backlog.is_short(max_running) and not self._draining.is_set()

        is_filled = await self._leases.fill(self._backlog, is_short, self._finish, self._wake.set)
        if not is_filled and self._holds_nothing:
            await self._leases.release()
        self._wake.set()

    @property
    def _holds_nothing(self) -> bool:
        publisher = self._publisher
        is_publishing = publisher.is_flushing or publisher.num_unflushed
        is_working = self._backlog or self._in_flight or self._refusals.num_held
        return not (is_publishing or is_working)

    # -- heartbeats

    async def _send_heartbeats(self) -> None:
        while True:
            await self._follow(await self.book.heartbeat(self.report()))
            await asyncio.sleep(self.intervals.heartbeat_s)

    async def _follow(self, orders: Orders) -> None:
        if orders.drain_cause is not None:
            self._drain_cause = orders.drain_cause
            self._wake.set()
        elif orders.leases_are_lost:
            self.log(f"event=leases_lost worker={self.worker_id}")
            await self._rows.drop()
        elif orders.relaunch is not None:
            self._relaunch.order(orders.relaunch)
        elif orders.give_back_rows:
            await self._leases.give_back(self._backlog.take_unstarted(orders.give_back_rows))
        self._refusal_watch.has_others = orders.has_others

    def report(self) -> WorkerReport:
        """Return the heartbeat of this moment."""
        return self._reporter.report(self._state)

    # -- when the engine is lost

    async def _recover_engine(self, cause: str) -> None:
        """Publish what is finished, give the rest back to be done elsewhere, start again."""
        self.log(f"event=engine_lost worker={self.worker_id} cause={cause!r}")
        self._state = "restarting"
        self._relaunch.forget()
        await self._engine_watch.stop_watching()
        await self._blame_rows(cause)
        await self._give_all_back(cause)
        self._attempts.reset()
        if await self._engine_watch.restart():
            self._state = "idle"

    async def _blame_rows(self, cause: str) -> None:
        """Count the death on the rows that were in flight; one that was alone ends for it."""
        if self.config.engine.kind == "endpoint":
            # The server behind an address may be gone for any reason.
            return
        rows = {(row.key, row.number): row for row in (*self._in_flight, *self._in_flight.cut_off)}
        self._in_flight.cut_off.clear()
        await self._in_flight.cancel_and_wait()
        await self.book.engine_died(list(rows))
        if len(rows) == 1:
            (row,) = rows.values()
            if self._backlog.suspects.is_suspect(row):
                self._finish(row, engine_killed(row, cause))

    async def _give_all_back(self, cause: str) -> None:
        await self._rows.stop()
        await self.book.engine_lost(self.worker_id, cause)

    async def _leave_rows_to_others(self) -> None:
        """Hand all rows back, at no cost of theirs, while the engine is busy or away."""
        wait_s = self._attempts.rest(monotonic())
        self.log(f"event=rows_left_to_others worker={self.worker_id} wait_s={wait_s:.0f}")
        await self._rows.stop()
        await self._leases.release()

    def _leave_as_bad(self, cause: str) -> None:
        """Raises EngineError. Flagged rows that are not published are left for other workers."""
        self._publisher.drop_flagged()
        raise EngineError(f"worker {self.worker_id} was drained: {cause}")
