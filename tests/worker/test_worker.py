"""A worker with a fake engine and the real ledger: a leased row ends once or is open again."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

import pytest

from pipeline.dataset.partials import Partials
from pipeline.dataset.prompts import conversation, history
from pipeline.errors import EngineError, EngineGivenUpError, EngineUnfitError
from pipeline.store.folder import LocalFolder
from pipeline.worker.intervals import Intervals
from pipeline.worker.worker import Worker
from schemas.completion import Interruption, Outcome, Refusal, Turn
from schemas.config.run_file import RunFile
from schemas.progress import Orders, Supply
from schemas.prompt import Message, Problem, Prompt, Request
from tests.fakes.desk import (
    QUICK,
    LocalBook,
    each_once,
    frozen,
    local_book,
    prompt,
    prompts_of,
    published_rows,
    worker_at,
)
from tests.fakes.fake_engine import FakeEngine, echo


@dataclass(slots=True)
class Desk:
    """A worker at its desk."""

    worker: Worker
    book: LocalBook
    engine: FakeEngine
    lines: list[str] = field(default_factory=list)

    def run(self) -> None:
        asyncio.run(self.worker.run())


MakeDesk = Callable[..., Desk]


@pytest.fixture
def desk(tmp_path: Path) -> MakeDesk:
    """Builds a worker: `desk(prompts, engine, intervals=…, retry={…})`."""

    def make(
        prompts: list[Prompt], fake: FakeEngine, intervals: Intervals = QUICK, **settings: object
    ) -> Desk:
        folder, config = LocalFolder(tmp_path), run_config(tmp_path, **settings)
        book = local_book(
            folder,
            len(prompts) * config.samples_per_prompt,
            shard_rows=config.work.shard_rows,
            max_shard_losses=config.work.max_shard_losses,
        )
        lines: list[str] = []
        worker = worker_at(
            book, frozen(folder, prompts), fake, config, log=lines.append, intervals=intervals
        )
        return Desk(worker, book, fake, lines)

    return make


def run_config(folder: Path, **settings: object) -> RunFile:
    values: dict[str, object] = {
        "prompts": {"path": "unused"},
        "model": "m",
        "output": {"folder": str(folder), "flush_interval_s": 0.05},
        "work": {"shard_rows": 5},
        "retry": {"backoff_initial_s": 0.001, "max_attempts": 3},
    }
    return RunFile.model_validate(values | settings)


def test_every_row_ends_once_and_the_engine_is_kept_full(desk: MakeDesk) -> None:
    at = desk(prompts_of(43), FakeEngine(max_running_requests=7), work={"shard_rows": 20})
    at.run()
    each_once(at.book, 43)
    assert at.engine.peak_in_flight == 7
    assert not at.engine.alive


def test_turns_are_regenerated_in_order_without_earlier_reasoning(desk: MakeDesk) -> None:
    at = desk([prompt(1, turns=3)], FakeEngine())
    at.run()
    asked = [request.messages for request in at.engine.requests]
    assert [len(messages) for messages in asked] == [1, 3, 5]
    assert asked[2][1] == Message(role="assistant", content="answer to question 1.0")
    assert asked[2][-1].content == "question 1.2"


def test_earlier_reasoning_is_fed_back_when_asked(desk: MakeDesk) -> None:
    at = desk([prompt(1, turns=2)], FakeEngine(), reasoning_in_history=True)
    at.run()
    assert at.engine.requests[1].messages[1].reasoning_content == "thinking of question 1.0"


def test_bad_row_becomes_an_error_row_and_no_engine_is_asked(desk: MakeDesk) -> None:
    bad = prompt(0, problem=Problem(kind="no_user_turn", text="no user turn among 2"))
    at = desk([bad, prompt(1)], FakeEngine())
    at.run()
    each_once(at.book, 2)
    assert len(at.engine.requests) == 1
    row = published_rows(at.book)["q000"]
    assert (row["status"], row["error_kind"]) == ("error", "no_user_turn")
    assert row["error_text"] == "no user turn among 2"


def test_prompt_over_the_context_becomes_an_error_row(desk: MakeDesk) -> None:
    # FakeEngine counts a token a character: "question 0.0" has twelve.
    at = desk([prompt(0)], FakeEngine(context_length=12))
    at.run()
    assert not at.engine.requests
    assert published_rows(at.book)["q000"]["error_kind"] == "over_context"


def test_refused_row_becomes_an_error_row_and_is_not_asked_again(desk: MakeDesk) -> None:
    at = desk(prompts_of(9), FakeEngine(script=refusing("question 0.0")))
    at.run()
    each_once(at.book, 9)
    assert len(at.engine.requests) == 9
    assert published_rows(at.book)["q000"]["error_text"] == "HTTP 400: no"
    assert at.worker.report().window_flags == {"error_rows": 1}


def refusing(*texts: str) -> Callable[[Request], Outcome]:
    """Refuse requests that end in one of these texts, or all if there are none."""

    def answer(request: Request) -> Outcome:
        if not texts or request.messages[-1].content in texts:
            return Refusal(kind="refused_by_engine", text="HTTP 400: no")
        return echo(request)

    return answer


def test_last_row_that_is_refused_is_an_error_row_if_the_engine_accepts_a_probe(
    desk: MakeDesk,
) -> None:
    at = desk(prompts_of(1), FakeEngine(script=refusing("question 0.0")))
    at.run()
    assert published_rows(at.book)["q000"]["error_text"] == "HTTP 400: no"
    assert at.engine.probes == [None]


@pytest.mark.parametrize("num_answers", [0, 30])
def test_engine_that_begins_to_refuse_everything_makes_no_error_rows(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, num_answers: int
) -> None:
    monkeypatch.setattr("pipeline.worker.refusals._PROBE_AFTER_S", 0.02)

    answers = iter(range(num_answers))

    def turned(request: Request) -> Outcome:
        return refusing()(request) if next(answers, None) is None else echo(request)

    at = desk(prompts_of(400), FakeEngine(script=turned))
    with pytest.raises(EngineError, match=r"drained: http://fake/v1: it refuses every request"):
        at.run()
    rows = published_rows(at.book)
    assert len(rows) == num_answers
    assert all(row["status"] == "ok" for row in rows.values())
    # The probe is a request that was answered before; twenty refusals are enough to begin with.
    assert {probe is None for probe in at.engine.probes} == {num_answers == 0}
    assert len(at.engine.requests) <= num_answers + 20 + 4
    assert "event=engine_drained worker=w0 engine=http://fake/v1" in at.lines[-1]
    assert "HTTP 400: no" in at.lines[-1]


def test_engine_that_denies_everything_leaves_and_uses_up_no_attempts(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.worker.refusals._PROBE_AFTER_S", 0.02)
    denial = Interruption(cause="HTTP 401: bad key", kind="denial", is_engines=True)
    at = desk(prompts_of(40), FakeEngine(script=lambda request: denial))
    with pytest.raises(EngineError, match="HTTP 401: bad key; mend the server"):
        at.run()
    assert not at.book.failed
    assert not at.book.parts


def test_rows_of_an_engine_that_refuses_all_are_done_by_its_neighbour(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.worker.refusals._PROBE_AFTER_S", 0.02)
    prompts = prompts_of(200)
    at = desk(prompts, FakeEngine(script=refusing()))
    good = worker_at(
        at.book, frozen(at.book.folder, prompts), FakeEngine(), at.worker.config, worker_id="w1"
    )

    async def both() -> tuple[BaseException | None, BaseException | None]:
        return await asyncio.gather(at.worker.run(), good.run(), return_exceptions=True)

    bad_end, good_end = asyncio.run(both())
    assert isinstance(bad_end, EngineError)
    assert good_end is None
    each_once(at.book, 200)
    assert all(row["status"] == "ok" for row in published_rows(at.book).values())


def test_interrupted_row_is_asked_again_from_the_turn_where_it_was(desk: MakeDesk) -> None:
    failing = [True]

    def second_turn_fails_once(request: Request) -> Outcome:
        if request.turn_index == 1 and failing.pop() if failing else False:
            return Interruption(cause="HTTP 503")
        return echo(request)

    at = desk([prompt(1, turns=2)], FakeEngine(script=second_turn_fails_once))
    at.run()
    assert [request.turn_index for request in at.engine.requests] == [0, 1, 1]
    assert published_rows(at.book)["q001"]["attempt"] == 2


def test_row_that_uses_up_its_budget_is_set_aside_with_its_last_cause(desk: MakeDesk) -> None:
    def one_is_never_answered(request: Request) -> Outcome:
        if request.row_id == "q002":
            return Interruption(cause="HTTP 500: broken")
        return echo(request)

    at = desk(prompts_of(5), FakeEngine(script=one_is_never_answered))
    at.run()
    assert sorted(at.book.ids()) == ["q000", "q001", "q003", "q004"]
    failed = at.book.failed[0]
    assert (failed.row_id, failed.cause, failed.attempts) == ("q002", "HTTP 500: broken", 3)


def test_retry_after_of_the_server_is_waited_for(desk: MakeDesk) -> None:
    asked_s: list[float] = []

    def busy_once(request: Request) -> Outcome:
        asked_s.append(monotonic())
        if len(asked_s) == 1:
            return Interruption(cause="HTTP 429", retry_after_s=0.4)
        return echo(request)

    desk(prompts_of(1), FakeEngine(script=busy_once)).run()
    assert asked_s[1] - asked_s[0] >= 0.4


def test_waiting_row_gives_its_place_to_another(desk: MakeDesk) -> None:
    def first_waits(request: Request) -> Outcome:
        if request.row_id == "q000" and not done:
            return Interruption(cause="HTTP 429", retry_after_s=0.3)
        done.append(request.row_id)
        return echo(request)

    done: list[str] = []
    at = desk(prompts_of(4), FakeEngine(script=first_waits, max_running_requests=2))
    at.run()
    assert done[-1] == "q000"
    each_once(at.book, 4)


def test_lost_engine_is_started_again_and_its_rows_are_done(desk: MakeDesk) -> None:
    at = desk(prompts_of(30), FakeEngine(dies_after=12))
    at.run()
    each_once(at.book, 30)
    assert at.engine.starts == 2
    assert at.book.lost == ["connection: refused"]
    assert "event=engine_lost worker=w0 cause='connection: refused'" in at.lines
    assert at.worker.report().restarts == 1
    assert not at.book.failed


def test_connection_that_breaks_while_the_engine_lives_costs_one_retry(desk: MakeDesk) -> None:
    def breaks_once(request: Request) -> Outcome:
        if not broken:
            broken.append(request.row_id)
            return Interruption(cause="connection: reset", connection_failed=True)
        return echo(request)

    broken: list[str] = []
    at = desk(prompts_of(10), FakeEngine(script=breaks_once))
    at.run()
    each_once(at.book, 10)
    assert at.engine.starts == 1
    assert len(at.engine.requests) == 11
    report = at.worker.report()
    assert (report.interruptions, report.requests, report.restarts) == (1, 11, 0)
    assert (report.last_cause, report.completion_tokens) == ("connection: reset", 20)


def block_the_loop(duration_s: float) -> None:
    time.sleep(duration_s)


class StarvedClientsEngine(FakeEngine):
    """An engine that is well, behind a client that is too busy to hear so."""

    def __init__(self, busy_checks: int) -> None:
        super().__init__()
        self.busy_checks = busy_checks
        self.checks = 0

    async def generate(self, request: Request) -> Outcome:
        if not self.requests:
            self.requests.append(request)
            return Interruption(cause="connection: not accepted", connection_failed=True)
        return await super().generate(request)

    async def is_alive(self) -> bool:
        self.checks += 1
        if self.checks > self.busy_checks:
            return True
        await asyncio.sleep(0.3)
        block_the_loop(1.3)
        await asyncio.sleep(0.3)
        return False


def test_engine_is_kept_while_its_client_is_too_busy_to_hear_it(desk: MakeDesk) -> None:
    at = desk(prompts_of(10), StarvedClientsEngine(busy_checks=1))
    at.run()
    each_once(at.book, 10)
    assert at.engine.starts == 1
    assert any(line.startswith("event=busy_client worker=w0 lag_s=1.") for line in at.lines)


def test_engine_that_does_not_answer_an_idle_client_is_lost(desk: MakeDesk) -> None:
    at = desk(prompts_of(10), FakeEngine(dies_after=3))
    at.run()
    assert at.engine.starts == 2
    assert not [line for line in at.lines if "busy_client" in line]


def test_worker_is_running_while_its_last_rows_are_in_flight(desk: MakeDesk) -> None:
    at = desk(prompts_of(2), AskedEngine(max_running_requests=4))
    at.run()
    busy = [report.state for report in at.book.reports if report.in_flight]
    assert busy
    assert set(busy) <= {"idle", "running"}
    assert busy[-1] == "running"


def test_fault_in_a_heartbeat_ends_the_worker(desk: MakeDesk) -> None:
    at = desk(prompts_of(20), AskedEngine(max_running_requests=1))
    at.book.orders = [ZeroDivisionError()]  # type: ignore[list-item]
    with pytest.raises(AttributeError, match="drain_cause"):
        at.run()


def test_engine_that_never_starts_ends_the_worker(desk: MakeDesk) -> None:
    at = desk(prompts_of(3), FakeEngine(starts_that_fail=99))
    with pytest.raises(EngineError, match="told to fail"):
        at.run()
    assert at.engine.starts == 2
    assert at.book.ids() == []


def test_engine_that_only_fails_is_given_up(desk: MakeDesk) -> None:
    engine = {"max_consecutive_failures": 4, "max_restarts": 0}
    at = desk(
        prompts_of(50),
        FakeEngine(script=lambda _: Interruption(cause="HTTP 502")),
        engine=engine,
        retry={"backoff_initial_s": 0.0, "max_attempts": 90},
    )
    with pytest.raises(EngineError, match="finished no row; the last failure was: HTTP 502"):
        at.run()
    assert not at.book.failed


def test_engine_that_is_busy_for_long_uses_up_no_attempts(desk: MakeDesk) -> None:
    # Ten times the attempts that a row has.
    left = 30

    def busy_at_first(request: Request) -> Outcome:
        nonlocal left
        left -= 1
        busy = Interruption(cause="HTTP 503", kind="refusal", is_engines=True)
        return busy if left >= 0 else turn_with("An answer of some words.", request)

    at = desk(
        [prompt(1)],
        FakeEngine(script=busy_at_first),
        engine={"max_consecutive_failures": 4},
        retry={"backoff_initial_s": 0.0, "max_attempts": 3},
    )
    at.run()
    assert not at.book.failed
    assert [row["error_text"] for row in published_rows(at.book).values()] == [None]
    assert len(at.engine.requests) == 31


def test_rows_of_an_engine_that_stays_busy_are_done_by_its_neighbour(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LEAVES_ROWS_AFTER_S", "_LEAVES_AGAIN_AFTER_S", "_MOST_REST_S"):
        monkeypatch.setattr(f"pipeline.worker.retries.{name}", 0.05)
    busy = Interruption(cause="HTTP 503", kind="refusal", is_engines=True)
    prompts = prompts_of(200)
    lines: list[str] = []
    at = desk(prompts, FakeEngine(script=lambda request: busy), retry={"backoff_initial_s": 0.01})
    at.worker.log = lines.append
    good = worker_at(
        at.book, frozen(at.book.folder, prompts), FakeEngine(), at.worker.config, worker_id="w1"
    )

    async def both() -> None:
        await asyncio.gather(at.worker.run(), good.run())

    asyncio.run(both())
    each_once(at.book, 200)
    assert lines[0].startswith("event=rows_left_to_others worker=w0 wait_s=")
    assert not at.book.failed
    assert not at.book.lost


def test_row_finished_under_a_lease_given_back_and_again_is_published_once(
    desk: MakeDesk,
) -> None:
    # A bad row is finished when it is leased. Given back with the rows before it and leased anew
    # before the flush, it stands twice in one batch: once stale, once fresh.
    bad = Problem(kind="no_user_turn", text="none")
    prompts = [*prompts_of(3), prompt(3, problem=bad), prompt(4, problem=bad)]
    at = desk(prompts, FakeEngine(), output={"folder": "unused", "flush_interval_s": 60})
    at.book.orders = [Orders(give_back_rows=0)]

    async def lease_give_back_and_go_on() -> None:
        await at.worker._lease()
        await at.worker._follow(Orders(give_back_rows=1))
        await at.worker.run()

    asyncio.run(lease_give_back_and_go_on())
    each_once(at.book, 5)


def test_worker_leases_no_more_than_keeps_the_engine_full(desk: MakeDesk) -> None:
    at = desk(prompts_of(40), FakeEngine(max_running_requests=4), work={"shard_rows": 5})
    asyncio.run(at.worker._lease())
    assert at.book.ledger.counts().shards_leased == 1
    more = desk(prompts_of(40), FakeEngine(max_running_requests=6), work={"shard_rows": 5})
    asyncio.run(more.worker._lease())
    assert more.book.ledger.counts().shards_leased == 2
    more.worker._backlog.clear()
    more.worker.stop()
    asyncio.run(more.worker._lease())
    assert more.book.ledger.counts().shards_leased == 2


def test_rows_asked_back_are_given_back_from_the_end(desk: MakeDesk) -> None:
    at = desk(prompts_of(10), FakeEngine(), work={"shard_rows": 10})

    async def lease_and_give_back() -> None:
        await at.worker._lease()
        await at.worker._follow(Orders(give_back_rows=4))

    asyncio.run(lease_and_give_back())
    assert [row.number for row in at.worker._backlog._line] == [0, 1, 2, 3, 4, 5]
    lease = at.book.ledger.lease("w1", now_s=monotonic())
    assert lease is not None
    assert lease.rows == (6, 7, 8, 9)


def test_half_of_the_queue_stays_however_much_is_asked_back(desk: MakeDesk) -> None:
    # Asked for all by an older report, a worker would run dry and lease its own rows anew.
    at = desk(prompts_of(10), FakeEngine(), work={"shard_rows": 10})

    async def lease_and_give_back() -> None:
        await at.worker._lease()
        await at.worker._follow(Orders(give_back_rows=10))
        at.worker._lease_if_short()

    asyncio.run(lease_and_give_back())
    assert [row.number for row in at.worker._backlog._line] == [0, 1, 2, 3, 4]
    assert not at.worker._leasing.is_running
    assert at.book.ledger.counts().shards_pending == 1


def test_worker_taken_for_dead_drops_its_rows(desk: MakeDesk) -> None:
    at = desk(prompts_of(5), FakeEngine())

    async def lose_leases() -> None:
        await at.worker._lease()
        at.book.ledger.worker_lost("w0")
        at.book.orders = [Orders(leases_are_lost=True)]
        await at.worker.run()

    asyncio.run(lose_leases())
    each_once(at.book, 5)


def test_lease_that_comes_while_the_rest_is_lost_is_not_forgotten(desk: MakeDesk) -> None:
    # Taken for dead, a worker may be given a lease before it hears of it, and drops it with the
    # others. What it holds no more is open again.
    at = desk(prompts_of(15), FakeEngine())

    async def lose_and_lease() -> None:
        await at.worker._lease()
        at.book.ledger.worker_lost("w0")
        at.worker._backlog.clear()
        await at.worker._lease()
        await at.worker._follow(Orders(leases_are_lost=True))
        await at.worker.run()

    asyncio.run(lose_and_lease())
    each_once(at.book, 15)


def test_worker_that_holds_nothing_gives_up_what_is_still_leased_to_it(desk: MakeDesk) -> None:
    at = desk(prompts_of(5), FakeEngine())

    async def forget() -> None:
        await at.book.lease("w0")
        await at.worker.run()

    asyncio.run(forget())
    each_once(at.book, 5)


def test_engine_that_refuses_all_comers_is_left_alone_for_as_long_as_it_says(
    desk: MakeDesk,
) -> None:
    opens_s: list[float] = []

    def busy_for_a_while(request: Request) -> Outcome:
        if not opens_s:
            opens_s.append(monotonic() + 0.6)
        if monotonic() < opens_s[0]:
            return Interruption(cause="HTTP 429", retry_after_s=0.7)
        return echo(request)

    at = desk(prompts_of(60), FakeEngine(script=busy_for_a_while, max_running_requests=4))
    at.run()
    each_once(at.book, 60)
    # Four were refused, and a few that were on their way; not one for each row.
    assert len(at.engine.requests) <= 60 + 12


def test_drained_worker_publishes_what_is_finished_and_starts_nothing(desk: MakeDesk) -> None:
    def stop_at_ten(request: Request) -> Outcome:
        if len(at.engine.requests) >= 10:
            at.worker.stop()
        return echo(request)

    at = desk(
        prompts_of(100),
        FakeEngine(script=stop_at_ten, max_running_requests=2),
        output={"folder": "unused", "flush_interval_s": 60},
    )
    at.run()
    assert 8 <= len(at.book.ids()) <= 11
    assert len(at.engine.requests) <= 12
    assert at.worker.report().state == "stopped"


def test_fault_of_our_own_is_not_swallowed(desk: MakeDesk) -> None:
    def broken(request: Request) -> Outcome:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        desk(prompts_of(2), FakeEngine(script=broken)).run()


def test_history_stops_at_the_first_open_place() -> None:
    messages = prompt(1, turns=2).messages
    assert history(messages, []) == messages[:1]
    filled = conversation(messages, [turn("a"), turn("b")])
    assert [message.content for message in filled] == ["question 1.0", "a", "question 1.1", "b"]
    assert filled[1].reasoning_content == "r"


def turn(answer: str) -> Turn:
    return Turn(
        reasoning_text="r",
        answer_text=answer,
        finish_reason="stop",
        prompt_tokens=1,
        completion_tokens=1,
        reasoning_tokens=None,
        prompt_token_ids=None,
        completion_token_ids=None,
        generation_boundary=None,
        duration_s=0.0,
    )


# -- turns that are generated again for their flags


def turn_with(text: str, request: Request, *, finish: str = "stop") -> Turn:
    good = echo(request)
    assert isinstance(good, Turn)
    return replace(good, answer_text=text, finish_reason=finish)  # type: ignore[arg-type]


def test_flagged_turn_is_generated_again_with_another_seed(desk: MakeDesk) -> None:
    def empty_at_first(request: Request) -> Outcome:
        is_first = not any(request.row_id == row for row in asked)
        asked.append(request.row_id)
        return turn_with("", request) if is_first else echo(request)

    asked: list[str] = []
    quality = {"empty_answer": {"policy": "retry"}}
    at = desk(prompts_of(6), FakeEngine(script=empty_at_first), quality=quality)
    at.run()
    each_once(at.book, 6)
    assert len(at.engine.requests) == 12
    assert len({request.sampling.seed for request in at.engine.requests}) == 12
    last = {request.row_id: request.sampling.seed for request in at.engine.requests}
    for row_id, row in published_rows(at.book).items():
        assert (row["flags"], row["quality_retries"], row["attempt"]) == ([], 1, 1)
        assert row["sampling"]["seed"] == last[row_id]


def test_turn_that_stays_bad_is_kept_with_its_flags_after_its_tries(desk: MakeDesk) -> None:
    at = desk(
        prompts_of(2),
        FakeEngine(script=lambda request: turn_with("", request)),
        quality={"empty_answer": {"policy": "retry"}, "max_attempts": 4},
    )
    at.run()
    assert len(at.engine.requests) == 8
    rows = published_rows(at.book).values()
    assert [(row["flags"], row["quality_retries"]) for row in rows] == [(["empty_answer"], 3)] * 2


def test_cut_turn_is_given_more_room_and_the_next_turn_the_usual(desk: MakeDesk) -> None:
    def needs_150(request: Request) -> Outcome:
        enough = (request.sampling.max_tokens or 0) >= 150 or request.turn_index == 1
        return echo(request) if enough else turn_with("an", request, finish="length")

    at = desk(
        [prompt(1, turns=2)],
        FakeEngine(script=needs_150),
        sampling={"max_tokens": 100},
        quality={"cut_in_answer": {"policy": "retry"}},
    )
    at.run()
    assert [request.sampling.max_tokens for request in at.engine.requests] == [100, 200, 100]
    row = published_rows(at.book)["q001"]
    assert (row["flags"], row["sampling"]["max_tokens"], len(row["turns"])) == ([], 200, 2)


def test_refused_larger_budget_leaves_the_turn_that_was_cut(desk: MakeDesk) -> None:
    def refuses_more(request: Request) -> Outcome:
        if (request.sampling.max_tokens or 0) > 100:
            return Refusal(kind="refused_by_engine", text="HTTP 400: too long")
        return turn_with("an", request, finish="length")

    at = desk(
        prompts_of(1),
        FakeEngine(script=refuses_more),
        sampling={"max_tokens": 100},
        quality={"cut_in_answer": {"policy": "retry"}},
    )
    at.run()
    row = published_rows(at.book)["q000"]
    assert (row["status"], row["flags"], row["quality_retries"]) == ("ok", ["cut_in_answer"], 0)
    assert row["sampling"]["max_tokens"] == 100


# -- engines that die, hang or sicken


def test_engine_that_hangs_is_started_again_and_its_rows_are_done(
    desk: MakeDesk,
) -> None:
    at = desk(prompts_of(30), HangingEngine(hangs_at=12), replace(QUICK, engine_check_s=0.02))
    at.run()
    each_once(at.book, 30)
    assert at.engine.starts == 2
    assert at.book.lost == ["hung: no token for 300 s"]


def test_engine_is_asked_for_trouble_with_what_the_worker_has_for_it(
    desk: MakeDesk,
) -> None:
    engine = AskedEngine(max_running_requests=3, starved="runs 1 of 3 requests")
    at = desk(prompts_of(20), engine, replace(QUICK, engine_check_s=0.01), work={"shard_rows": 20})
    at.run()
    each_once(at.book, 20)
    full = [supply for supply in engine.supplies if supply.in_flight == 3]
    assert any(supply.waiting >= 3 and supply.has_more for supply in full)
    assert at.worker.report().starved == "runs 1 of 3 requests"


@dataclass(slots=True, kw_only=True)
class AskedEngine(FakeEngine):
    """Slow, and keeps what it was told."""

    supplies: list[Supply] = field(default_factory=list)

    async def generate(self, request: Request) -> Outcome:
        await asyncio.sleep(0.05)
        return await FakeEngine.generate(self, request)

    async def trouble(self, supply: Supply) -> str | None:
        self.supplies.append(supply)
        return None


@dataclass(slots=True, kw_only=True)
class HangingEngine(FakeEngine):
    """Answers nothing from request `hangs_at` on, until it is started again."""

    hangs_at: int

    async def generate(self, request: Request) -> Outcome:
        if self.starts == 1 and len(self.requests) >= self.hangs_at:
            self.hangs = "hung: no token for 300 s"
            await asyncio.sleep(3600)
        return await FakeEngine.generate(self, request)


@dataclass(slots=True, kw_only=True)
class PoisonedEngine(FakeEngine):
    """Dies of one row, whatever else is in flight."""

    poison: str
    beside_poison: list[int] = field(default_factory=list)

    async def generate(self, request: Request) -> Outcome:
        if request.row_id != self.poison or not self.alive:
            return await FakeEngine.generate(self, request)
        await asyncio.sleep(0.01)
        self.beside_poison.append(self.in_flight)
        self.alive = False
        return Interruption(cause="connection: reset", connection_failed=True)


def test_row_that_kills_its_engine_is_tried_alone_and_then_ends_as_an_error_row(
    desk: MakeDesk,
) -> None:
    poisoned = PoisonedEngine(poison="q007", max_running_requests=4)
    at = desk(prompts_of(25), poisoned, engine={"max_deaths_in_flight": 2})
    at.run()
    each_once(at.book, 25)
    rows = published_rows(at.book)
    assert (rows["q007"]["status"], rows["q007"]["error_kind"]) == ("error", "engine_killed")
    assert "died 3 times with this row in flight" in str(rows["q007"]["error_text"])
    assert [row_id for row_id, row in rows.items() if row["status"] == "error"] == ["q007"]
    # Twice among others, the third time by itself.
    assert len(poisoned.beside_poison) == 3
    assert poisoned.beside_poison[2] == 0
    assert at.engine.starts == 4


def test_row_that_killed_engines_in_an_earlier_session_kills_one_more_at_most(
    desk: MakeDesk,
) -> None:
    poisoned = PoisonedEngine(poison="q007", max_running_requests=4)
    at = desk(prompts_of(25), poisoned, engine={"max_deaths_in_flight": 2})
    at.book.ledger.deaths[7] = 2
    at.run()
    rows = published_rows(at.book)
    assert (rows["q007"]["status"], rows["q007"]["error_kind"]) == ("error", "engine_killed")
    assert poisoned.beside_poison == [0]
    # Of its last death, too, a driver that dies before the row is published leaves a word.
    assert at.book.ledger.deaths[7] == 3
    assert at.engine.starts == 2


@dataclass(slots=True, kw_only=True)
class SlowPoisonedEngine(PoisonedEngine):
    """Others are in flight for long enough to be beside it."""

    async def generate(self, request: Request) -> Outcome:
        if request.row_id != self.poison:
            self.in_flight += 1
            try:
                await asyncio.sleep(0.03)
            finally:
                self.in_flight -= 1
        return await PoisonedEngine.generate(self, request)


@pytest.mark.parametrize(
    ("poison", "beside"),
    # The twenty suspects go in a group of sixteen, and the last four one by one.
    [("q003", [15, 0]), ("q019", [0])],
)
def test_many_rows_that_were_near_the_same_deaths_go_in_a_group_and_the_guilty_one_alone(
    desk: MakeDesk, poison: str, beside: list[int]
) -> None:
    poisoned = SlowPoisonedEngine(poison=poison, max_running_requests=20)
    # One shard, so that all are there when the first is tried.
    work = {"shard_rows": 30}
    at = desk(prompts_of(30), poisoned, engine={"max_deaths_in_flight": 2}, work=work)
    at.book.ledger.deaths.update(dict.fromkeys(range(20), 2))
    at.run()
    each_once(at.book, 30)
    rows = published_rows(at.book)
    assert [row_id for row_id, row in rows.items() if row["status"] == "error"] == [poison]
    assert poisoned.beside_poison == beside
    assert at.engine.starts == 1 + len(beside)


def test_row_that_was_only_near_deaths_is_answered_when_it_is_alone(desk: MakeDesk) -> None:
    poisoned = PoisonedEngine(poison="q001", max_running_requests=2)
    at = desk(prompts_of(3), poisoned, engine={"max_deaths_in_flight": 1})
    at.run()
    rows = published_rows(at.book)
    assert [rows[f"q{n:03d}"]["status"] for n in range(3)] == ["ok", "error", "ok"]


def test_engine_that_fails_nearly_all_is_started_again(desk: MakeDesk) -> None:
    failed: list[int] = []

    def sickens(request: Request) -> Outcome:
        failed.append(at.engine.starts)
        if at.engine.starts == 1 and len(failed) % 20:
            return Interruption(cause="HTTP 500: CUDA error")
        return echo(request)

    at = desk(
        prompts_of(60),
        FakeEngine(script=sickens, max_running_requests=16),
        retry={"backoff_initial_s": 0.001, "backoff_max_s": 0.002, "max_attempts": 1000},
    )
    at.run()
    each_once(at.book, 60)
    assert at.engine.starts == 2
    assert "of 200 requests failed, the last with: HTTP 500" in at.book.lost[0]


def test_worker_that_drains_does_not_wait_for_a_start(desk: MakeDesk) -> None:
    @dataclass(slots=True, kw_only=True)
    class SlowEngine(FakeEngine):
        async def start(self) -> None:
            await asyncio.sleep(3600)

    at = desk(prompts_of(3), SlowEngine())

    async def drained() -> None:
        running = asyncio.create_task(at.worker.run())
        await asyncio.sleep(0.05)
        at.worker.stop()
        await asyncio.wait_for(running, 5)

    asyncio.run(drained())
    assert at.book.ids() == []


def test_engine_that_is_given_up_ends_the_worker_at_once(desk: MakeDesk) -> None:
    @dataclass(slots=True, kw_only=True)
    class HopelessEngine(FakeEngine):
        async def start(self) -> None:
            self.starts += 1
            raise EngineGivenUpError("the model is not found; correct model")

    at = desk(prompts_of(3), HopelessEngine())
    with pytest.raises(EngineGivenUpError, match="correct model"):
        at.run()
    assert at.engine.starts == 1


def test_engine_that_breaks_the_contract_ends_the_worker_with_its_rows_open(desk: MakeDesk) -> None:
    def unfit(request: Request) -> Outcome:
        return Interruption(cause="its answers have no token ids", kind="breach")

    at = desk(prompts_of(6), FakeEngine(script=unfit))
    with pytest.raises(EngineUnfitError, match="http://fake/v1: its answers have no token ids"):
        at.run()
    assert (at.engine.starts, at.engine.alive) == (1, False)
    assert not published_rows(at.book)
    assert not at.book.ledger.is_over


def test_what_ran_stands_in_each_row(desk: MakeDesk) -> None:
    at = desk(prompts_of(2), FakeEngine(plan="--mem-fraction-static 0.86"))
    at.run()
    assert {row["plan"] for row in published_rows(at.book).values()} == {
        "--mem-fraction-static 0.86"
    }
    assert at.worker.report().plan == "--mem-fraction-static 0.86"


# -- an engine that turns bad


def test_drained_worker_leaves_and_its_flagged_rows_are_open_again(desk: MakeDesk) -> None:
    def bad_from_the_fourth(request: Request) -> Outcome:
        if request.row_id > "q009":
            # Others are on their way, so that nothing is flushed before its time.
            at.book.orders = [Orders(drain_cause="empty_answer in 9 of 9 rows")]
            return Interruption(cause="HTTP 429", retry_after_s=60)
        return turn_with("", request) if request.row_id > "q003" else echo(request)

    at = desk(
        prompts_of(20),
        FakeEngine(script=bad_from_the_fourth, max_running_requests=2),
        output={"folder": "unused", "flush_interval_s": 60},
        work={"shard_rows": 20},
    )
    with pytest.raises(EngineError, match="worker w0 was drained: empty_answer in 9 of 9 rows"):
        at.run()
    assert sorted(at.book.ids()) == ["q000", "q001", "q002", "q003"]
    assert not at.engine.alive
    assert at.book.ledger.counts().shards_leased == 0
    assert at.book.ledger.lease("w1", now_s=monotonic()) is not None


def test_report_tells_the_flags_of_the_last_rows_of_the_canary_none(desk: MakeDesk) -> None:
    at = desk(
        prompts_of(30),
        FakeEngine(script=lambda request: turn_with("", request)),
        quality={"window_rows": 12},
    )
    at.run()
    report = at.worker.report()
    assert (report.window_rows, report.window_flags) == (12, {"empty_answer": 12})
    canary = desk(prompts_of(8), FakeEngine(script=lambda request: turn_with("", request)))
    canary.book.ledger.has_canary = True
    canary.run()
    assert canary.worker.report().window_rows == 0


def test_planned_stop_keeps_the_turns_of_rows_between_turns(desk: MakeDesk, tmp_path: Path) -> None:
    at = desk([prompt(0, turns=3), prompt(1, turns=3)], FakeEngine())
    partials = Partials(folder=LocalFolder(tmp_path), run_id="r", settings="")
    at.worker._leases.partials = partials

    def stops_in_the_second_turn(request: Request) -> Outcome:
        if request.turn_index == 1:
            at.worker.stop()
            return Interruption(cause="abort")
        return echo(request)

    at.engine.script = stops_in_the_second_turn
    at.run()
    assert at.engine.requests[-1].turn_index == 1
    (name,) = partials.names()
    kept = partials.rows_of(name, {("q000", 0), ("q001", 0)})
    assert {key: len(row.turns) for key, row in kept.items()} == {("q000", 0): 1, ("q001", 0): 1}
    # No row has failed an attempt, and none is set aside.
    assert not at.book.failed


def test_rows_of_an_engine_that_turned_bad_are_not_kept(desk: MakeDesk, tmp_path: Path) -> None:
    at = desk([prompt(0, turns=2)], FakeEngine())
    partials = Partials(folder=LocalFolder(tmp_path), run_id="r", settings="")
    at.worker._leases.partials = partials

    def turns_bad(request: Request) -> Outcome:
        if request.turn_index == 1:
            at.book.orders.append(Orders(drain_cause="bad"))
            return Interruption(cause="HTTP 429", retry_after_s=60)
        return echo(request)

    at.engine.script = turns_bad
    with pytest.raises(EngineError, match="drained: bad"):
        at.run()
    assert not partials.names()
