"""An engine's metrics over time: hung, starved, or at work."""

import pytest

from pipeline.engines.health import Deadline, StartWatch, Watch
from pipeline.engines.process.counters import Activity
from pipeline.planner.sglang.metrics import EngineLoad
from schemas.progress import Supply


def reading(*, tokens: float = 0.0, **changes: float) -> EngineLoad:
    values = {"running": 8.0, "queued": 0.0, "retracted": 0.0, "token_usage": 0.2}
    return EngineLoad(**{"state_usage": 0.0, **values, **changes}, progress=(tokens,))


def watched(watch: Watch, *readings: tuple[float, EngineLoad | None, int, int]) -> list[str | None]:
    """Feed readings: the time, the load, requests in flight and all answers so far."""
    hangs = []
    for now_s, load, in_flight, num_answers in readings:
        while watch.num_answers < num_answers:
            watch.note_answer()
        watch.observe_hang(now_s=now_s, load=load, in_flight=in_flight)
        hangs.append(watch.hang)
    return hangs


def test_engine_that_makes_tokens_is_not_hung_however_long_an_answer_takes() -> None:
    watch = Watch(hang_timeout_s=60)
    told = watched(watch, *((now_s, reading(tokens=now_s), 8, 0) for now_s in range(0, 5000, 50)))
    assert told == [None] * 100


def test_engine_with_requests_and_without_tokens_is_hung() -> None:
    still = reading(tokens=7.0)
    told = watched(Watch(hang_timeout_s=60), *((now_s, still, 8, 3) for now_s in (0, 30, 59, 60)))
    assert told[:3] == [None, None, None]
    assert told[3] == "hung: no token for 60 s with 8 requests in flight (running 8, queued 0)"


def test_engine_whose_metrics_do_not_answer_is_hung_with_requests_in_flight() -> None:
    watch = Watch(hang_timeout_s=60)
    told = watched(watch, (0, reading(tokens=1.0), 8, 0), (30, None, 8, 0), (90, None, 8, 0))
    assert told[:2] == [None, None]
    assert "metrics do not answer" in str(told[2])


def test_answers_that_come_back_are_life_whatever_the_metrics_say() -> None:
    watch = Watch(hang_timeout_s=60)
    told = watched(watch, *((now_s, None, 8, now_s) for now_s in range(0, 600, 50)))
    assert told == [None] * 12


def test_idle_engine_is_not_hung() -> None:
    still = reading(tokens=7.0, running=0.0)
    watch = Watch(hang_timeout_s=60)
    assert watched(watch, (0, still, 0, 3), (9000, still, 0, 3), (9030, still, 1, 3)) == [None] * 3


def test_engine_of_ours_without_metrics_is_hung_when_its_cpu_stands_still() -> None:
    watch = Watch(hang_timeout_s=60)
    hangs = []
    for now_s, ticks in ((0, 5), (50, 6), (109, 6), (110, 6), (120, 7)):
        watch.observe_hang(now_s=now_s, load=None, in_flight=2, cpu_ticks=ticks)
        hangs.append(watch.hang is not None)
    assert hangs == [False, False, False, True, False]


def test_server_without_counters_is_silent_after_the_timeout_or_twice_its_longest_answer() -> None:
    def silence(at_s: float, longest_s: float) -> str | None:
        watch = Watch(hang_timeout_s=60)
        watch.observe_silence(now_s=0.0, in_flight=3)
        watch.note_answer(longest_s)
        watch.observe_silence(now_s=1.0, in_flight=3)
        watch.observe_silence(now_s=1.0 + at_s, in_flight=3)
        return watch.hang

    assert silence(59.0, 10.0) is None
    assert silence(60.0, 10.0) == "hung: no answer for 60 s with 3 requests in flight"
    assert silence(199.0, 100.0) is None
    assert silence(200.0, 100.0) is not None


def test_sign_of_life_begins_the_silence_anew() -> None:
    watch = Watch(hang_timeout_s=60)
    watch.observe_silence(now_s=0.0, in_flight=3)
    watch.note_life(50.0)
    watch.observe_silence(now_s=109.0, in_flight=3)
    assert watch.hang is None


# -- deadlines


def test_deadline_follows_the_rate_of_an_engine_that_is_slower_than_assumed() -> None:
    # 60 s, and 1,000 tokens at 4 tokens/s.
    deadline = Deadline(base_s=310.0, most_tokens=1000)
    deadline.note_answer(100, 10.0)
    assert deadline.seconds == 310.0, "10 tokens/s need less"
    # 1 token/s: 1,000 tokens at half of it.
    slow = Deadline(base_s=310.0, most_tokens=1000)
    slow.note_answer(100, 100.0)
    assert slow.seconds == 60 + 1000 / 0.5
    for _ in range(64):
        slow.note_answer(100, 10.0)
    assert slow.seconds == 310.0, "the engine has recovered"


def test_short_answers_and_those_without_counts_show_no_rate() -> None:
    deadline = Deadline(base_s=310.0, most_tokens=1000)
    deadline.note_answer(15, 100.0)
    deadline.note_answer(None, 100.0)
    assert deadline.seconds == 310.0


def test_deadline_doubles_once_for_all_requests_that_were_sent_with_it() -> None:
    deadline = Deadline(base_s=100.0, most_tokens=1000)
    for _ in range(16):
        deadline.note_late(100.0)
    assert deadline.seconds == 200.0
    for limit_s in (100.0, 200.0, 200.0, 400.0, 800.0, 1600.0, 1600.0):
        deadline.note_late(limit_s)
    assert deadline.seconds == 1600.0, "sixteen times is the most"


def test_deadline_of_the_run_file_stays() -> None:
    deadline = Deadline(base_s=7.0, most_tokens=1000, is_fixed=True)
    deadline.note_answer(100, 100.0)
    deadline.note_late(7.0)
    assert deadline.seconds == 7.0


def test_engine_that_throws_more_away_than_it_keeps_is_reported_at_each_doubling() -> None:
    deadline = Deadline(base_s=100.0, most_tokens=1000, is_fixed=True)
    reports = []
    for number in range(1, 45):
        deadline.note_late(100.0)
        if deadline.take_report() is not None:
            reports.append(number)
    assert reports == [10, 20, 40]
    for _ in range(100):
        deadline.note_answer(100, 10.0)
    for _ in range(50):
        deadline.note_late(100.0)
    assert deadline.take_report() is None


FED = Supply(in_flight=32, waiting=32)


def starving(watch: Watch, load: EngineLoad, supply: Supply = FED) -> str | None:
    told = [
        watch.observe_starvation(now_s=now_s, load=load, supply=supply, cap=32)
        for now_s in (0.0, 60.0, 130.0, 200.0)
    ]
    assert told[:2] == [None, None]
    assert told[3] is None, "told once"
    return told[2]


def test_starved_engine_tells_what_it_is_short_of() -> None:
    def short_of(**changes: float) -> str:
        return str(starving(Watch(hang_timeout_s=60), reading(**changes)))

    assert "state slots (95% in use)" in short_of(state_usage=0.95, queued=8.0)
    assert "KV tokens (97% in use)" in short_of(token_usage=0.97, queued=8.0)
    assert "wait for admission" in short_of(queued=8.0)
    assert "runs 8 of 32 requests" in short_of(queued=8.0)
    assert "on their way between client and scheduler" in short_of()


@pytest.mark.parametrize(
    ("supply", "why"),
    [
        (Supply(in_flight=2, backing_off=90), "rows wait for their next attempt"),
        (Supply(in_flight=2, waiting=40, held_s=9.0), "the engine asked to wait (Retry-After)"),
        (
            Supply(in_flight=1, waiting=40, is_alone=True),
            "a row that may have killed engines",
        ),
        (
            Supply(in_flight=2, is_leasing=True),
            "the coordinator has not answered",
        ),
        (Supply(in_flight=2, waiting=40), "rows wait to be sent"),
    ],
)
def test_engine_with_few_requests_although_there_are_rows_tells_why(
    supply: Supply, why: str
) -> None:
    watch = Watch(hang_timeout_s=60)
    told = str(starving(watch, reading(running=2.0), supply))
    assert told.startswith(
        f"runs 2 of 32 requests: short of requests ({supply.in_flight} in flight): {why}"
    )
    assert watch.shortage == told


def test_engine_that_has_the_last_rows_is_not_starved() -> None:
    watch = Watch(hang_timeout_s=60)
    last = Supply(in_flight=2)
    assert starving(watch, reading(running=2.0), last) is None
    assert watch.shortage is None


def test_shortage_stands_for_as_long_as_it_lasts_and_is_told_once_though_figures_move() -> None:
    watch = Watch(hang_timeout_s=60)

    def look(now_s: float, queued: float, running: float = 8.0) -> str | None:
        load = reading(running=running, queued=queued)
        return watch.observe_starvation(now_s=now_s, load=load, supply=FED, cap=32)

    told = [look(0.0, 8.0), look(130.0, 8.0), look(140.0, 9.0)]
    assert [text is None for text in told] == [True, False, True]
    assert "9 wait for admission" in str(watch.shortage)
    assert look(150.0, 0.0, running=30.0) is None
    assert watch.shortage is None


def test_retraction_is_told_while_it_happens() -> None:
    watch = Watch(hang_timeout_s=60)
    told = [
        watch.observe_starvation(
            now_s=n * 70.0, load=reading(retracted=float(n)), supply=FED, cap=32
        )
        for n in range(4)
    ]
    assert "the KV pool overflows, so SGLang retracts requests" in str(told[2])


def test_engine_that_is_well_filled_is_not_starved() -> None:
    watch = Watch(hang_timeout_s=60)
    full = reading(running=30.0)
    assert all(
        watch.observe_starvation(now_s=now_s, load=full, supply=FED, cap=32) is None
        for now_s in (0.0, 500.0, 1000.0)
    )


def silences(*readings: tuple[int, int, int]) -> list[float | None]:
    watch = StartWatch(silence_s=100, busy_silence_s=500)
    return [
        watch.silence(Activity(log_bytes=log, io_bytes=io, cpu_ticks=cpu), now_s=n * 60.0)
        for n, (log, io, cpu) in enumerate(readings)
    ]


def test_start_lives_as_long_as_any_counter_moves() -> None:
    assert silences(*((n, 0, 0) for n in range(40))) == [None] * 40
    assert silences(*((0, n, 0) for n in range(40))) == [None] * 40
    assert silences((0, 0, 0), (0, 0, 0), (0, 0, 0)) == [None, None, 120.0]


def test_start_that_only_burns_cpu_is_given_up_later() -> None:
    told = silences(*((0, 0, n) for n in range(12)))
    assert told[:9] == [None] * 9
    assert told[9] == 540.0


def test_engine_starves_below_half_of_its_requests_after_two_minutes() -> None:
    def look(running: float, in_flight: int, now_s: float) -> str | None:
        watch = Watch(hang_timeout_s=60)
        supply = Supply(in_flight=in_flight, waiting=1)
        for at_s in (0.0, now_s):
            shortage = watch.observe_starvation(
                now_s=at_s, load=reading(running=running), supply=supply, cap=32
            )
        return shortage

    assert look(16, 32, 120.0) is None
    assert look(15, 32, 119.0) is None
    assert look(15, 32, 120.0) is not None
    # With half of the requests sent, the client has done its part.
    assert "between client and scheduler" in str(look(15, 16, 120.0))
    assert "rows wait to be sent" in str(look(15, 15, 120.0))
