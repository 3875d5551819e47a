"""Start one engine, watch it, note when it is lost, and restart it on purpose."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from pipeline.errors import EngineError, EngineGivenUpError
from pipeline.worker.background import Background, ends_before
from pipeline.worker.intervals import Intervals
from pipeline.worker.leasing import HeldRows
from pipeline.worker.loop_lag import LoopLag
from pipeline.worker.ports import Engine
from pipeline.worker.retries import Starts, is_out_of_starts
from schemas.config.engine import EngineConfig
from schemas.progress import Supply

# assumed: a machine that is too busy during so many checks will not get better
_BUSY_CHECKS = 20
# Rows go on within this time of an endpoint's return; a probe costs the server nothing.
_MOST_BETWEEN_PROBES_S = 5.0
# The first report of a wait is at once, the next after this long, and then after twice as long.
_FIRST_REPORT_OF_WAIT_S = 30.0


@dataclass(slots=True, kw_only=True)
class EngineWatch:
    """Starts of one engine, and the cause for which it is to be restarted."""

    engine: Engine
    config: EngineConfig
    worker_id: str
    supply: Callable[[], Supply]
    """Return what the worker has for the engine at this moment."""
    log: Callable[[str], None]
    draining: asyncio.Event
    """Set when the worker is to end: no start is waited for any longer."""
    wake: asyncio.Event
    """Set by the watch when the engine is lost."""
    intervals: Intervals = field(default_factory=Intervals)
    lost_cause: str | None = None
    """Cause for which the engine must be restarted; None while it may be well."""
    last_cause: str | None = None
    num_restarts: int = 0
    _starts: Starts = field(default_factory=Starts)
    _report_wait_from_s: float = 0.0
    _watching: Background = field(default_factory=Background)
    _lag: LoopLag = field(default_factory=LoopLag)
    _measuring: Background = field(default_factory=Background)

    # -- what happens to the engine

    def note_interruption(self, cause: str) -> None:
        self.last_cause = cause

    def note_lost(self, cause: str) -> None:
        """Note that the engine must be restarted; the first cause counts."""
        self.lost_cause = self.lost_cause or cause

    def note_finished_row(self) -> None:
        self._starts.reset()

    async def is_alive(self) -> bool:
        """Return whether the engine answers. A client too busy to hear the answer asks again."""
        for _ in range(_BUSY_CHECKS):
            began_s = monotonic()
            if await self.engine.is_alive():
                return True
            if not (lag_s := self._lag.longest_since(began_s)):
                break
            self.log(f"event=busy_client worker={self.worker_id} lag_s={lag_s:.1f}")
        return False

    # -- start, restart and stop

    async def start(self, *, is_first: bool = True) -> bool:
        """Start the engine, again if it fails, and watch it. Return False when told to drain.

        Raises EngineError when the engine used up the starts that its kind has.
        """
        since_s, attempts = monotonic(), 0
        waits = self.config.kind == "endpoint" and not is_first
        while not self.draining.is_set():
            await self._pause(attempts)
            attempts += 1
            try:
                # A start may take an hour: a worker that drains does not wait for it.
                if not await ends_before(self.engine.start(), self.draining):
                    return False
            except EngineError as error:
                lost_s = monotonic() - since_s
                self._note_failed_start(error, lost_s if waits else None)
                if isinstance(error, EngineGivenUpError) or is_out_of_starts(
                    self.config, is_first=is_first, attempts=attempts, lost_s=lost_s
                ):
                    raise
                continue
            self._count_start()
            self._watching.start(self._watch_forever())
            self._measuring.start(self._lag.watch())
            return True
        return False

    async def restart(self) -> bool:
        """Start a lost engine again."""
        self.lost_cause = None
        self._report_wait_from_s = 0.0
        self.num_restarts += 1
        return await self.start(is_first=False)

    async def stop_watching(self) -> None:
        await asyncio.gather(self._watching.cancel(), self._measuring.cancel())

    def raise_fault(self) -> None:
        """Raise the error that ended the watch, if any."""
        self._watching.raise_fault()

    async def _pause(self, attempts: int) -> None:
        backoff_s = self.intervals.backoff_before_start_s(max(attempts, self._starts.count))
        if self.config.kind == "endpoint":
            backoff_s = min(backoff_s, _MOST_BETWEEN_PROBES_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.draining.wait(), backoff_s)

    def _note_failed_start(self, error: EngineError, waited_s: float | None) -> None:
        """Report a start that failed; of an endpoint that is waited for, once in a while."""
        self.last_cause = str(error)
        if waited_s is None:
            self.log(f"event=engine_failed worker={self.worker_id} cause={str(error)!r}")
        elif waited_s >= self._report_wait_from_s:
            self._report_wait_from_s = max(2 * waited_s, _FIRST_REPORT_OF_WAIT_S)
            self.log(
                f"event=waiting_for_engines worker={self.worker_id} waited_s={waited_s:.0f} "
                f"patience_s={self.config.outage_patience_s:.0f} cause={str(error)!r}"
            )

    def _count_start(self) -> None:
        """Raises EngineError for an engine that starts again and again and finishes no row."""
        now_s = monotonic()
        num_starts = self._starts.note_start(self.engine.plan, now_s=now_s)
        # SGLang's launches are counted by cause, and an endpoint's connections cost nothing.
        if self.config.kind == "embedded" and self._starts.are_too_frequent(now_s):
            raise EngineError(f"the engine died too often; the last time by: {self.last_cause}")
        if num_starts > self.config.max_restarts + 1:
            raise EngineError(
                f"the engine was started {num_starts} times and finished no row; "
                f"the last failure was: {self.last_cause}"
            )
        self.log(
            f"event=engine_ready worker={self.worker_id} engine={self.engine.name} "
            f"release={self.engine.release or 'unknown'!r}"
        )

    async def _watch_forever(self) -> None:
        """Check that an engine that seems to run also works, until it does not."""
        while self.lost_cause is None:
            await asyncio.sleep(self.intervals.engine_check_s)
            trouble = await self.engine.trouble(self.supply())
            if trouble is not None:
                self.lost_cause = self.last_cause = trouble
                self.wake.set()


@dataclass(slots=True)
class Relaunch:
    """Order to restart one engine under other launch flags.

    Invariant: a row of the engine is finished and published, or open again with what it has.
    """

    engine: Engine
    watch: EngineWatch
    rows: HeldRows
    wake: asyncio.Event
    _plan: tuple[str, ...] | None = None

    @property
    def is_ordered(self) -> bool:
        """Tell if an order is still to be carried out; rows that are cut off belong to it."""
        return self._plan is not None

    def order(self, plan: tuple[str, ...]) -> None:
        self._plan = plan
        self.wake.set()

    def forget(self) -> None:
        """Drop the order: the engine was lost before it."""
        self._plan = None

    async def carry_out(self) -> None:
        """Leave the rows to whichever engine is up first, and start this one anew.

        Raises EngineError when neither the new flags nor the former ones start.
        """
        assert self._plan is not None
        await self.watch.stop_watching()
        await self.rows.hand_over()
        await self.engine.stop()
        self.engine.use_plan(self._plan)
        self._plan = None
        await self.watch.restart()
