"""The ledger: every row is done or failed in the end, and accepted once."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.run.ledger import (
    DONE,
    FAILED,
    PENDING,
    Ledger,
    LedgerCounts,
    put_canary_first,
    row_shards,
)
from schemas.shard import Lease, LeaseKey, Shard

TTL_S = 10.0


def ledger(
    rows: int | bytes, *, shard_rows: int = 4, max_shard_losses: int = 3, ttl_s: float = TTL_S
) -> Ledger:
    return Ledger(
        row_states=bytearray(rows),
        shard_rows=shard_rows,
        lease_ttl_s=ttl_s,
        max_shard_losses=max_shard_losses,
    )


def leased(book: Ledger, worker_id: str = "w0", *, now_s: float = 0.0) -> Lease:
    lease = book.lease(worker_id, now_s=now_s)
    assert lease is not None
    return lease


def pairs(lease: Lease, rows: tuple[int, ...] | None = None) -> list[tuple[LeaseKey, int]]:
    return [(lease.key, row) for row in (lease.rows if rows is None else rows)]


def stale_numbers(book: Ledger, rows: list[tuple[LeaseKey, int]]) -> set[int]:
    return {row for _, row in book.stale_rows(rows)}


# -- cutting


def test_shards_cover_the_rows_and_the_last_may_be_shorter() -> None:
    assert row_shards(10, 4) == [
        Shard(shard_id=0, start=0, stop=4),
        Shard(shard_id=1, start=4, stop=8),
        Shard(shard_id=2, start=8, stop=10),
    ]


def test_no_rows_make_no_shards_and_a_ledger_that_is_over() -> None:
    assert row_shards(0, 4) == []
    book = ledger(0)
    assert book.is_over
    assert book.lease("w0", now_s=0.0) is None


def test_shard_larger_than_the_rows_is_one() -> None:
    assert row_shards(3, 100) == [Shard(shard_id=0, start=0, stop=3)]


# -- leasing


def test_each_shard_is_leased_to_one_worker() -> None:
    book = ledger(10)
    leases = [leased(book, f"w{number}") for number in range(3)]
    assert [lease.rows for lease in leases] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [lease.worker_id for lease in leases] == ["w0", "w1", "w2"]
    assert book.lease("w3", now_s=0.0) is None
    assert not book.is_over


def test_worker_may_hold_several_leases() -> None:
    book = ledger(8)
    first, second = leased(book), leased(book)
    book.mark_done(pairs(first) + pairs(second))
    assert book.is_over


def test_rows_done_beforehand_are_not_leased() -> None:
    book = ledger(bytes([DONE, PENDING, DONE, PENDING, DONE, DONE, DONE, DONE, PENDING]))
    assert book.counts() == LedgerCounts(
        rows_total=9,
        rows_done=6,
        rows_failed=0,
        shards_pending=2,
        shards_leased=0,
        leases_lost=0,
    )
    assert leased(book).rows == (1, 3)
    assert leased(book).rows == (8,)
    assert book.lease("w0", now_s=0.0) is None


def test_ledger_of_done_rows_is_over() -> None:
    book = ledger(bytes([DONE] * 6))
    assert book.is_over
    assert book.lease("w0", now_s=0.0) is None


def test_row_states_are_changed_in_place() -> None:
    states = bytearray(3)
    book = Ledger(row_states=states, shard_rows=3, lease_ttl_s=1.0, max_shard_losses=1)
    lease = leased(book)
    book.mark_done(pairs(lease, (1,)))
    book.set_aside(lease.key, 2)
    assert states == bytes([PENDING, DONE, FAILED])


# -- publishing


def test_shard_is_complete_when_its_last_row_is_published() -> None:
    book = ledger(4)
    lease = leased(book)
    book.mark_done(pairs(lease, (0, 1, 2)))
    assert (book.rows_done, book.counts().shards_leased, book.is_over) == (3, 1, False)
    book.mark_done(pairs(lease, (3,)))
    assert (book.rows_done, book.counts().shards_leased, book.is_over) == (4, 0, True)


def test_published_row_is_stale_when_it_comes_again() -> None:
    book = ledger(4)
    lease = leased(book)
    book.mark_done(pairs(lease, (1, 2)))
    assert stale_numbers(book, pairs(lease)) == {1, 2}
    with pytest.raises(ValueError, match="row 1 is not held"):
        book.mark_done(pairs(lease, (1,)))
    assert book.rows_done == 2


def test_row_of_another_shard_is_stale() -> None:
    book = ledger(8)
    first, second = leased(book, "w0"), leased(book, "w1")
    assert stale_numbers(book, [(first.key, 5), (second.key, 5), (first.key, 0)]) == {5}
    with pytest.raises(ValueError, match="row 5 is not held"):
        book.mark_done([(first.key, 5)])


def test_row_of_a_shard_that_is_not_known_is_stale() -> None:
    book = ledger(4)
    unknown = LeaseKey(shard_id=99, attempt=1)
    assert stale_numbers(book, [(unknown, 0)]) == {0}
    assert not book.set_aside(unknown, 0)
    assert book.give_back(unknown, 0) == 0


def test_row_that_was_never_leased_cannot_be_published() -> None:
    book = ledger(4)
    assert stale_numbers(book, [(LeaseKey(shard_id=0, attempt=0), 0)]) == {0}
    assert stale_numbers(book, [(LeaseKey(shard_id=0, attempt=1), 0)]) == {0}


# -- lost leases


def test_silent_worker_is_found_after_its_time_and_not_before() -> None:
    book = ledger(8)
    leased(book, "w0", now_s=0.0)
    leased(book, "w1", now_s=5.0)
    assert book.silent_workers(now_s=TTL_S) == []
    assert book.silent_workers(now_s=TTL_S + 0.1) == ["w0"]
    assert book.silent_workers(now_s=TTL_S + 5.1) == ["w0", "w1"]


def test_renewing_and_asking_for_a_lease_keep_a_worker_alive() -> None:
    book = ledger(4)
    leased(book, now_s=0.0)
    book.renew("w0", now_s=8.0)
    assert book.silent_workers(now_s=18.0) == []
    assert book.lease("w0", now_s=18.0) is None
    assert book.silent_workers(now_s=28.0) == []
    assert book.silent_workers(now_s=28.1) == ["w0"]


def test_worker_that_holds_nothing_is_not_missed() -> None:
    book = ledger(4)
    book.renew("w1", now_s=0.0)
    book.mark_done(pairs(leased(book, "w0", now_s=0.0)))
    assert book.silent_workers(now_s=1000.0) == []


def test_expired_lease_is_offered_again() -> None:
    book = ledger(8)
    lost = leased(book, "w0", now_s=0.0)
    leased(book, "w1", now_s=5.0)
    for worker_id in book.silent_workers(now_s=TTL_S + 1):
        assert book.worker_lost(worker_id) == []
    again = leased(book, "w1", now_s=TTL_S + 1)
    assert again.rows == lost.rows
    assert again.key == LeaseKey(shard_id=lost.key.shard_id, attempt=lost.key.attempt + 1)
    assert book.counts().leases_lost == 1


def test_lost_leases_come_before_the_rest_in_their_order() -> None:
    book = ledger(16)
    first, second = leased(book), leased(book)
    book.worker_lost("w0")
    assert [leased(book, "w1").rows for _ in range(3)] == [first.rows, second.rows, (8, 9, 10, 11)]


def test_published_rows_of_a_lost_lease_stay_done() -> None:
    book = ledger(4)
    lease = leased(book)
    book.mark_done(pairs(lease, (0, 2)))
    book.worker_lost("w0")
    assert leased(book, "w1").rows == (1, 3)
    assert book.rows_done == 2


def test_late_publisher_is_fenced_by_the_attempt() -> None:
    book = ledger(4)
    late = leased(book, "w0")
    book.worker_lost("w0")
    assert stale_numbers(book, pairs(late)) == {0, 1, 2, 3}, "while the shard is pending"
    current = leased(book, "w1")
    assert stale_numbers(book, pairs(late)) == {0, 1, 2, 3}, "while another has it"
    assert not book.set_aside(late.key, 0)
    assert book.give_back(late.key, 1) == 0
    assert stale_numbers(book, pairs(current)) == set()


def test_late_publisher_is_fenced_when_the_same_worker_has_the_shard_again() -> None:
    book = ledger(4)
    late = leased(book, "w0")
    book.worker_lost("w0")
    current = leased(book, "w0")
    assert stale_numbers(book, pairs(late)) == {0, 1, 2, 3}
    book.mark_done(pairs(current))
    assert stale_numbers(book, pairs(late)) == {0, 1, 2, 3}
    assert book.rows_done == 4


def test_losing_an_unknown_worker_changes_nothing() -> None:
    book = ledger(4)
    before = book.counts()
    assert book.worker_lost("nobody") == []
    book.worker_left("nobody")
    assert book.counts() == before


def test_shard_that_loses_too_many_workers_fails() -> None:
    book = ledger(8, max_shard_losses=2)
    book.mark_done(pairs(leased(book, "w0"), (1,)))
    assert book.worker_lost("w0") == []
    leased(book, "w1")
    assert book.worker_lost("w1") == [0, 2, 3]
    assert (book.rows_done, book.rows_failed) == (1, 3)
    assert leased(book, "w2").rows == (4, 5, 6, 7)
    assert book.lease("w2", now_s=0.0) is None
    book.mark_done([(LeaseKey(shard_id=1, attempt=1), row) for row in (4, 5, 6, 7)])
    assert book.is_over


def test_worker_that_left_is_no_loss() -> None:
    book = ledger(4, max_shard_losses=1)
    for _ in range(5):
        lease = leased(book, "w0")
        book.worker_left("w0")
    assert lease.key.attempt == 5
    assert (book.counts().leases_lost, book.rows_failed) == (0, 0)
    assert stale_numbers(book, pairs(lease)) == {0, 1, 2, 3}
    assert leased(book, "w1").rows == (0, 1, 2, 3)


def test_row_failures_and_losses_are_counted_apart() -> None:
    book = ledger(4, max_shard_losses=2)
    lease = leased(book, "w0")
    book.set_aside(lease.key, 0)
    assert (book.rows_failed, book.counts().leases_lost) == (1, 0)
    book.worker_lost("w0")
    assert (book.rows_failed, book.counts().leases_lost) == (1, 1)


def test_row_held_twice_is_stale_under_the_lease_that_was_given_back() -> None:
    book = ledger(8, shard_rows=8)
    lease = leased(book, "w0")
    assert book.give_back(lease.key, 4) == 4
    tail = leased(book, "w0")
    assert book.stale_rows([(lease.key, 7), (tail.key, 7)]) == {(lease.key, 7)}
    book.mark_done(pairs(tail))
    assert book.stale_rows([(tail.key, 7)]) == {(tail.key, 7)}


# -- set aside


def test_row_set_aside_is_not_offered_again() -> None:
    book = ledger(4)
    lease = leased(book, "w0")
    assert book.set_aside(lease.key, 2)
    assert not book.set_aside(lease.key, 2), "a second time"
    assert stale_numbers(book, pairs(lease)) == {2}
    book.worker_lost("w0")
    assert leased(book, "w1").rows == (0, 1, 3)


def test_setting_the_last_row_aside_closes_the_shard() -> None:
    book = ledger(2)
    lease = leased(book)
    book.mark_done(pairs(lease, (0,)))
    assert book.set_aside(lease.key, 1)
    assert (book.is_over, book.counts().shards_leased) == (True, 0)


def test_row_of_another_shard_cannot_be_set_aside() -> None:
    book = ledger(8)
    first = leased(book, "w0")
    assert not book.set_aside(first.key, 5)
    assert book.rows_failed == 0


# -- given back


def test_given_back_rows_become_the_next_shard() -> None:
    book = ledger(8)
    lease = leased(book, "w0")
    assert book.give_back(lease.key, 2) == 2
    taken = leased(book, "w1")
    assert taken.rows == (2, 3)
    assert taken.key.shard_id not in (0, 1)
    assert stale_numbers(book, pairs(lease)) == {2, 3}
    book.mark_done(pairs(lease, (0, 1)) + pairs(taken))
    assert leased(book, "w0").rows == (4, 5, 6, 7)


def test_giving_the_whole_shard_back_ends_the_lease() -> None:
    book = ledger(4)
    lease = leased(book, "w0")
    assert book.give_back(lease.key, 0) == 4
    assert book.counts().shards_leased == 0
    assert stale_numbers(book, pairs(lease)) == {0, 1, 2, 3}
    assert book.silent_workers(now_s=1000.0) == []
    assert leased(book, "w1").rows == (0, 1, 2, 3)


def test_giving_back_from_past_the_end_gives_nothing() -> None:
    book = ledger(8)
    lease = leased(book, "w0")
    assert book.give_back(lease.key, 4) == 0
    assert stale_numbers(book, pairs(lease)) == set()


def test_giving_back_rows_of_an_earlier_shard_gives_nothing() -> None:
    book = ledger(8)
    leased(book, "w0")
    lease = leased(book, "w1")
    assert book.give_back(lease.key, 3) == 0
    assert stale_numbers(book, pairs(lease)) == set()


def test_giving_finished_rows_back_gives_nothing_and_opens_nothing() -> None:
    book = ledger(4)
    lease = leased(book, "w0")
    book.mark_done(pairs(lease, (2,)))
    book.set_aside(lease.key, 3)
    assert book.give_back(lease.key, 2) == 0
    assert book.counts().shards_pending == 0
    book.mark_done(pairs(lease, (0, 1)))
    assert book.is_over


def test_giving_back_all_that_is_open_closes_the_shard() -> None:
    book = ledger(4)
    lease = leased(book, "w0")
    book.mark_done(pairs(lease, (0, 1)))
    assert book.give_back(lease.key, 2) == 2
    assert (book.counts().shards_leased, book.counts().shards_pending) == (0, 1)
    assert leased(book, "w1").rows == (2, 3)


def test_given_back_rows_keep_their_losses() -> None:
    book = ledger(4, max_shard_losses=2)
    leased(book, "w0")
    book.worker_lost("w0")
    lease = leased(book, "w1")
    book.give_back(lease.key, 2)
    leased(book, "w2")
    assert book.worker_lost("w2") == [2, 3]
    assert book.worker_lost("w1") == [0, 1]


# -- any order


@dataclass(slots=True)
class World:
    """A model of the rows, kept by the test to compare with the ledger."""

    book: Ledger
    accepted: set[int]
    failed: set[int] = field(default_factory=set)
    holder: dict[int, Lease] = field(default_factory=dict)
    believed: dict[str, list[Lease]] = field(default_factory=dict)
    """Leases as each worker sees them: one that fell silent still believes in its own."""
    last_seen_s: dict[str, float] = field(default_factory=dict)
    keys: set[LeaseKey] = field(default_factory=set)
    lost: int = 0
    now_s: float = 0.0


def take(world: World, worker_id: str, _: int) -> None:
    world.last_seen_s[worker_id] = world.now_s
    lease = world.book.lease(worker_id, now_s=world.now_s)
    if lease is None:
        open_rows = len(world.book.row_states) - len(world.accepted) - len(world.failed)
        assert len(world.holder) == open_rows, "nothing is pending"
        return
    assert lease.rows
    assert lease.key not in world.keys
    assert not set(lease.rows) & (world.accepted | world.failed | world.holder.keys())
    world.keys.add(lease.key)
    world.holder |= dict.fromkeys(lease.rows, lease)
    world.believed.setdefault(worker_id, []).append(lease)


def publish(world: World, worker_id: str, number: int) -> None:
    rows = [pair for lease in world.believed.get(worker_id, []) for pair in pairs(lease)]
    if not rows:
        return
    chosen = rows[number % len(rows) :: 1 + number % 3]
    stale = {pair for pair in chosen if not holds(world, *pair)}
    assert world.book.stale_rows(chosen) == stale
    for _, row in (fresh := [pair for pair in chosen if pair not in stale]):
        assert row not in world.accepted
        world.accepted.add(row)
        del world.holder[row]
    world.book.mark_done(fresh)


def holds(world: World, key: LeaseKey, row: int) -> bool:
    return row in world.holder and world.holder[row].key == key


def set_aside(world: World, worker_id: str, number: int) -> None:
    for lease in world.believed.get(worker_id, [])[:1]:
        row = lease.rows[number % len(lease.rows)]
        is_held = holds(world, lease.key, row)
        assert world.book.set_aside(lease.key, row) == is_held
        if is_held:
            world.failed.add(row)
            del world.holder[row]


def give_back(world: World, worker_id: str, number: int) -> None:
    for lease in world.believed.get(worker_id, [])[-1:]:
        first_row = lease.rows[number % len(lease.rows)]
        tail = [row for row in lease.rows if row >= first_row and holds(world, lease.key, row)]
        assert world.book.give_back(lease.key, first_row) == len(tail)
        for row in tail:
            del world.holder[row]


def die(world: World, worker_id: str, _: int) -> None:
    lose(world, worker_id)
    world.believed.pop(worker_id, None)


def leave(world: World, worker_id: str, _: int) -> None:
    world.book.worker_left(worker_id)
    world.believed.pop(worker_id, None)
    world.last_seen_s.pop(worker_id, None)
    for row in [row for row, lease in world.holder.items() if lease.worker_id == worker_id]:
        del world.holder[row]


def fall_silent(world: World, worker_id: str, number: int) -> None:
    """Renew all workers but this one; those whose time has passed lose their leases."""
    world.now_s += number % 8
    for other in world.believed:
        if other != worker_id:
            world.book.renew(other, now_s=world.now_s)
            world.last_seen_s[other] = world.now_s
    holders = {lease.worker_id for lease in world.holder.values()}
    silent = {name for name in holders if world.now_s - world.last_seen_s[name] > TTL_S}
    assert set(world.book.silent_workers(now_s=world.now_s)) == silent
    for name in silent:
        lose(world, name)


def lose(world: World, worker_id: str) -> None:
    held = {row: lease for row, lease in world.holder.items() if lease.worker_id == worker_id}
    world.lost += len({lease.key for lease in held.values()})
    given_up = world.book.worker_lost(worker_id)
    world.last_seen_s.pop(worker_id, None)
    assert set(given_up) <= held.keys()
    assert len(set(given_up)) == len(given_up)
    world.failed |= set(given_up)
    for row in held:
        del world.holder[row]


def agree(world: World) -> None:
    states, counts = world.book.row_states, world.book.counts()
    assert {row for row, state in enumerate(states) if state == DONE} == world.accepted
    assert {row for row, state in enumerate(states) if state == FAILED} == world.failed
    assert (counts.rows_done, counts.rows_failed) == (len(world.accepted), len(world.failed))
    assert counts.rows_total == len(states)
    assert counts.shards_leased == len({lease.key for lease in world.holder.values()})
    assert counts.leases_lost == world.lost
    assert world.book.is_over == (states.count(PENDING) == 0)


Step = tuple[Callable[[World, str, int], None], str, int]

OPERATIONS = (take, take, publish, publish, set_aside, give_back, die, leave, fall_silent)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(
    done_before=st.binary(max_size=30),
    shard_rows=st.integers(1, 9),
    max_shard_losses=st.integers(1, 4),
    steps=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.sampled_from("abc"), st.integers(0, 40)),
        max_size=60,
    ),
)
def test_every_row_ends_once_whatever_workers_do(
    done_before: bytes, shard_rows: int, max_shard_losses: int, steps: list[Step]
) -> None:
    states = bytes(DONE if byte > 200 else PENDING for byte in done_before)
    book = ledger(states, shard_rows=shard_rows, max_shard_losses=max_shard_losses)
    world = World(book, accepted={row for row, state in enumerate(states) if state == DONE})
    for operation, worker_id, number in steps:
        operation(world, worker_id, number)
        agree(world)
    for worker_id in "abc":
        leave(world, worker_id, 0)
    while not world.book.is_over:
        take(world, "last", 0)
        publish(world, "last", 0)
    agree(world)
    assert world.accepted | world.failed == set(range(len(states)))
    assert not world.accepted & world.failed
    assert book.lease("last", now_s=world.now_s) is None


def test_deaths_of_engines_are_counted_on_the_rows_in_flight() -> None:
    book = ledger(6, shard_rows=3)
    first = leased(book, "w0")
    book.engine_died([(first.key, 1), (first.key, 2)])
    book.worker_lost("w0")
    again = leased(book, "w1")
    assert again.deaths == ((1, 1), (2, 1))
    book.engine_died([(again.key, 2), (first.key, 1)])  # the second is of a lease that is over
    book.worker_lost("w1")
    assert leased(book, "w2").deaths == ((1, 1), (2, 2))


def test_shards_of_rows_that_have_begun_are_leased_first_and_a_canary_before_them() -> None:
    book = Ledger(row_states=bytearray(40), shard_rows=10, lease_ttl_s=60, max_shard_losses=3)
    book.put_first([25, 30])
    firsts = [lease.rows[0] for _ in range(4) if (lease := book.lease("w", now_s=0.0))]
    assert firsts == [20, 30, 0, 10]
    states = bytearray(40)
    put_canary_first(states, 2, seed=1)
    canary = {row for row in range(40) if states[row] == PENDING}
    book = Ledger(
        row_states=states, shard_rows=10, lease_ttl_s=60, max_shard_losses=3, has_canary=True
    )
    book.put_first([35])
    leases = [book.lease("w", now_s=0.0) for _ in range(6)]
    rows = [lease.rows for lease in leases if lease is not None]
    of_canary = [one for one in rows if not canary.isdisjoint(one)]
    assert rows[: len(of_canary)] == of_canary
    assert 35 in rows[len(of_canary)]
