"""Keep one engine full. No Ray here: the lease book and the engine are seen through Protocols.

Invariant: every leased row ends in exactly one completion (`stop`, `length` or `error`), or is
written nowhere: absence means "do it again". The next lease is taken before the last one has
drained, and a row that waits for its next try gives its place to another, so that
`max_running_requests` are in flight whenever there is work.
"""

import asyncio
import contextlib
import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic, time

import pyarrow as pa

from pipeline.dataset.frozen import FrozenPrompts
from pipeline.dataset.parts import stage_part
from pipeline.dataset.prompts import history
from pipeline.errors import EngineError, EngineGivenUpError
from pipeline.quality.flags import LanguageOf
from pipeline.store.folder import Folder
from pipeline.worker.races import ends_before
from pipeline.worker.retries import Starts, Suspects, Tries, is_given_up
from pipeline.worker.row import (
    Row,
    failed_row,
    keep_last_try,
    over_context,
    row_completion,
    row_request,
    rows_of_lease,
    take_turn,
)
from pipeline.worker.worker_ports import Engine, LeaseBook
from schemas.completion import Completion, Interruption, Refusal, Turn
from schemas.config import RunFile
from schemas.progress import Supply, WorkerReport, WorkerState
from schemas.prompt import Problem, Prompt
from schemas.shard import Lease, LeaseKey

_TICK_S = 0.25
_BEAT_S = 1.0
_IDLE_POLL_S = 0.5
_MOST_UNFLUSHED_ROWS = 20_000
_RESTART_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
_WATCH_S = 5.0
_MOST_DELAYED_PER_RUNNING = 8
# Rows that wait for their next try; beyond that no new ones are leased.


@dataclass(slots=True, kw_only=True)
class Worker:
    """Takes leases, keeps the engine full, stages and publishes what is finished."""

    worker_id: str
    session_id: str
    run_id: str
    config: RunFile
    engine: Engine
    book: LeaseBook
    folder: Folder
    frozen: FrozenPrompts
    carried_schema: pa.Schema
    log: Callable[[str], None]
    language_of: LanguageOf | None = None
    _queue: deque[Row] = field(default_factory=deque)
    _suspects: Suspects = field(init=False)
    _tries: Tries = field(init=False)
    _delayed: list[tuple[float, int, Row]] = field(default_factory=list)
    _running: dict[asyncio.Task[None], Row] = field(default_factory=dict)
    _finished: list[tuple[Row, Completion]] = field(default_factory=list)
    _something: asyncio.Event = field(default_factory=asyncio.Event)
    _leasing: asyncio.Task[None] | None = None
    _watching: asyncio.Task[None] | None = None
    _flushing: asyncio.Task[None] | None = None
    _state: WorkerState = "starting"
    _draining: bool = False
    _drain_asked: asyncio.Event = field(default_factory=asyncio.Event)
    _is_over: bool = False
    _lost_cause: str | None = None
    _hit: list[Row] = field(default_factory=list)
    """Rows whose connection broke when the engine was lost."""
    _fault: BaseException | None = None
    _starts: Starts = field(default_factory=Starts)
    _restarts: int = 0
    _requests: int = 0
    _interruptions: int = 0
    _completion_tokens: int = 0
    _last_cause: str | None = None
    _next_lease_s: float = 0.0
    _hold_until_s: float = 0.0
    _last_flush_s: float = 0.0
    _sequence: int = 0
    _in_canary: bool = False
    _window: deque[tuple[str, ...]] = field(default_factory=deque)
    _drain_cause: str | None = None

    def __post_init__(self) -> None:
        most = self.config.engine.max_consecutive_failures
        self._tries = Tries(retry=self.config.retry, max_consecutive_failures=most)
        self._suspects = Suspects(max_deaths=self.config.engine.max_deaths_in_flight)

    # -- the life of a worker

    async def run(self) -> None:
        """Work until there is none. Raises EngineError when the engine cannot be brought back."""
        beats = asyncio.create_task(self._beat_forever())
        try:
            await self._start_engine(first=True)
            self._last_flush_s = monotonic()
            while not self._is_over and not self._draining:
                await self._step(beats)
        except EngineError as error:
            self._state = "lost"
            await self._give_all_back(str(error))
            raise
        finally:
            await self._wind_up(beats)

    def stop(self) -> None:
        """Drain: start nothing, flush what is finished, end the engine."""
        self._draining = True
        self._drain_asked.set()
        self._something.set()

    async def _step(self, beats: "asyncio.Task[None]") -> None:
        self._something.clear()
        self._wake_delayed()
        self._fill()
        self._lease_if_short()
        self._flush_if_due()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._something.wait(), _TICK_S)
        self._raise_background_errors(beats)
        if self._drain_cause is not None:
            self._leave_as_bad(self._drain_cause)
        if self._lost_cause is not None:
            await self._recover_engine(self._lost_cause)
        self._state = "running" if self._running or self._queue or self._suspects else "idle"

    async def _wind_up(self, beats: "asyncio.Task[None]") -> None:
        await self._cancel_running()
        background = [task for task in (self._leasing, self._watching, beats) if task is not None]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        stopping = asyncio.create_task(self.engine.stop())
        try:
            if self._flushing is not None:
                await self._flushing
            await self._flush()
        finally:
            await stopping
            if self._state != "lost":
                self._state = "stopped"

    def _raise_background_errors(self, beats: "asyncio.Task[None]") -> None:
        if self._fault is not None:
            raise self._fault
        for task in (self._leasing, self._flushing, self._watching, beats):
            if task is not None and task.done() and not task.cancelled() and task.exception():
                task.result()

    # -- rows into the engine

    def _fill(self) -> None:
        if monotonic() < self._hold_until_s:
            return
        while (
            self._queue
            and len(self._running) < self.engine.max_running_requests
            and not self._tries_suspects
        ):
            self._send(self._queue.popleft())
        if self._suspects and not (self._queue or self._running or self._delayed):
            for row in self._suspects.next_together(self.engine.max_running_requests):
                self._send(row)

    def _send(self, row: Row) -> None:
        task = asyncio.create_task(self._advance(row))
        self._running[task] = row
        task.add_done_callback(self._ended)

    @property
    def _tries_suspects(self) -> bool:
        """Suspects are in flight, and nothing may join them: a death is to be their own."""
        return any(map(self._suspects.accuses, islice(self._running.values(), 1)))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of our own in one row's course ends the worker, loudly.
            self._fault = error
        self._something.set()

    async def _advance(self, row: Row) -> None:
        """Generate the row's open turns in order, until it ends or is interrupted."""
        row.started_at_s = row.started_at_s or time()
        while len(row.turns) < row.prompt.num_turns:
            row.tries_of_turn += 1
            self._requests += 1
            outcome = await self.engine.generate(row_request(row, self.config))
            match outcome:
                case Turn():
                    self._tries.note_answer()
                    self._completion_tokens += outcome.completion_tokens or 0
                    take_turn(
                        row,
                        outcome,
                        self.config,
                        context_length=self.engine.context_length,
                        language_of=self.language_of,
                    )
                case Refusal():
                    self._tries.note_answer()
                    if keep_last_try(row):
                        continue
                    self._finish(row, Problem(kind=outcome.kind, text=outcome.text))
                    return
                case Interruption():
                    await self._interrupted(row, outcome)
                    return
        self._starts.count = 0
        self._finish(row, None)

    async def _interrupted(self, row: Row, outcome: Interruption) -> None:
        self._interruptions += 1
        self._last_cause = outcome.cause
        sick = self._tries.note_failure(outcome)
        if outcome.connection_failed and not await self.engine.is_alive():
            self._lost_cause = self._lost_cause or outcome.cause
            self._hit.append(row)
            return
        self._lost_cause = self._lost_cause or sick
        self._hold_if_refused(outcome)
        row.interruptions += 1
        if row.tries_of_turn >= self.config.retry.max_attempts:
            await self._set_aside(row, outcome.cause)
            return
        wait_s = self._tries.backoff_s(row.tries_of_turn, outcome.retry_after_s)
        self._sequence += 1
        heapq.heappush(self._delayed, (monotonic() + wait_s, self._sequence, row))

    def _hold_if_refused(self, outcome: Interruption) -> None:
        """An engine that refuses all comers and says for how long is left alone for so long."""
        if (
            outcome.retry_after_s
            and self._tries.consecutive_failures >= self.engine.max_running_requests
        ):
            wait_s = min(outcome.retry_after_s, self.config.retry.retry_after_max_s)
            self._hold_until_s = monotonic() + wait_s

    def _wake_delayed(self) -> None:
        while self._delayed and self._delayed[0][0] <= monotonic():
            self._put_in_line(heapq.heappop(self._delayed)[2], first=True)

    def _put_in_line(self, row: Row, *, first: bool = False) -> None:
        if self._suspects.accuses(row):
            self._suspects.add(row)
        else:
            self._queue.insert(0 if first else len(self._queue), row)

    async def _set_aside(self, row: Row, cause: str) -> None:
        await self.book.set_aside(row.key, row.number, failed_row(row, cause, now_s=time()))

    def _finish(self, row: Row, problem: Problem | None) -> None:
        completion = row_completion(
            row,
            problem,
            config=self.config,
            engine=self.engine.name,
            engine_release=self.engine.release,
            plan=self.engine.plan,
            worker_id=self.worker_id,
            now_s=time(),
        )
        self._finished.append((row, completion))
        if problem is None and not self._in_canary and self.config.quality.window_rows:
            self._window.append(completion.flags)
            if len(self._window) > self.config.quality.window_rows:
                self._window.popleft()

    def _leave_as_bad(self, cause: str) -> None:
        """Raises EngineError. Flagged rows that are not published are others' to do again."""
        self._finished = [pair for pair in self._finished if not pair[1].flags]
        raise EngineError(f"worker {self.worker_id} was drained: {cause}")

    # -- leases

    def _lease_if_short(self) -> None:
        short = len(self._queue) < self.engine.max_running_requests
        many_wait = (
            len(self._delayed) > _MOST_DELAYED_PER_RUNNING * self.engine.max_running_requests
        )
        if not short or many_wait or monotonic() < max(self._next_lease_s, self._hold_until_s):
            return
        if self._leasing is None or self._leasing.done():
            self._leasing = asyncio.create_task(self._lease())

    async def _lease(self) -> None:
        while len(self._queue) < self.engine.max_running_requests and not self._draining:
            reply = await self.book.lease(self.worker_id)
            if reply.lease is None:
                self._is_over = reply.is_over
                self._next_lease_s = monotonic() + _IDLE_POLL_S
                if self._holds_nothing:
                    # Whatever the ledger still counts as this worker's is nobody's.
                    await self.book.release(self.worker_id)
                break
            self._in_canary = reply.is_canary
            rows = await asyncio.to_thread(self._rows_of, reply.lease)
            for row, problem in rows:
                if problem is None:
                    self._put_in_line(row)
                else:
                    self._finish(row, problem)
            self._something.set()
        self._something.set()

    @property
    def _holds_nothing(self) -> bool:
        is_flushing = self._flushing is not None and not self._flushing.done()
        rows = (self._queue, self._suspects, self._running, self._delayed, self._finished)
        return not (is_flushing or any(rows))

    def _rows_of(self, lease: Lease) -> list[tuple[Row, Problem | None]]:
        """The lease's rows with their prompts; bad ones with what is wrong with them."""
        rows = rows_of_lease(lease, self.frozen.prompt, self.config.samples_per_prompt)
        return [(row, row.prompt.problem or self._over_context(row.prompt)) for row in rows]

    def _over_context(self, prompt: Prompt) -> Problem | None:
        if self.engine.context_length is None:
            return None
        tokens = self.engine.prompt_tokens_at_least(history(prompt.messages, []))
        return over_context(tokens, self.engine.context_length)

    async def _give_back_rows(self, num_rows: int) -> None:
        """Return up to `num_rows` rows from the end of the queue that no engine was asked for.

        Half of the queue stays, whatever was asked by an older report, and those who wait lease
        before this worker does, which would else take its own rows back.
        """
        num_rows = min(num_rows, len(self._queue) // 2)
        self._next_lease_s = monotonic() + 2 * _IDLE_POLL_S
        first: dict[LeaseKey, int] = {}
        while num_rows > 0 and self._queue and not self._queue[-1].started_at_s:
            row = self._queue.pop()
            first[row.key] = row.number
            num_rows -= 1
        for key, row_number in first.items():
            await self.book.give_back(key, row_number)

    # -- heartbeats

    async def _watch_forever(self) -> None:
        """Look whether an engine that seems to run also works, until it does not."""
        while self._lost_cause is None:
            await asyncio.sleep(_WATCH_S)
            trouble = await self.engine.trouble(self._supply())
            if trouble is not None:
                self._lost_cause = self._last_cause = trouble
                self._something.set()

    def _supply(self) -> Supply:
        return Supply(
            in_flight=len(self._running),
            waiting=len(self._queue) + len(self._suspects),
            backing_off=len(self._delayed),
            held_s=max(0.0, self._hold_until_s - monotonic()),
            is_alone=self._tries_suspects,
            is_leasing=self._leasing is not None and not self._leasing.done(),
        )

    async def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _beat_forever(self) -> None:
        while True:
            orders = await self.book.heartbeat(self.report())
            if orders.drain_cause is not None:
                self._drain_cause = orders.drain_cause
                self._something.set()
            elif orders.leases_are_lost:
                self.log(f"event=leases_lost worker={self.worker_id}")
                await self._start_afresh()
            elif orders.give_back_rows:
                await self._give_back_rows(orders.give_back_rows)
            await asyncio.sleep(_BEAT_S)

    def report(self) -> WorkerReport:
        return WorkerReport(
            worker_id=self.worker_id,
            state=self._state,
            engine=self.engine.name,
            engine_release=self.engine.release,
            in_flight=len(self._running),
            not_started=sum(not row.started_at_s for row in self._queue),
            backing_off=len(self._delayed),
            unflushed=len(self._finished),
            requests=self._requests,
            interruptions=self._interruptions,
            restarts=self._restarts,
            completion_tokens=self._completion_tokens,
            last_cause=self._last_cause,
            window_rows=len(self._window),
            window_flags=dict(Counter(flag for flags in self._window for flag in flags)),
            plan=self.engine.plan,
            max_running_requests=self.engine.max_running_requests,
            starved=self.engine.starved,
        )

    # -- finished rows out

    def _flush_if_due(self) -> None:
        if not self._finished or (self._flushing is not None and not self._flushing.done()):
            return
        waited_s = monotonic() - self._last_flush_s
        has_nothing_else = not (self._running or self._queue or self._delayed or self._suspects)
        if (
            waited_s >= self.config.output.flush_interval_s
            or len(self._finished) >= _MOST_UNFLUSHED_ROWS
            or has_nothing_else
        ):
            self._flushing = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        """Stage and publish what is finished; rows whose lease was lost meanwhile are dropped."""
        self._last_flush_s = monotonic()
        batch, self._finished = self._finished, []
        while batch:
            self._sequence += 1
            name = f"part-{self.session_id}-{self.worker_id}-{self._sequence:06d}.parquet"
            part = await asyncio.to_thread(
                stage_part,
                self.folder,
                name,
                [completion for _, completion in batch],
                run_id=self.run_id,
                carried_schema=self.carried_schema,
                worker_id=self.worker_id,
            )
            leased = [(row.key, row.number) for row, _ in batch]
            stale = await self.book.publish(part, leased)
            if not stale:
                return
            self.log(f"event=stale_rows worker={self.worker_id} rows={len(stale)}")
            batch = [pair for pair in batch if (pair[0].key, pair[0].number) not in stale]

    # -- when the engine is lost

    async def _recover_engine(self, cause: str) -> None:
        """Publish what is finished, give the rest back to be done elsewhere, start again."""
        self.log(f"event=engine_lost worker={self.worker_id} cause={cause!r}")
        self._state = "restarting"
        await self._stop_watching()
        await self._blame(cause)
        await self._give_all_back(cause)
        self._lost_cause = None
        self._tries.start_anew()
        self._restarts += 1
        await self._start_engine(first=False)

    async def _blame(self, cause: str) -> None:
        """Count the death on the rows that were in flight; one that was alone ends for it."""
        if self.config.engine.kind == "endpoint":
            return  # what stands behind an address may be gone for any reason
        hit = {(row.key, row.number): row for row in (*self._running.values(), *self._hit)}
        rows = list(hit.values())
        self._hit.clear()
        await self._cancel_running()
        await self.book.engine_died(list(hit))
        if len(rows) == 1 and self._suspects.accuses(rows[0]):
            died = f"the engine died {rows[0].deaths + 1} times with this row in flight"
            self._finish(
                rows[0], Problem(kind="engine_killed", text=f"{died}, at last of: {cause}")
            )

    async def _give_all_back(self, cause: str) -> None:
        await self._cancel_running()
        if self._leasing is not None:
            await asyncio.gather(self._leasing, return_exceptions=True)
        if self._flushing is not None:
            await self._flushing
        await self._flush()
        self._forget_rows()
        await self.book.engine_lost(self.worker_id, cause)

    async def _start_afresh(self) -> None:
        """Drop every row and say so: a lease that came meanwhile goes back with the rest."""
        self._next_lease_s = monotonic() + _IDLE_POLL_S
        if self._leasing is not None:
            await asyncio.gather(self._leasing, return_exceptions=True)
        self._forget_rows()
        await self.book.release(self.worker_id)

    def _forget_rows(self) -> None:
        for task in list(self._running):
            task.cancel()
        self._queue.clear()
        self._suspects.clear()
        self._hit.clear()
        self._delayed.clear()
        self._finished.clear()

    async def _cancel_running(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_engine(self, *, first: bool) -> None:
        """Start the engine, again if it fails, within the budget that its kind has."""
        since_s, tries = monotonic(), 0
        while not self._draining:
            backoff = _RESTART_BACKOFF_S[min(max(tries, self._starts.count), 5)]
            await self._pause(backoff)
            tries += 1
            try:
                # A start may take an hour: a worker that is told to drain does not wait for it.
                if not await ends_before(self.engine.start(), self._drain_asked):
                    return
            except EngineError as error:
                self._last_cause = str(error)
                self.log(f"event=engine_failed worker={self.worker_id} cause={str(error)!r}")
                lost_s, engine = monotonic() - since_s, self.config.engine
                if isinstance(error, EngineGivenUpError) or is_given_up(
                    engine, first=first, tries=tries, lost_s=lost_s
                ):
                    raise
                continue
            self._count_start()
            self._watching = asyncio.create_task(self._watch_forever())
            self._state = "idle"
            return

    def _count_start(self) -> None:
        """Raises EngineError for an engine that comes up time and again and finishes nothing."""
        started = self._starts.started(self.engine.plan)
        if started > self.config.engine.max_restarts + 1:
            raise EngineError(
                f"the engine was started {started} times and finished no row; "
                f"the last failure was: {self._last_cause}"
            )
        self.log(
            f"event=engine_ready worker={self.worker_id} engine={self.engine.name} "
            f"release={self.engine.release or 'unknown'!r}"
        )

    async def _pause(self, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drain_asked.wait(), wait_s)
