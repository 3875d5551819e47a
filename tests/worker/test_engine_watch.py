"""An engine's start, watch and restart, without rows."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from pipeline.errors import EngineError, EngineGivenUpError
from pipeline.worker.background import ends_before
from pipeline.worker.engine_watch import EngineWatch
from pipeline.worker.intervals import Intervals
from schemas.config.engine import EngineConfig
from schemas.progress import Supply
from tests.fakes.fake_engine import FakeEngine

AT_ONCE = Intervals(engine_check_s=0.0, restart_backoff_s=(0.0,))
Answer = TypeVar("Answer")


@dataclass(slots=True)
class Watched:
    """A watch with what it logs."""

    watch: EngineWatch
    lines: list[str] = field(default_factory=list)


def watched(
    engine: FakeEngine, intervals: Intervals = AT_ONCE, supply: Supply | None = None, **more: object
) -> Watched:
    lines: list[str] = []
    values = more or {"kind": "sglang", "command": ["sglang"], "max_restarts": 3}
    watch = EngineWatch(
        engine=engine,
        config=EngineConfig.model_validate(values),
        worker_id="w7",
        supply=lambda: supply or Supply(in_flight=1),
        log=lines.append,
        draining=asyncio.Event(),
        wake=asyncio.Event(),
        intervals=intervals,
    )
    return Watched(watch, lines)


def run(work: Coroutine[None, None, Answer]) -> Answer:
    return asyncio.run(work)


async def started(watch: EngineWatch, *, is_first: bool = True) -> bool:
    try:
        return await watch.start(is_first=is_first)
    finally:
        await watch.stop_watching()


def test_engine_that_starts_is_logged_with_its_release() -> None:
    at = watched(FakeEngine())
    assert run(started(at.watch)) is True
    assert at.lines == ["event=engine_ready worker=w7 engine=fake release='fake 1'"]
    assert at.watch.num_restarts == 0


def test_first_start_is_tried_twice() -> None:
    engine = FakeEngine(starts_that_fail=1)
    at = watched(engine)
    assert run(started(at.watch)) is True
    assert engine.starts == 2
    failed = "the fake engine was told to fail at its start"
    assert at.lines[0] == f"event=engine_failed worker=w7 cause={failed!r}"
    assert at.watch.last_cause == failed
    hopeless = FakeEngine(starts_that_fail=9)
    with pytest.raises(EngineError, match="told to fail"):
        run(started(watched(hopeless).watch))
    assert hopeless.starts == 2


def test_later_start_is_tried_as_often_as_the_run_file_allows() -> None:
    engine = FakeEngine(starts_that_fail=9)
    with pytest.raises(EngineError, match="told to fail"):
        run(started(watched(engine).watch, is_first=False))
    assert engine.starts == 3


def test_endpoint_that_is_lost_is_tried_for_as_long_as_the_run_file_says() -> None:
    def endpoint(engine: FakeEngine, patience_s: float, intervals: Intervals) -> EngineWatch:
        urls = ["http://x/v1"]
        return watched(
            engine,
            intervals,
            None,
            kind="endpoint",
            base_urls=urls,
            outage_patience_s=patience_s,
        ).watch

    engine = FakeEngine(starts_that_fail=8)
    assert run(started(endpoint(engine, 60.0, AT_ONCE), is_first=False)) is True
    assert engine.starts == 9
    gone, slow = FakeEngine(starts_that_fail=10**6), Intervals(restart_backoff_s=(0.0, 0.03))
    with pytest.raises(EngineError, match="told to fail"):
        run(started(endpoint(gone, 0.1, slow), is_first=False))
    assert 3 <= gone.starts <= 6


def test_engine_that_starts_and_finishes_no_row_is_abandoned() -> None:
    async def restarted_for_ever(at: Watched) -> None:
        at.watch.note_interruption("HTTP 502")
        while True:
            await started(at.watch)

    engine = FakeEngine()
    with pytest.raises(EngineError, match=r"started 5 times and finished no row; .*: HTTP 502"):
        run(restarted_for_ever(watched(engine)))
    # The first start and the three restarts of the run file are allowed.
    assert engine.starts == 5


def test_embedded_engine_that_dies_again_and_again_is_abandoned_whatever_it_finished() -> None:
    async def restarted_for_ever(at: Watched) -> None:
        while True:
            await started(at.watch)
            at.watch.note_finished_row()
            at.watch.note_interruption("its process is gone")

    engine = FakeEngine()
    with pytest.raises(EngineError, match="died too often; the last time by: its process is gone"):
        run(restarted_for_ever(watched(engine, kind="embedded")))
    assert engine.starts == 21


def test_finished_row_makes_all_starts_available_again() -> None:
    async def restarted(at: Watched) -> None:
        for _ in range(4):
            await started(at.watch)
        at.watch.note_finished_row()
        for _ in range(4):
            await started(at.watch)

    engine = FakeEngine()
    run(restarted(watched(engine)))
    assert engine.starts == 8


def test_error_that_no_restart_mends_ends_the_starts_at_once() -> None:
    @dataclass(slots=True, kw_only=True)
    class Hopeless(FakeEngine):
        async def start(self) -> None:
            self.starts += 1
            raise EngineGivenUpError("the model is not found")

    engine = Hopeless()
    with pytest.raises(EngineGivenUpError):
        run(started(watched(engine).watch, is_first=False))
    assert engine.starts == 1


def test_worker_that_drains_starts_no_engine_and_waits_for_none() -> None:
    async def drained(at: Watched) -> tuple[bool, bool]:
        asyncio.get_running_loop().call_later(0.02, at.watch.draining.set)
        return await started(at.watch), await started(at.watch)

    @dataclass(slots=True, kw_only=True)
    class Slow(FakeEngine):
        async def start(self) -> None:
            self.starts += 1
            await asyncio.sleep(3600)

    engine = Slow()
    assert run(drained(watched(engine))) == (False, False)
    assert engine.starts == 1


def test_each_start_in_a_row_waits_longer_up_to_the_last_backoff() -> None:
    usual = Intervals()
    waits_s = [usual.backoff_before_start_s(number) for number in range(8)]
    assert waits_s == [0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 30.0, 30.0]


def test_backoff_is_waited_out_before_another_start() -> None:
    async def timed(at: Watched) -> float:
        began_s = asyncio.get_running_loop().time()
        await started(at.watch)
        return asyncio.get_running_loop().time() - began_s

    slow = Intervals(restart_backoff_s=(0.0, 0.2))
    assert run(timed(watched(FakeEngine(), slow))) < 0.1
    assert run(timed(watched(FakeEngine(starts_that_fail=1), slow))) >= 0.2
    # An engine that came up and finished no row waits too, although no start failed.
    at = watched(FakeEngine(), slow)
    run(started(at.watch))
    at.watch.draining, at.watch.wake = asyncio.Event(), asyncio.Event()
    assert run(timed(at)) >= 0.2


def test_trouble_of_a_running_engine_is_noted_and_wakes_the_worker() -> None:
    async def hung(at: Watched, engine: FakeEngine) -> None:
        await at.watch.start()
        engine.hangs = "hung: no token for 300 s"
        await asyncio.wait_for(at.watch.wake.wait(), 5)
        await at.watch.stop_watching()

    engine = FakeEngine()
    at = watched(engine)
    run(hung(at, engine))
    assert at.watch.lost_cause == at.watch.last_cause == "hung: no token for 300 s"


def test_engine_without_requests_is_not_taken_for_hung() -> None:
    async def idle(at: Watched, engine: FakeEngine) -> None:
        await at.watch.start()
        engine.hangs = "hung"
        await asyncio.sleep(0.05)
        await at.watch.stop_watching()

    engine = FakeEngine()
    at = watched(engine, supply=Supply(in_flight=0))
    run(idle(at, engine))
    assert at.watch.lost_cause is None


def test_first_cause_of_a_loss_counts_and_a_restart_clears_it() -> None:
    async def restarted(at: Watched) -> bool:
        at.watch.note_lost("connection: reset")
        at.watch.note_lost("8 requests failed")
        assert at.watch.lost_cause == "connection: reset"
        came_up = await at.watch.restart()
        await at.watch.stop_watching()
        return came_up

    engine = FakeEngine(starts_that_fail=2)
    at = watched(engine)
    assert run(restarted(at)) is True
    assert (at.watch.lost_cause, at.watch.num_restarts, engine.starts) == (None, 1, 3)


def test_error_of_the_watch_reaches_the_worker() -> None:
    @dataclass(slots=True, kw_only=True)
    class Broken(FakeEngine):
        async def trouble(self, supply: Supply) -> str | None:
            raise ZeroDivisionError

    async def watching(at: Watched) -> None:
        at.watch.raise_fault()
        await at.watch.start()
        await asyncio.sleep(0.05)
        at.watch.raise_fault()

    with pytest.raises(ZeroDivisionError):
        run(watching(watched(Broken())))


# -- work that is cancelled when a stop comes first


def test_work_that_ends_in_time_is_told_from_work_that_is_cancelled() -> None:
    cancelled: list[bool] = []

    async def endless() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def raced() -> tuple[bool, bool]:
        stop = asyncio.Event()
        in_time = await ends_before(asyncio.sleep(0), stop)
        stop.set()
        return in_time, await ends_before(endless(), stop)

    assert run(raced()) == (True, False)
    assert cancelled == [True]


def test_error_of_the_work_is_raised() -> None:
    async def broken() -> None:
        raise ZeroDivisionError

    async def raced() -> None:
        await ends_before(broken(), asyncio.Event())

    with pytest.raises(ZeroDivisionError):
        run(raced())
