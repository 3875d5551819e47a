"""Spans of one engine, from the engine's counters or from completions."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.engines.metered import MeteredEngine
from pipeline.engines.served import ServedEngine
from pipeline.live.meter import Meter, rounded
from pipeline.planner.sglang.metrics import EngineCounters
from schemas.completion import Interruption, Turn
from schemas.config.run_file import RunFile
from schemas.partial import PartialTurn, TokenIds
from schemas.progress import LiveSpan
from schemas.prompt import Message, Request, SamplingParams
from tests.fakes.scripted_server import Reply, ScriptedServer, completion_body, serving

TURN = Turn(
    reasoning_text="", answer_text="a", finish_reason="stop", prompt_tokens=50,
    completion_tokens=200, reasoning_tokens=None, prompt_token_ids=None,
    completion_token_ids=None, generation_boundary=None, duration_s=10.0,
)  # fmt: skip


def test_answers_are_counted_where_there_are_no_counters() -> None:
    meter = Meter()
    meter.started(8)
    first = meter.note_request(100.0)
    meter.note_request(100.0)
    assert meter.take_span(101.0) is None
    meter.note_outcome(first, TURN, 110.0)
    span = meter.take_span(115.0)
    assert span is not None
    assert (span.duration_s, span.engine_age_s, span.cap_requests) == (15.0, 0.0, 8)
    # Two run for 10 s and one for 5 s more, at the 200 tokens in 10 s of the one that ended.
    assert span.running_requests == pytest.approx(25 / 15)
    assert span.tokens_per_s == pytest.approx(20 * 25 / 15)
    assert span.prompt_tokens_per_s == pytest.approx(50 / 15)
    assert span.finished == ((200, 1),)
    # 200 tokens took 10 s: the other has run for 15 s at that pace.
    assert span.running == ((300, 1),)
    assert (span.counted_by, span.accept_length) == ("answers", None)


def test_counters_of_the_engine_are_believed_before_any_answer() -> None:
    meter = Meter()
    meter.started(8)
    at = EngineCounters(
        running_requests=4, decoded_tokens=0, prefilled_tokens=100, tokens_per_s=0,
        accept_length=2.5,
    )  # fmt: skip
    meter.note_counters(replace(at, running_requests=0), 60.0)
    for _ in range(4):
        meter.note_request(100.0)
    meter.note_counters(at, 100.0)
    meter.note_counters(replace(at, decoded_tokens=800, prefilled_tokens=300), 110.0)
    span = meter.take_span(112.0)
    assert span is not None
    assert (span.running_requests, span.tokens_per_s) == (4, 80)
    assert (span.prompt_tokens_per_s, span.accept_length) == (20, 2.5)
    # 800 tokens of four requests in 10 s, and two seconds more at that pace.
    assert span.running == ((240, 4),)
    assert span.counted_by == "engine"


def test_interrupted_attempts_are_reported_with_the_tokens_of_their_age() -> None:
    meter = Meter()
    meter.started(8)
    first, hanging, abandoned = (meter.note_request(100.0) for _ in range(3))
    meter.note_outcome(first, TURN, 110.0)
    meter.note_outcome(hanging, Interruption(cause="no answer", kind="timeout"), 115.0)
    meter.note_outcome(abandoned, None, 115.0)
    span = meter.take_span(115.0)
    assert span is not None
    # 200 tokens in 10 s of the one that ended before, for 15 s.
    assert span.interrupted == ((300, 1),)
    assert span.running == ()


def test_first_answers_that_waited_for_the_engine_do_not_slow_the_rest() -> None:
    meter = Meter()
    meter.started(4)
    first = [meter.note_request(0.0) for _ in range(4)]
    for number in first:
        # 200 tokens after 60 s, of which the model loaded for 50.
        meter.note_outcome(number, TURN, 60.0)
    for second in range(32):
        number = meter.note_request(60.0 + second)
        meter.note_outcome(number, TURN, 70.0 + second)
    meter.note_request(102.0)
    span = meter.take_span(112.0)
    assert span is not None
    assert span.running == ((200, 1),)


def test_requests_that_outlast_the_first_short_answers_keep_their_pace() -> None:
    meter = Meter()
    meter.started(4)
    for _ in range(4):
        meter.note_outcome(meter.note_request(0.0), TURN, 10.0)
    for _ in range(4):
        meter.note_request(10.0)
    span = meter.take_span(110.0)
    assert span is not None
    assert span.running == ((2000, 4),)


def test_answer_that_hung_counts_as_an_interruption_of_its_age() -> None:
    meter = Meter()
    meter.started(8)
    hung, long = meter.note_request(0.0), meter.note_request(0.0)
    for second in range(40):
        meter.note_outcome(meter.note_request(float(second)), TURN, second + 10.0)
    # 200 tokens at 20 tokens/s take 10 s; 2,000 take 100 s.
    meter.note_outcome(long, replace(TURN, completion_tokens=2000), 100.0)
    meter.note_outcome(hung, TURN, 100.0)
    span = meter.take_span(100.0)
    assert span is not None
    assert span.finished == ((200, 41), (2000, 1))
    assert span.interrupted == ((2000, 1),)


def test_spans_are_short_where_requests_are() -> None:
    meter = Meter()
    meter.started(8)
    for second in range(100):
        meter.note_outcome(meter.note_request(100.0 + second), TURN, 101.0 + second)
        meter.take_span(101.0 + second)
    meter.note_request(200.0)
    assert meter.take_span(201.0) is None
    # A tenth of a request, and at least 2 s.
    assert meter.take_span(202.1) is not None


def test_throughput_gauge_stands_in_for_a_counter() -> None:
    meter = Meter()
    meter.started(8)
    meter.note_request(0.0)
    at = EngineCounters(
        running_requests=2, decoded_tokens=None, prefilled_tokens=None, tokens_per_s=50,
        accept_length=None,
    )  # fmt: skip
    meter.note_counters(at, 0.0)
    meter.note_counters(at, 10.0)
    span = meter.take_span(10.0)
    assert span is not None
    assert span.tokens_per_s == 50


def test_engine_that_was_started_again_begins_anew() -> None:
    meter = Meter()
    meter.started(8)
    lost = meter.note_request(0.0)
    meter.stopped()
    meter.note_outcome(lost, Interruption(cause="gone", connection_failed=True), 5.0)
    assert meter.take_span(60.0) is None
    meter.started(4)
    meter.note_request(100.0)
    span = meter.take_span(103.0)
    assert span is not None
    assert (span.engine_age_s, span.cap_requests, span.running) == (0.0, 4, ((0, 1),))


def test_last_span_is_told_however_young_the_engine() -> None:
    meter = Meter()
    meter.started(8)
    assert meter.take_last_span(99.0) is None, "nothing was asked"
    number = meter.note_request(100.0)
    meter.note_outcome(number, TURN, 101.0)
    assert meter.take_span(101.0) is None
    span = meter.take_last_span(101.0)
    assert span is not None
    assert (span.duration_s, span.tokens_per_s, span.finished) == (1.0, 200.0, ((200, 1),))
    assert meter.take_last_span(101.2) is None, "nothing is left"


def test_last_span_between_two_looks_says_nothing() -> None:
    # 200 tokens end within a second of the last look: they were not written in it.
    meter = Meter()
    meter.started(8)
    number = meter.note_request(100.0)
    at = EngineCounters(
        running_requests=1, decoded_tokens=0.0, prefilled_tokens=None, tokens_per_s=0,
        accept_length=None,
    )  # fmt: skip
    meter.note_counters(at, 100.0)
    meter.note_counters(replace(at, decoded_tokens=190.0), 110.0)
    assert meter.take_span(110.0) is not None
    meter.note_outcome(number, TURN, 111.0)
    assert meter.take_last_span(111.0) is None
    meter.note_counters(replace(at, running_requests=0, decoded_tokens=200.0), 112.0)
    span = meter.take_last_span(112.0)
    assert span is not None
    assert (span.tokens_per_s, span.counted_by) == (5.0, "engine")


def test_lengths_are_kept_to_three_digits() -> None:
    assert [rounded(tokens) for tokens in (7, 999, 1234, 32_768)] == [7, 999, 1230, 32_800]


@pytest.mark.parametrize("is_idle_first", [False, True])
def test_engine_is_metered_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_idle_first: bool
) -> None:
    monkeypatch.setattr("pipeline.live.meter._SHORTEST_LAST_S", 0.01)
    script = Reply(body=completion_body("hello"), delay_s=0.02)
    with serving(ScriptedServer(script=lambda request, number: script)) as server:
        config = RunFile.model_validate(
            {
                "prompts": {"path": "p"},
                "model": "m",
                "engine": {"kind": "endpoint", "base_urls": [server.url]},
                "output": {"folder": str(tmp_path)},
            }
        )
        served = ServedEngine(config=config, worker_number=0, log_path=tmp_path / "log")
        span = asyncio.run(_metered(MeteredEngine(served=served), is_idle_first=is_idle_first))
    assert sum(count for _, count in span.finished) == 6
    assert span.cap_requests == 16
    assert span.tokens_per_s == pytest.approx(18 / span.duration_s)


async def _metered(engine: MeteredEngine, *, is_idle_first: bool) -> LiveSpan:
    await engine.start()
    sampling = SamplingParams(
        temperature=1, top_p=1, top_k=None, min_p=None, presence_penalty=None,
        repetition_penalty=None, max_tokens=8, seed=None,
    )  # fmt: skip
    question = (Message(role="user", content="hi"),)
    request = Request(
        row_id="r", sample_index=0, turn_index=0, messages=question, sampling=sampling
    )
    asked = [asyncio.create_task(engine.generate(request)) for _ in range(6)]
    await asyncio.sleep(0)
    assert await engine.idle_span() is None, "it is not idle"
    await asyncio.gather(*asked)
    assert engine.take_span() is None, "too young for a span of its own accord"
    if is_idle_first:
        idle = await engine.idle_span()
        assert idle is not None
        await engine.stop()
        assert engine.last_span() is None, "all is told"
        return idle
    await engine.stop()
    last = engine.last_span()
    assert last is not None
    span, ended_ago_s = last
    assert 0.0 <= ended_ago_s < 1.0
    assert engine.take_span() is None
    assert engine.last_span() is None
    return span


# --- details -----------------------------------------------------------------------------------

COUNTERS = EngineCounters(
    running_requests=2, decoded_tokens=0.0, prefilled_tokens=None, tokens_per_s=0,
    accept_length=None,
)  # fmt: skip


def running_meter() -> Meter:
    meter = Meter()
    meter.started(8)
    return meter


@pytest.mark.parametrize("outcome", [None, Interruption(cause="x", connection_failed=False)])
def test_request_without_a_completion_counts_only_while_it_runs(
    outcome: Interruption | None,
) -> None:
    meter = running_meter()
    number = meter.note_request(0.0)
    meter.note_outcome(number, outcome, 4.0)
    assert meter.is_idle
    span = meter.take_span(10.0)
    assert span is not None
    assert (span.running_requests, span.tokens_per_s, span.finished) == (0.4, 0.0, ())


def test_completion_of_an_unknown_request_or_without_a_count_is_not_counted() -> None:
    meter = running_meter()
    number = meter.note_request(0.0)
    meter.note_outcome(99, TURN, 1.0)
    meter.note_outcome(number, replace(TURN, completion_tokens=None), 2.0)
    span = meter.take_span(10.0)
    assert span is not None
    assert (span.tokens_per_s, span.finished) == (0.0, ())


@pytest.mark.parametrize(
    ("before", "after", "rate"),
    [
        (100.0, 300.0, 20.0),
        # Reset to 0 in between.
        (300.0, 200.0, 20.0),
        # On one side only: the gauge is used.
        (None, 300.0, 7.0),
        (300.0, None, 7.0),
    ],
)
def test_counter_counts_between_two_scrapes(
    before: float | None, after: float | None, rate: float
) -> None:
    meter = running_meter()
    meter.note_request(0.0)
    meter.note_counters(replace(COUNTERS, decoded_tokens=before, tokens_per_s=7.0), 0.0)
    meter.note_counters(replace(COUNTERS, decoded_tokens=after, tokens_per_s=7.0), 10.0)
    span = meter.take_span(10.0)
    assert span is not None
    assert (span.tokens_per_s, span.running_requests) == (rate, 2.0)


def test_running_requests_are_the_mean_of_two_scrapes() -> None:
    meter = running_meter()
    meter.note_request(0.0)
    meter.note_counters(COUNTERS, 0.0)
    meter.note_counters(replace(COUNTERS, running_requests=6, decoded_tokens=80.0), 10.0)
    span = meter.take_span(10.0)
    assert span is not None
    assert span.running_requests == 4.0
    # 80 tokens in 40 request seconds: the one in flight is 10 s old.
    assert span.running == ((20, 1),)


def test_spans_of_an_engine_grow_with_its_age() -> None:
    meter = running_meter()
    meter.note_request(0.0)
    ends = [second for second in range(200) if meter.take_span(float(second)) is not None]
    # At least 2 s, then half the age, at most 30 s.
    assert ends == [2, 4, 6, 9, 14, 21, 32, 48, 72, 102, 132, 162, 192]


def test_card_and_cap_are_in_the_span_and_a_short_last_span_is_dropped() -> None:
    meter = running_meter()
    meter.card = "H200"
    meter.note_request(0.0)
    assert meter.take_last_span(0.4) is None
    span = meter.take_last_span(0.6)
    assert span is not None
    assert (span.card, span.cap_requests, span.duration_s) == ("H200", 8, 0.6)


def test_tokens_before_the_counters_were_first_read_count_at_the_first_pace() -> None:
    meter = Meter()
    meter.started(8)
    for _ in range(4):
        meter.note_request(100.0)
    at = EngineCounters(
        running_requests=4, decoded_tokens=320, prefilled_tokens=0, tokens_per_s=0,
        accept_length=None,
    )  # fmt: skip
    meter.note_counters(at, 104.0)
    meter.note_counters(replace(at, decoded_tokens=480), 106.0)
    span = meter.take_span(106.0)
    assert span is not None
    # 160 tokens in 2 s are 20 tokens/s for each of the four, which have run for 6 s.
    assert span.running == ((120, 4),)


def test_rest_of_a_turn_counts_by_what_is_generated_here_and_its_length_by_the_whole() -> None:
    meter = Meter()
    meter.started(8)
    # 150 of the 200 tokens came from an engine before: 50 in 10 s here.
    rest = meter.note_request(100.0, begun_tokens=150)
    meter.note_request(100.0, begun_tokens=40)
    meter.note_outcome(rest, TURN, 110.0)
    span = meter.take_span(120.0)
    assert span is not None
    assert span.finished == ((200, 1),)
    assert span.tokens_per_s == pytest.approx(5 * (20 + 10) / 20)
    assert span.running == ((40 + 5 * 20, 1),)
    # The engine reads the prompt and the first part again.
    assert span.prompt_tokens_per_s == pytest.approx((50 + 150) / 20)


def test_request_that_was_aborted_and_kept_is_no_failure() -> None:
    kept = PartialTurn(
        prompt_token_ids=TokenIds("i"), completion_token_ids=TokenIds("i", [1]),
        reasoning_tokens=None, is_thinking=False, duration_s=1.0,
    )  # fmt: skip
    meter = Meter()
    meter.started(8)
    for so_far in (kept, None):
        number = meter.note_request(100.0)
        meter.note_outcome(number, Interruption(cause="abort", so_far=so_far), 110.0)
    span = meter.take_span(120.0)
    assert span is not None
    assert sum(count for _, count in span.interrupted) == 1
