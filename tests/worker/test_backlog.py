"""Rows that wait and rows in flight: who is sent next, who is given back."""

import asyncio

import pytest

from pipeline.worker.backlog import Backlog, InFlight
from pipeline.worker.retries import Suspects
from pipeline.worker.row import Row
from schemas.shard import LeaseKey
from tests.fakes.desk import prompt

KEY = LeaseKey(shard_id=0, attempt=1)


def row(number: int, *, deaths: int = 0, key: LeaseKey = KEY, started: bool = False) -> Row:
    return Row(
        key=key,
        number=number,
        prompt=prompt(number),
        sample_index=0,
        deaths=deaths,
        started_at_s=1.0 if started else 0.0,
    )


def backlog_of(*rows: Row) -> Backlog:
    backlog = Backlog(suspects=Suspects(max_deaths=2))
    for one in rows:
        backlog.add(one)
    return backlog


def numbers(rows: list[Row]) -> list[int]:
    return [one.number for one in rows]


def idle() -> InFlight:
    return InFlight(wake=asyncio.Event())


# -- what waits


def test_line_is_sent_in_order_as_far_as_there_is_room() -> None:
    backlog = backlog_of(*map(row, range(5)))
    assert numbers(backlog.take_next(idle(), 3)) == [0, 1, 2]
    assert numbers(backlog.take_next(idle(), 3)) == [3, 4]
    assert backlog.take_next(idle(), 3) == []
    assert not backlog


def test_rows_in_flight_use_room_and_more_than_the_engine_runs_leave_none() -> None:
    async def sent() -> None:
        in_flight = idle()
        for number in range(2):
            in_flight.send(row(10 + number), asyncio.sleep(60))
        backlog = backlog_of(*map(row, range(5)))
        assert numbers(backlog.take_next(in_flight, 3)) == [0]
        assert backlog.take_next(in_flight, 2) == []
        # The engine came back with a smaller cap.
        assert backlog.take_next(in_flight, 1) == []
        await in_flight.cancel_and_wait()

    asyncio.run(sent())


def test_delayed_row_returns_to_the_head_of_the_line_when_its_time_has_come() -> None:
    backlog = backlog_of(row(0))
    backlog.delay(row(1), 20.0)
    backlog.delay(row(2), 10.0)
    assert (backlog.num_waiting, backlog.num_delayed, len(backlog)) == (1, 2, 3)
    backlog.wake(9.9)
    assert backlog.num_delayed == 2
    backlog.wake(10.0)
    assert numbers(backlog.take_next(idle(), 9)) == [2, 0]
    backlog.wake(20.0)
    assert numbers(backlog.take_next(idle(), 9)) == [1]


def test_rows_delayed_to_the_same_moment_are_not_compared() -> None:
    backlog = backlog_of()
    for number in (3, 1, 2):
        backlog.delay(row(number), 5.0)
    backlog.wake(5.0)
    assert sorted(numbers(backlog.take_next(idle(), 9))) == [1, 2, 3]


def test_counts_name_rows_in_line_that_were_never_sent() -> None:
    backlog = backlog_of(row(0), row(1, started=True), row(2), row(3, deaths=2))
    assert backlog.num_not_started == 2
    assert backlog.num_waiting == 4


@pytest.mark.parametrize(("max_running", "is_short"), [(2, False), (3, False), (4, True)])
def test_line_is_short_when_the_engine_can_run_more_rows(max_running: int, is_short: bool) -> None:
    # The suspect waits apart: it is no supply of the others.
    backlog = backlog_of(*map(row, range(3)), row(9, deaths=2))
    assert backlog.is_short(max_running) is is_short


def test_eight_delayed_rows_for_each_running_one_are_not_yet_many() -> None:
    backlog = backlog_of()
    for number in range(16):
        backlog.delay(row(number), 1.0)
    assert not backlog.has_many_delayed(2)
    backlog.delay(row(16), 1.0)
    assert backlog.has_many_delayed(2)


def test_cleared_backlog_holds_nothing() -> None:
    backlog = backlog_of(row(0), row(1, deaths=2))
    backlog.delay(row(2), 1.0)
    backlog.clear()
    assert len(backlog) == 0


# -- suspects


def test_suspects_wait_until_nothing_else_is_left() -> None:
    backlog = backlog_of(row(0, deaths=2), row(1, deaths=1))
    assert numbers(backlog.take_next(idle(), 4)) == [1]
    backlog.delay(row(2), 1.0)
    assert backlog.take_next(idle(), 4) == []
    backlog.wake(1.0)
    assert numbers(backlog.take_next(idle(), 4)) == [2]
    assert numbers(backlog.take_next(idle(), 4)) == [0]


def test_suspect_does_not_join_other_rows_in_flight_and_they_do_not_join_it() -> None:
    async def sent() -> None:
        in_flight = idle()
        in_flight.send(row(1), asyncio.sleep(60))
        backlog = backlog_of(row(0, deaths=2))
        assert not backlog.has_suspects(in_flight)
        assert backlog.take_next(in_flight, 4) == []
        await in_flight.cancel_and_wait()
        (suspect,) = backlog.take_next(in_flight, 4)
        in_flight.send(suspect, asyncio.sleep(60))
        assert backlog.has_suspects(in_flight)
        backlog.add(row(2))
        assert backlog.take_next(in_flight, 4) == []
        await in_flight.cancel_and_wait()

    asyncio.run(sent())


def test_suspect_that_backed_off_waits_with_the_suspects() -> None:
    backlog = backlog_of(row(0))
    backlog.delay(row(1, deaths=2), 1.0)
    backlog.wake(1.0)
    assert len(backlog.suspects) == 1
    assert numbers(backlog.take_next(idle(), 4)) == [0]


# -- what is given back


def test_rows_are_given_back_from_the_end_and_half_of_the_line_stays() -> None:
    other = LeaseKey(shard_id=1, attempt=1)
    backlog = backlog_of(*map(row, range(4)), *(row(number, key=other) for number in range(4, 7)))
    # Seven in line: three go at most.
    assert backlog.take_unstarted(99) == {other: 4}
    assert backlog.take_unstarted(1) == {KEY: 3}
    assert numbers(backlog.take_next(idle(), 9)) == [0, 1, 2]


def test_first_row_of_each_lease_is_named_when_several_are_given_back() -> None:
    other = LeaseKey(shard_id=1, attempt=1)
    backlog = backlog_of(*map(row, range(6)), row(6, key=other), row(7, key=other))
    assert backlog.take_unstarted(4) == {KEY: 4, other: 6}


def test_row_that_was_sent_before_is_not_given_back_nor_those_ahead_of_it() -> None:
    backlog = backlog_of(row(0), row(1), row(2), row(3), row(4, started=True), row(5))
    assert backlog.take_unstarted(3) == {KEY: 5}
    assert backlog.take_unstarted(3) == {}


# -- what is in flight


def test_row_leaves_when_its_task_ends_and_the_loop_is_woken() -> None:
    async def sent() -> None:
        in_flight = idle()
        in_flight.send(row(1), asyncio.sleep(0))
        in_flight.send(row(2), asyncio.sleep(60))
        assert in_flight.oldest is not None
        assert (len(in_flight), in_flight.oldest.number) == (2, 1)
        await asyncio.wait_for(in_flight.wake.wait(), 5)
        assert numbers(list(in_flight)) == [2]
        in_flight.raise_fault()
        await in_flight.cancel_and_wait()
        assert in_flight.oldest is None
        in_flight.raise_fault()

    asyncio.run(sent())


def test_error_of_a_row_is_kept_for_the_loop() -> None:
    async def broken() -> None:
        raise ZeroDivisionError

    async def sent() -> None:
        in_flight = idle()
        in_flight.send(row(1), broken())
        await asyncio.wait_for(in_flight.wake.wait(), 5)
        assert len(in_flight) == 0
        with pytest.raises(ZeroDivisionError):
            in_flight.raise_fault()

    asyncio.run(sent())
